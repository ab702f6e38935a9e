"""Training groups without arrays."""

from __future__ import annotations

from akl_dist.contract.records import (
    JudgedGroup,
    LabelledGroup,
    Prompt,
    ReferenceGroup,
    RolloutGroup,
    Status,
    TrainingGroup,
    Verdict,
)


def training_group(
    name: str, *, lengths: tuple[int, ...], advantages: tuple[float, ...], trains: tuple[bool, ...], arrays: object = None
) -> TrainingGroup:
    zeros = (0.0,) * len(lengths)
    rollout = RolloutGroup(Prompt(name, "test", "", (1, 2), ""), lengths, ("stop",) * len(lengths), 0, "engine", arrays)
    judged = JudgedGroup(name, tuple(Verdict(Status.OK if one else Status.TIMEOUT) for one in trains), (0,) * len(lengths), None)
    labelled = LabelledGroup(rollout, judged, ReferenceGroup(name, zeros, zeros, None), (0,) * len(lengths), (0,) * 8, None)
    return TrainingGroup(labelled, advantages, trains)
