"""Majority vote over the answers to one problem: which of them are the same answer, and whether the one given most is right.

Pure; one rule for the evaluation command and for evaluations in training.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from akl_dist.contract.records import Status
from akl_dist.verify.normalize import canonical, identity_key
from akl_dist.verify.quantity import TooLarge, parse_quantity

VoteKey = tuple[str, object]
RIGHT: VoteKey = ("right", None)  # every answer that is judged equal to the gold
LONGEST = 300  # characters; a longer answer is the same as another only letter by letter


def vote_key(status: Status, extracted: str | None) -> VoteKey | None:
    """Equal keys are one answer: all that equal the gold, the same number in any spelling, the same normalised text. None: no
    vote."""
    if status is Status.OK:
        return RIGHT
    if status is Status.NO_ANSWER or not extracted:
        return None
    if len(extracted) > LONGEST:
        return ("text", extracted)
    text = canonical(extracted)
    try:
        quantity = parse_quantity(text)
    except (TooLarge, ArithmeticError, ValueError):
        quantity = None
    return ("text", identity_key(text)) if quantity is None else ("number", quantity.value)


def majority(answers: Sequence[tuple[Status, str | None]]) -> float | None:
    """maj@k of one problem, from status and extracted answer of each sample: whether the answer given most often is right; a tie is
    the share of right ones among those tied (the expectation of a fair draw). Samples with no answer do not vote, those without a
    verdict are left out; None when none has a verdict."""
    decided = [(status, extracted) for status, extracted in answers if status.trains]
    if not decided:
        return None
    ballots = collections.Counter(key for answer in decided if (key := vote_key(*answer)) is not None)
    if not ballots:
        return 0.0
    most = max(ballots.values())
    winners = [key for key, count in ballots.items() if count == most]
    return (RIGHT in winners) / len(winners)
