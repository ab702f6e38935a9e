"""What a verdict trains with, and what it says without further terms."""

from __future__ import annotations

from akl_dist.contract.records import Status, Verdict


def test_reward_and_outcome() -> None:
    assert [(v.reward, v.outcome) for v in (Verdict(Status.OK), Verdict(Status.WRONG), Verdict(Status.NO_ANSWER))] == [
        (1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]
    scored = Verdict(Status.WRONG, score=0.25)
    assert (scored.reward, scored.outcome, scored.correct) == (0.25, 0.25, False)
    summed = Verdict(Status.OK, score=1.1, terms=(("verdict", 1.0), ("format", 1.0)))
    assert (summed.reward, summed.outcome, summed.correct) == (1.1, 1.0, True)


def test_no_verdict_is_no_zero() -> None:
    for status in (Status.TIMEOUT, Status.ERROR, Status.INVALID_GOLD):
        verdict = Verdict(status, score=0.5, terms=(("verdict", 0.5),))
        assert (verdict.reward, verdict.outcome, verdict.correct) == (None, None, None)
