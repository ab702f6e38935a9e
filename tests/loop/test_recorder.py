"""What a person is warned about at the console, and that each warning comes once."""

from __future__ import annotations

import pytest

from akl_dist.config.resolve import kl_roles
from akl_dist.config.schema import KLConfig
from akl_dist.recorder import CONSTANT_REWARD_STEPS, QUIET_KL_STEPS, Alarms, vote_report

BOTH = KLConfig()  # both roles have a beta


def lines_of(rows, *, kl=BOTH) -> list[str]:
    """What is said over steps with these metrics."""
    said: list[str] = []
    alarms = Alarms(said.append, kl_roles=kl_roles(kl))
    for step, metrics in enumerate(rows, 1):
        alarms.check(step, dict(metrics))
    return said


def activity(reasoning: float, answer: float) -> dict[str, float]:
    return {"objective/kl_activity_reasoning": reasoning, "objective/kl_activity_answer": answer}


def votes(*counts: int) -> dict[str, float]:
    return {f"roles/votes_{index:03b}": count for index, count in enumerate(counts)}


def test_a_role_whose_kl_does_nothing_is_named_once():
    (line,) = lines_of([activity(0.009, 0.3)] * (2 * QUIET_KL_STEPS))
    assert "reasoning" in line and "beta_reasoning" in line and "below 1%" in line
    assert len(lines_of([activity(0.009, 0.009)] * QUIET_KL_STEPS)) == 2


@pytest.mark.parametrize("rows", [
    [activity(0.009, 0.3)] * (QUIET_KL_STEPS - 1),
    ([activity(0.009, 0.3)] * (QUIET_KL_STEPS - 1) + [activity(0.01, 0.3)]) * 2,  # not in a row
    [{}] * (2 * QUIET_KL_STEPS),
])
def test_a_kl_that_acts_now_and_then_is_not(rows):
    assert lines_of(rows) == []


def test_steps_without_a_policy_gradient_do_not_count_and_do_not_interrupt():
    rows = [activity(0.009, 0.3), {}] * QUIET_KL_STEPS
    assert len(lines_of(rows)) == 1 and lines_of(rows[:-2]) == []


def test_roles_without_a_beta_have_nothing_to_warn_of():
    rows = [activity(0.0, 0.0)] * (2 * QUIET_KL_STEPS)
    assert lines_of(rows, kl=KLConfig(beta_reasoning=0.0, beta_answer=0.0)) == []
    (line,) = lines_of(rows, kl=KLConfig(beta_reasoning=0.0))
    assert "answer" in line
    assert lines_of(rows, kl=KLConfig(beta_reasoning=1.0, beta_answer=0.0, strength="equal")) == []


def test_the_key_that_is_named_is_the_one_that_acts():
    """With one strength for both roles that is beta_answer; matched, the two together."""
    reasoning, answer = "objective.kl.beta_reasoning", "objective.kl.beta_answer"
    rows = [activity(0.0, 0.3)] * QUIET_KL_STEPS
    for strength, keys in (("roles", reasoning), ("equal", answer), ("matched", f"{reasoning} or {answer}")):
        (line,) = lines_of(rows, kl=KLConfig(strength=strength))
        assert "reasoning tokens" in line and line.endswith(f"Raise {keys}.")


def test_likelihood_ratios_of_the_votes_by_hand():
    """Votes (position, entropy, verifier): 8 tokens 000, 2 of 010, 1 of 011, 1 of 111. Answer: the last two. P(entropy | answer) is
    1, P(entropy | reasoning) 2/10: 5; nobody else ever votes on reasoning."""
    (said,) = lines_of([votes(8, 0, 2, 1, 0, 0, 0, 1)] * 3)
    assert said.splitlines()[-1] == ("  P(vote | answer) / P(vote | reasoning): position never on reasoning, entropy 5.0, "
                                     "verifier never on reasoning")


def test_the_agreement_table_by_hand():
    """The same votes. Position and entropy agree on 000 and 111: 9 of 12; position and verifier on all but 011, entropy and
    verifier on all but 010."""
    said = vote_report(1, (8, 0, 2, 1, 0, 0, 0, 1)).splitlines()
    assert said[0] == "role votes of step 1: 2 of 12 tokens have two votes or more"
    assert said[1].split() == ["position", "entropy", "verifier", "tokens", "share"]
    rows = [line.split() for line in said[2:10]]
    assert [row[:3] for row in rows[:4]] == [[*"..."], [*"x.."], [*".x."], [*"..x"]]
    assert {"".join(row[:3]): (int(row[3]), row[4]) for row in rows if row[3] != "0"} == {
        "...": (8, "66.7"), ".x.": (2, "16.7"), ".xx": (1, "8.3"), "xxx": (1, "8.3")}
    assert said[10] == ("  the same vote on a token: position and entropy 75.0%, position and verifier 91.7%, "
                        "entropy and verifier 83.3%")
    assert len(said) == 12 and max(map(len, said)) < 120 and "\n".join(said).isascii()


def test_a_vote_that_does_not_tell_the_roles_apart_is_warned_about():
    """Entropy votes on 9 of 10 reasoning tokens and on every answer token: 1 / .9 = 1.11."""
    said = lines_of([votes(1, 0, 9, 0, 0, 0, 0, 2)] * 2)
    assert len(said) == 2 and "entropy 1.1" in said[0] and "ratio 1.11 below 1.2" in said[1]
    said = lines_of([votes(5, 0, 5, 0, 0, 0, 0, 2)])  # negative control: 2
    assert len(said) == 1 and "entropy 2.0" in said[0]
    assert lines_of([votes(5, 0, 5, 0, 0, 0, 0, 0)]) == ["role votes: no token has the role answer in this step"]


def test_too_many_answer_tokens():
    assert lines_of([{"roles/answer_fraction": 0.3}]) == []
    (line,) = lines_of([{"roles/answer_fraction": 0.31}] * 3)
    assert "31%" in line and "30%" in line


def test_constant_reward():
    assert lines_of([{"verify/accuracy": 1.0}] * (CONSTANT_REWARD_STEPS - 1) + [{"verify/accuracy": 0.9}]) == []
    (line,) = lines_of([{"verify/accuracy": 0.0}] * CONSTANT_REWARD_STEPS)
    assert "constant" in line
