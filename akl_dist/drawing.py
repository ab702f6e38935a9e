"""The drawing of one step's groups: prompts, responses, and, with dynamic sampling, the replacement of groups without spread.

Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): a group whose verdicts are all alike has no group-relative signal, so its
slot in the batch goes to a further prompt's group. Bounded: after ``rollout.dynamic_sampling_rounds`` further draws the
groups that are left keep their slots, and the batch always has ``rollout.prompts_per_step`` groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from akl_dist.contract.records import JudgedGroup, Prompt, RolloutGroup, Sampling
from akl_dist.contract.stages import RolloutStage, VerifyStage
from akl_dist.objective.shaping import keep_group
from akl_dist.spans import Spans


class PromptTaker(Protocol):
    """Where prompts come from; its position is part of a checkpoint."""

    def take(self, n: int) -> list[Prompt]: ...

    def state(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Drawing:
    """Groups that a step trains on.

    ``judged()`` gives their verdicts, in the same order; without dynamic sampling it waits for the graders, who work until
    then. ``left_out`` are the verdicts of groups that were drawn and do not train; accuracy counts them, since a batch that
    was selected by its verdicts does not tell the policy's accuracy.
    """

    rollouts: list[RolloutGroup]
    judged: Callable[[], list[JudgedGroup]]
    left_out: tuple[JudgedGroup, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


def draw(
    prompts: PromptTaker, rollout: RolloutStage, verify: VerifyStage, sampling: Sampling, spans: Spans, *, count: int, rounds: int
) -> Drawing:
    """``count`` groups, of which those without spread in the raw outcome were replaced in up to ``rounds`` further draws.

    Args:
        sampling: of the first draw; further ones append their number to its seed key.
        spans: where time in the rollout and verify stages is counted.
    """
    with spans.measure("rollout"):
        taken = prompts.take(count)
    rollouts, ticket = _sampled(rollout, verify, taken, sampling, spans)
    if rounds == 0:
        return Drawing(rollouts, judged=lambda: verify.collect(ticket))
    with spans.measure("verify"):
        judged = verify.collect(ticket)
    return _with_replacements(prompts, rollout, verify, sampling, spans, rollouts, judged, rounds)


def _sampled(
    rollout: RolloutStage, verify: VerifyStage, prompts: Sequence[Prompt], sampling: Sampling, spans: Spans
) -> tuple[list[RolloutGroup], Any]:
    """The prompts' groups, and the ticket of their verdicts: each group is judged while later ones are sampled."""
    stream = verify.stream()
    with spans.measure("rollout"):
        rollouts = rollout.sample(prompts, sampling, stream.add)
    return rollouts, stream.ticket(rollouts)


def _with_replacements(
    prompts: PromptTaker, rollout: RolloutStage, verify: VerifyStage, sampling: Sampling, spans: Spans,
    rollouts: list[RolloutGroup], judged: list[JudgedGroup], rounds: int,
) -> Drawing:
    """Fill the slots of groups without spread with groups of further prompts that have one, in the order drawn."""
    rollouts, judged = list(rollouts), list(judged)
    open_slots = [slot for slot, group in enumerate(judged) if not has_spread(group)]
    found, seen = len(open_slots), {group.prompt_id for group in judged}
    left_out: list[JudgedGroup] = []
    discarded_tokens = used = 0
    for number in range(1, rounds + 1):
        if not open_slots:
            break
        # A prompt that this step has drawn before (few prompts, many rounds) is passed over.
        fresh = [prompt for prompt in prompts.take(len(open_slots)) if prompt.prompt_id not in seen]
        if not fresh:
            continue
        used += 1
        seen |= {prompt.prompt_id for prompt in fresh}
        further = replace(sampling, seed_key=(*sampling.seed_key, number))
        drawn, ticket = _sampled(rollout, verify, fresh, further, spans)
        with spans.measure("verify"):
            verdicts = verify.collect(ticket, earlier=[*judged, *left_out])
        for new, verdict in zip(drawn, verdicts, strict=True):
            loser, its_verdict = new, verdict
            if has_spread(verdict):
                slot = open_slots.pop(0)
                loser, its_verdict = rollouts[slot], judged[slot]
                rollouts[slot], judged[slot] = new, verdict
            left_out.append(its_verdict)
            discarded_tokens += sum(loser.sampled_lengths)
    metrics = {"rollout/dynamic_rounds": used, "rollout/dynamic_replaced_groups": found - len(open_slots),
               "rollout/dynamic_zero_spread_left": len(open_slots), "rollout/discarded_tokens": discarded_tokens}
    return Drawing(rollouts, lambda: judged, tuple(left_out), metrics)


def has_spread(group: JudgedGroup) -> bool:
    """Whether the raw outcomes differ; what a length penalty or further terms add does not count."""
    return keep_group([verdict.outcome for verdict in group.verdicts])

