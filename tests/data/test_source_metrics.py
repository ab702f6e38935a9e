"""Training metrics of each source of a step."""

from __future__ import annotations

from akl_dist.contract.records import JudgedGroup, Prompt, RolloutGroup, Status, Turns, Verdict
from akl_dist.summaries import source_metrics


def group(source: str, number: int, lengths: tuple[int, ...], statuses: list[Status], turns: tuple[Turns, ...] = ()):
    prompt = Prompt(f"{source}/{number}", source, "p", (1,), "1")
    rollout = RolloutGroup(prompt, lengths, ("stop",) * len(lengths), 0, "e", None, turns)
    return rollout, JudgedGroup(prompt.prompt_id, tuple(Verdict(s) for s in statuses), (0,) * len(lengths), None)


def test_by_hand():
    rows = [group("a", 0, (10, 20), [Status.OK, Status.WRONG]), group("b", 0, (5, 7), [Status.ERROR, Status.TIMEOUT]),
            group("a", 1, (30, 40), [Status.OK, Status.TIMEOUT])]
    # a: right 2 of the 3 that have a verdict, 100 tokens in 4 responses; b has no verdict
    assert source_metrics([r for r, _ in rows], [j for _, j in rows]) == {
        "rollout/a/prompts": 2, "rollout/a/response_tokens_mean": 25.0, "verify/a/accuracy": 2 / 3,
        "rollout/b/prompts": 1, "rollout/b/response_tokens_mean": 6.0}


def test_a_step_of_one_source_has_none():
    rows = [group("a", n, (10,), [Status.OK]) for n in range(3)]
    assert source_metrics([r for r, _ in rows], [j for _, j in rows]) == {}


def test_what_an_environment_wrote_does_not_count():
    rows = [group("a", 0, (10,), [Status.OK], (Turns((3, 5, 2)),)), group("b", 0, (4,), [Status.OK])]
    assert source_metrics([r for r, _ in rows], [j for _, j in rows])["rollout/a/response_tokens_mean"] == 5.0
