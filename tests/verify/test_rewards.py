"""Rewards of one's own in the killable graders: what hangs, dies or answers nonsense costs one judgement."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from verify_examples import byte_level_tokenizer, group_of

from akl_dist.config.schema import RolesConfig, VerifyConfig
from akl_dist.contract.errors import UserError, VerifierFault
from akl_dist.contract.records import Prompt, Status, Turns, Verdict
from akl_dist.sandbox.client import Sandbox, SandboxFault
from akl_dist.summaries import reward_metrics
from akl_dist.verify.code import gold_text
from akl_dist.verify.grader import GraderPool
from akl_dist.verify.rewards import (
    RewardItem,
    RewardJudge,
    RewardSettings,
    environment_verdict,
    fault_of,
    reward_item,
    settled_verdict,
    well_formed,
)
from akl_dist.verify.worker import VerifyWorker, grader_options

BOX = "<think>7+9</think>\\boxed{16}"


def custom(function: str, **keys) -> VerifyConfig:
    return VerifyConfig(**({"kind": "custom", "custom": f"reward_fakes:{function}", "timeout_s": 20.0} | keys))


def graders(config: VerifyConfig, *kinds: str, num_workers: int = 1) -> GraderPool:
    return GraderPool(num_workers=num_workers, **grader_options(config, kinds))


def judge_of(config: VerifyConfig, *kinds: str) -> RewardJudge:
    return RewardJudge(RewardSettings.from_json(RewardSettings.of(config, kinds).to_json()))


def judged(config: VerifyConfig, text: str, gold: str = "a", **fields) -> Verdict:
    return judge_of(config).judge(RewardItem(gold, text, False, **fields))


def items(*texts: str, gold: str = "a") -> list[RewardItem]:
    return [RewardItem(gold, text, False) for text in texts]


def test_what_hangs_dies_or_raises_has_no_verdict_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setenv("OWN_SETTING", "there")
    with graders(custom("commanded", timeout_s=2.0)) as pool:
        texts = ["a", "hang", "crash", "exit", "raise", "odd", "b", "number nan", "number inf", "number 3",
                 "environment OWN_SETTING"]
        start = time.monotonic()
        verdicts = pool.judge_many(items(*texts))
        assert time.monotonic() - start < 30
    assert [v.status.value for v in verdicts] == [
        "ok", "timeout", "error", "error", "error", "error", "wrong", "error", "error", "ok", "wrong"]
    assert [v.reward for v in verdicts] == [1.0, *[None] * 5, 0.0, None, None, 3.0, 0.5]
    assert "exit code 7" in verdicts[2].reason and "exit code 0" in verdicts[3].reason
    assert "commanded raised ValueError" in verdicts[4].reason and "Odd" in verdicts[5].reason and "nan" in verdicts[7].reason
    assert verdicts[10].extracted == "there", "code of one's own has the environment of the command"


@pytest.mark.parametrize("frame", ["forged", "other", "no-json", "huge"])
def test_what_a_reward_writes_into_the_pipe_is_no_verdict(frame):
    """Its own judgement has none; those beside it keep theirs."""
    texts = ["a", "b", f"write {frame}", "b", "a", "b"]
    with graders(custom("commanded")) as pool:
        verdicts = pool.judge_many(items(*texts))
        again = pool.judge_many(items("a", "b"))
    assert [v.status.value for v in verdicts] == ["ok", "wrong", "error", "wrong", "ok", "wrong"]
    assert "no reply" in verdicts[2].reason and [v.status.value for v in again] == ["ok", "wrong"]


def test_a_reward_finds_an_empty_stdin():
    with graders(custom("commanded")) as pool:
        verdicts = pool.judge_many(items("a", "read", "b"))
    assert [v.reward for v in verdicts] == [1.0, 0.5, 0.0] and verdicts[1].extracted == "."


def test_a_fork_that_comes_back_answers_nothing():
    """Two answers to one question would put every later verdict on the wrong response."""
    texts = [text for n in range(10) for text in ("fork a", "b", "fork b", "a")]
    with graders(custom("commanded")) as pool:
        verdicts = pool.judge_many(items(*texts))
        assert pool.counters()["kills"] == pool.counters()["crashes"] == 0
    assert [v.status.value for v in verdicts] == ["ok", "wrong", "wrong", "ok"] * 10


def test_an_ordinary_exception_or_much_print_costs_no_grader():
    """200 judgements that print 100 kB each pass the limit of the log; a restart for each exception would cost seconds."""
    with graders(custom("commanded")) as pool:
        verdicts = pool.judge_many(items("pid", *["raise"] * 5, *["print"] * 200, "pid"))
    assert verdicts[0].extracted == verdicts[-1].extracted
    assert {v.status for v in verdicts[1:6]} == {Status.ERROR} and {v.status for v in verdicts[6:-1]} == {Status.WRONG}


def test_coroutines_are_awaited():
    assert judged(custom("awaited"), "a") == Verdict(Status.OK, score=1.0)
    assert judged(custom("awaited", right_at=0.25), "b").status is Status.OK
    assert judged(custom("awaited"), "b") == Verdict(Status.WRONG, score=0.25)


def test_every_keyword_arrives():
    prompt = Prompt("s/1", "s", "what", (1,), "gold", extra='{"k": 2}')
    item = reward_item(prompt, "abc", truncated=True, think_open=False, transcript="all of it")
    verdict = judge_of(custom("everything")).judge(item)
    assert verdict.reason == "abc|gold|what|[('k', 2)]|True|s|all of it"
    assert (verdict.extracted, verdict.span) == ("b", (1, 2))
    one_turn = reward_item(prompt, "abc", truncated=False, think_open=False)
    assert judge_of(custom("everything")).judge(one_turn).reason.endswith("|abc")
    assert judged(custom("everything"), "x", extra="[1]").status is Status.ERROR


def test_functions_of_verl_and_openrlhf():
    verl = custom("compute_score", signature="verl")
    right, wrong = judged(verl, "a", source="s", extra='{"index": 1}'), judged(verl, "b")
    assert (right.status, right.reward, right.reason) == (Status.OK, 0.75, "s {'index': 1}"), "right by acc, below right_at or not"
    assert (wrong.status, wrong.reward) == (Status.WRONG, -1.0)
    nested = judged(verl, "a", extra='{"data_source": "d", "extra_info": {"index": 2}}')
    assert nested.reason == "d {'index': 2}"
    openrlhf = custom("reward_func", signature="openrlhf")
    right, wrong = judged(openrlhf, "a", prompt="what", rendered="<user>what<assistant>"), judged(openrlhf, "b", prompt="what")
    assert (right.status, right.reward) == (Status.OK, 2.0) and (wrong.status, wrong.reward) == (Status.WRONG, -2.0)


def test_the_standard_extractor_says_where_the_answer_stands():
    verdict = judged(custom("share_of_a"), BOX)
    assert verdict.extracted == "16" and BOX[slice(*verdict.span)] == "16" and verdict.score == 0.0


TERMS = {"format": {"weight": 0.1}, "a": {"custom": "reward_fakes:share_of_a", "weight": -0.5}}


def test_the_reward_is_the_verdict_plus_its_terms():
    """'aa' of 4 characters: a = 0.5. Right: 1 + 0.1 * 0 - 0.5 * 0.5 = 0.75; wrong: -0.25. The formatted right answer holds no a."""
    config = VerifyConfig(terms=TERMS)
    plain = judge_of(config).judge(RewardItem("16", "aa: #### 16", False))
    assert plain.status is Status.OK and plain.terms == (("verdict", 1.0), ("format", 0.0), ("a", 2 / 11))
    assert plain.reward == pytest.approx(1 - 0.5 * 2 / 11)
    formatted = judge_of(config).judge(RewardItem("16", BOX, False))
    assert formatted.terms == (("verdict", 1.0), ("format", 1.0), ("a", 0.0)) and formatted.reward == pytest.approx(1.1)
    wrong = judge_of(config).judge(RewardItem("15", BOX, False))
    assert (wrong.status, wrong.correct, wrong.reward) == (Status.WRONG, False, pytest.approx(0.1))
    nothing = judge_of(config).judge(RewardItem("15", "aaaa", False))
    assert (nothing.status, nothing.reward) == (Status.NO_ANSWER, pytest.approx(-0.5))


def test_a_term_without_a_verdict_leaves_none():
    terms = {"t": {"custom": "reward_fakes:commanded", "weight": 0.1}}
    found = judge_of(VerifyConfig(terms=terms)).judge(RewardItem("16", f"raise {BOX}", False))
    assert (found.status, found.reward, found.terms) == (Status.ERROR, None, ()) and "term t: " in found.reason
    with graders(VerifyConfig(terms=terms, timeout_s=2.0)) as pool:
        hung, fine = pool.judge_many([RewardItem("16", f"hang {BOX}", False), RewardItem("16", BOX, False)])
    assert (hung.status, hung.reward) == (Status.TIMEOUT, None)
    assert fine.terms == (("verdict", 1.0), ("t", 0.0)), "terms cross the pipe"


def test_a_term_outside_its_range_is_an_error_unless_it_says_so():
    long = "x" * 2000 + BOX
    term = {"custom": "reward_fakes:thousands", "weight": -0.1}
    refused = judge_of(VerifyConfig(terms={"t": term})).judge(RewardItem("16", long, False))
    assert refused.status is Status.ERROR and "verify.terms.t.unbounded" in refused.reason
    allowed = judge_of(VerifyConfig(terms={"t": term | {"unbounded": True}})).judge(RewardItem("16", long, False))
    assert allowed.reward == pytest.approx(1 - 0.1 * len(long) / 1000)


def test_metrics_are_means_over_verdicts():
    verdicts = [Verdict(Status.OK, score=1.1, terms=(("verdict", 1.0), ("a", 0.5))),
                Verdict(Status.WRONG, score=0.0, terms=(("verdict", 0.0), ("a", 0.0)))]
    assert reward_metrics(verdicts) == {
        "verify/term_verdict": 0.5, "verify/term_a": 0.25, "verify/reward_mean": pytest.approx(0.55)}
    assert reward_metrics([Verdict(Status.OK)]) == {}


@pytest.mark.parametrize(("text", "think_open", "right"), [
    (BOX, False, True), ("7+9</think>\\boxed{16}", True, True), ("\\boxed{16}", False, False), ("<think>7+9", False, False),
    ("<think>a</think><think>b</think>\\boxed{1}", False, False), ("<think>a</think>16", False, False),
    (BOX, True, False), ("</think>a<think>\\boxed{1}", False, False)])
def test_format(text, think_open, right):
    assert well_formed(RewardItem("", text, False, think_open)) is right
    assert not well_formed(RewardItem("", text, True, think_open)), "truncated"


def test_format_counts_a_fence_for_programs_only():
    fenced = RewardItem("", "<think>a</think>\n```python\nx = 1\n```", False)
    assert well_formed(fenced, "code") and not well_formed(fenced, "math")


def test_mixtures_choose_by_the_prompt():
    config = VerifyConfig(custom="reward_fakes:share_of_a", timeout_s=20.0)
    judge = judge_of(config, "math", "custom")
    by_kind = {kind: judge.judge(RewardItem("16", BOX + "aa", False, kind=kind)) for kind in ("", "math", "custom", "http")}
    assert [v.status.value for v in by_kind.values()] == ["ok", "ok", "wrong", "error"]
    assert by_kind["custom"].score == pytest.approx(2 / 30) and "expected one of custom, math" in by_kind["http"].reason


def test_through_the_worker(tmp_path):
    """Two prompts of one mixture, with terms: items, statuses, scores and answer spans."""
    tokenizer = byte_level_tokenizer(tmp_path / "t")
    groups = [group_of(tokenizer, [BOX, "aaaa"], gold="16"), group_of(tokenizer, ["aaaa", "bbbb"], gold="-")]
    own = groups[1].prompt
    object.__setattr__(own, "verifier", "custom")
    config = VerifyConfig(custom="reward_fakes:share_of_a", timeout_s=20.0, terms={"format": {"weight": 0.25}})
    worker = VerifyWorker(str(tmp_path / "t"), end_ids=(0,), config=config, roles=RolesConfig(), kinds=("math", "custom"))
    try:
        first, second = worker.judge(groups, [group.arrays for group in groups])
    finally:
        worker.close()
    assert [v.reward for v in first.verdicts] == [1.25, 0.0] and [v.reward for v in second.verdicts] == [1.0, 0.0]
    assert first.verdicts[0].terms == (("verdict", 1.0), ("format", 1.0)) and first.answer_span_tokens[0] == 1


def test_programs_beside_math_and_terms():
    """A mixture of both built-in verifiers in one pool, each held against its probes, with a term on top."""
    try:
        Sandbox().close()
    except SandboxFault:
        pytest.skip("this machine allows no isolation")
    tests = gold_text("instruct_function", {"entry_point": "add", "asserts": ["assert add(1, 2) == 3"]})
    program = "<think>a</think>\n```python\ndef add(a, b):\n    return a + b\n```"
    with graders(VerifyConfig(terms={"format": {"weight": 0.1}}, timeout_s=10.0), "math", "code") as pool:
        assert pool.isolation
        right, wrong, math = pool.judge_many([
            RewardItem(tests, program, False, kind="code"), RewardItem(tests, program.replace("+", "-"), False, kind="code"),
            RewardItem("16", BOX, False, kind="math")])
    assert [v.status for v in (right, wrong, math)] == [Status.OK, Status.WRONG, Status.OK]
    assert [v.reward for v in (right, wrong, math)] == [pytest.approx(1.1), pytest.approx(0.1), pytest.approx(1.1)]


def test_environment_verdicts():
    turns = Turns((3, 2, 4), score=0.5)
    assert environment_verdict(turns, right_at=0.5) == Verdict(Status.OK, score=0.5)
    assert environment_verdict(turns, right_at=1.0, response_text=BOX) == Verdict(Status.WRONG, "16", (25, 27), score=0.5)
    assert environment_verdict(Turns((3,), score=float("nan")), right_at=1.0).status is Status.ERROR
    assert environment_verdict(Turns((3,)), right_at=1.0).status is Status.ERROR
    assert environment_verdict(Turns((3,)), right_at=1.0, truncated=True).reward == 0.0
    broken = Turns((3,), score=1.0, fault="it died")
    assert environment_verdict(broken, right_at=1.0) == fault_of(broken) == Verdict(Status.ERROR, reason="environment: it died")
    assert fault_of(turns) is None and fault_of(None) is None


def test_which_responses_need_no_grader():
    rest = {"right_at": 1.0, "truncated": False, "response_text": BOX}
    scored, broken = Turns((3, 2, 4), score=1.0), Turns((3,), fault="it died")
    assert settled_verdict("math", scored, **rest) is None and settled_verdict("custom", None, **rest) is None
    assert settled_verdict("math", broken, **rest) == settled_verdict("environment", broken, **rest) == fault_of(broken)
    assert settled_verdict("environment", scored, **rest) == Verdict(Status.OK, "16", (25, 27), score=1.0)
    assert settled_verdict("environment", None, **rest).status is Status.ERROR


def test_environments_settle_verdicts_in_the_worker(tmp_path):
    """Of one group: a scored response, one whose environment failed, one that a grader would have called right."""
    tokenizer = byte_level_tokenizer(tmp_path / "t")
    group = group_of(tokenizer, [BOX, BOX, "\\boxed{16}"], gold="16")
    lengths = group.response_lengths
    turns = (Turns((lengths[0],), score=0.25), Turns((lengths[1],), fault="it died"), Turns((lengths[2],), score=1.0))
    group = replace(group, turns=turns)
    own = replace(group, prompt=replace(group.prompt, verifier="environment"))
    worker = VerifyWorker(str(tmp_path / "t"), end_ids=(0,), config=VerifyConfig(), roles=RolesConfig(),
                          kinds=("math", "environment"))
    try:
        by_environment, by_math = worker.judge([own, group], [group.arrays, group.arrays])
    finally:
        worker.close()
    assert [v.reward for v in by_environment.verdicts] == [0.25, None, 1.0]
    assert [v.status for v in by_environment.verdicts] == [Status.WRONG, Status.ERROR, Status.OK]
    assert [v.reward for v in by_math.verdicts] == [1.0, None, 1.0] and "it died" in by_math.verdicts[1].reason


def test_a_function_that_is_gone_when_graders_start_is_a_fault():
    with pytest.raises(VerifierFault, match=r"docs/rewards\.md"):
        graders(custom("no_such_function"))


def test_minimal_environments_stay_minimal(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    assert "SECRET_TOKEN" not in grader_options(VerifyConfig(terms={"format": {"weight": 0.1}}))["environment"]
    own = grader_options(custom("commanded", http_token_env="SECRET_TOKEN"))
    assert "SECRET_TOKEN" not in own["environment"], "the token is for endpoints alone"
    assert own["working_directory"] == os.getcwd() and os.getcwd() in own["environment"]["PYTHONPATH"].split(os.pathsep)
    endpoint = VerifyConfig(kind="http", http_url="http://localhost:1/", http_token_env="SECRET_TOKEN")
    assert grader_options(endpoint)["environment"]["SECRET_TOKEN"] == "hush"
    monkeypatch.delenv("SECRET_TOKEN")
    with pytest.raises(UserError, match="not set"):
        grader_options(endpoint)
