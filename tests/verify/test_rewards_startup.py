"""Mistakes about rewards are refused before anything starts, and the examples of docs/rewards.md are what a reader runs."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import threading
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from akl_dist.config.command_line import check_command_line
from akl_dist.config.compose import compose
from akl_dist.config.resolve import kinds_of
from akl_dist.config.schema import Config, DataConfig, VerifyConfig
from akl_dist.config.validate import validate, warnings
from akl_dist.contract.errors import ConfigError, UserError
from akl_dist.contract.records import Status, Verdict
from akl_dist.verify.adapters import RewardItem, verdict_of, with_answer
from akl_dist.verify.golds import invalid_gold
from akl_dist.verify.rewards import RewardJudge, RewardSettings, check_rewards

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = [block.replace("\\\n", " ").strip() for block in re.findall(r"^    python (?:.*\\\n)*.*", PAGE, flags=re.MULTILINE)]


def with_verify(**keys) -> Config:
    return replace(Config(), verify=VerifyConfig(**keys))


def problems(config: Config) -> dict[str, str]:
    try:
        validate(config)
    except ConfigError as error:
        return {one.subject: str(one) for one in error.problems}
    return {}


@pytest.mark.parametrize(("keys", "key", "part"), [
    ({"kind": "custom"}, "verify.custom", "my_rewards:score"),
    ({"kind": "custom", "custom": "rewards/mine.py:score"}, "verify.custom", "verify.custom=rewards.mine:score"),
    ({"kind": "custom", "custom": "mine.py:score"}, "verify.custom", "verify.custom=mine:score"),
    ({"kind": "custom", "custom": "reward_fakes"}, "verify.custom", "reward_fakes:score"),
    ({"kind": "custom", "custom": "no_such_module:score"}, "verify.custom", "PYTHONPATH"),
    ({"custom": "reward_fakes:commanded"}, "verify.custom", "nothing reads it"),
    ({"signature": "verl"}, "verify.signature", "nothing reads it"),
    ({"kind": "custom", "custom": "reward_fakes:commanded", "signature": "verll"}, "verify.signature", "verify.signature=verl"),
    ({"right_at": 0.5}, "verify.right_at", "nothing reads it"),
    ({"http_url": "http://localhost/"}, "verify.http_url", "nothing reads it"),
    ({"http_token_env": "T"}, "verify.http_token_env", "nothing reads it"),
    ({"kind": "http", "timeout_s": 40.0}, "verify.http_url", "http://localhost:8000/score"),
    ({"kind": "http", "http_url": "localhost:8000", "timeout_s": 40.0}, "verify.http_url", "begins with http://"),
    ({"kind": "http", "http_url": "http://localhost:8000/a b", "timeout_s": 40.0}, "verify.http_url", "begins with http://"),
    ({"kind": "http", "http_url": "http://localhost/", "http_retries": 0, "timeout_s": 9.0}, "verify.timeout_s", "at least 10"),
    ({"kind": "http", "http_url": "http://localhost/", "http_retries": 11}, "verify.http_retries", "at most 10"),
    ({"kind": "environment"}, "verify.kind", "my_module:MyClass"),
    ({"kind": "htpp"}, "verify.kind", "verify.kind=http"),
])
def test_refused(keys, key, part):
    found = problems(with_verify(**keys))
    assert list(found) == [key] and part in found[key]


@pytest.mark.parametrize(("terms", "key", "part"), [
    ({"t": {"custom": "reward_fakes:commanded"}}, "verify.terms.t.weight", "weight: 0.1"),
    ({"t": {"custom": "reward_fakes:commanded", "wight": 0.1, "weight": 0.1}}, "verify.terms.t.wight", "Write weight"),
    ({"t": {"weight": 0.1}}, "verify.terms.t.kind", "custom"),
    ({"formt": {"weight": 0.1}}, "verify.terms.formt.kind", "kind: format"),
    ({"verdict": {"kind": "format", "weight": 0.1}}, "verify.terms.verdict", "Rename"),
    ({"format": {"weight": 0.1, "custom": "json:loads", "kind": "format"}}, "verify.terms.format.custom", "nothing reads it"),
    ({"t": {"http_url": "http://localhost/", "weight": 0.1, "http_timeout_s": 0}}, "verify.terms.t.http_timeout_s", "above 0"),
    ({"t": {"http_url": "http://localhost/", "weight": 0.1}}, "verify.timeout_s", "at least 30.75"),
    ({"t": 0.1}, "verify.terms.t", "a group of keys"),
    ({"format": {"weight": 10**400}}, "verify.terms.format.weight", "that rewards can have"),
    ({"format": {"weight": 0.5}, "t": {"custom": "reward_fakes:commanded", "weight": -0.5}}, "verify.terms", "add up to 1)"),
])
def test_terms_refused(terms, key, part):
    found = problems(with_verify(terms=terms))
    assert list(found) == [key] and part in found[key]


def test_accepted_with_a_warning_where_one_is_due():
    large = {"t": {"custom": "reward_fakes:thousands", "weight": 5, "unbounded": True}, "format": {"weight": 0.99}}
    assert problems(with_verify(terms=large)) == {}
    assert any("verify.terms.t.unbounded" in line for line in warnings(with_verify(terms=large)))
    endpoint = {"kind": "http", "http_retries": 0, "timeout_s": 10.0, "http_token_env": "T"}
    for url, warned in (("http://rewards.example/x", True), ("https://rewards.example/x", False), ("http://127.0.0.1:80/", False)):
        config = with_verify(http_url=url, **endpoint)
        assert problems(config) == {} and any("without TLS, the token" in line for line in warnings(config)) == warned


def test_a_warning_where_terms_can_turn_right_and_wrong_round():
    terms = {"format": {"weight": 0.4}}
    assert not any("verify.terms" in line for line in warnings(with_verify(terms=terms)))
    scored = with_verify(kind="custom", custom="reward_fakes:commanded", terms=terms)
    assert problems(scored) == {} and any("more than 0.4 apart" in line for line in warnings(scored))
    for penalty, warned in ((1.0, True), (0.5, False)):
        objective = replace(Config().objective, overlong_buffer_tokens=4, overlong_penalty=penalty)
        config = replace(with_verify(terms=terms), objective=objective)
        assert any("can get less than a short wrong one" in line for line in warnings(config)) == warned


def test_a_secret_given_by_mistake_is_not_repeated():
    found = problems(with_verify(kind="http", http_url="http://me:hush@localhost/", http_token_env="sk-hush", http_retries=0,
                                 timeout_s=10.0))
    assert sorted(found) == ["verify.http_token_env", "verify.http_url"] and "hush" not in str(found)


@pytest.mark.parametrize(("function", "signature", "part"), [
    ("reward_fakes:comanded", "akl", "reward_fakes:commanded"),
    ("reward_fakes:needs_more", "akl", "tokenizer"),
    ("reward_fakes:takes_none", "akl", "takes none of them"),
    ("reward_fakes:by_position", "akl", "takes none of them"),
    ("reward_fakes:Odd.args", "akl", "expected"),
    ("reward_fakes:commanded", "verl", "solution_str"),
    ("reward_fakes:commanded", "openrlhf", "queries, prompts, labels"),
    ("reward_fakes:reward_func", "verl", "data_source"),
    ("reward_fakes:reward_func", "verl", "verify.signature=openrlhf"),
    ("reward_fakes:compute_score", "akl", "verify.signature=verl"),
])
def test_functions_that_do_not_fit_are_refused(function, signature, part):
    with pytest.raises(UserError) as caught:
        check_rewards(with_verify(kind="custom", custom=function, signature=signature))
    assert part in str(caught.value) and caught.value.subject == "verify.custom"


def test_a_module_that_does_not_import_is_refused(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("raise SystemExit('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    terms = {"t": {"custom": "broken_rewards:score", "weight": 0.1}}
    with pytest.raises(UserError, match=r"verify\.terms\.t\.custom.*SystemExit: no"):
        check_rewards(with_verify(terms=terms))


def test_a_token_that_is_not_there_is_refused(monkeypatch):
    config = with_verify(kind="http", http_url="http://localhost/", http_token_env="REWARD_TOKEN")
    for value in (None, "", "two words", "line\nbreak"):
        monkeypatch.delenv("REWARD_TOKEN", raising=False)
        if value is not None:
            monkeypatch.setenv("REWARD_TOKEN", value)
        with pytest.raises(UserError, match="REWARD_TOKEN"):
            check_rewards(config)
    monkeypatch.setenv("REWARD_TOKEN", "hush")
    check_rewards(config)


def test_kinds_that_graders_start():
    assert kinds_of(Config()) == {"math"}
    terms = {"format": {"weight": 0.1}, "t": {"custom": "a:b", "weight": 0.1}}
    assert kinds_of(with_verify(terms=terms)) == {"math", "format", "custom"}
    mixture = {"gsm8k": {}, "mbpp": {}, "mine": {"recipe": "generic", "verifier": "http"}}
    assert kinds_of(replace(Config(), data=DataConfig(recipe="mixture", mixture=mixture))) >= {"math", "code", "http"}


def test_golds_of_own_kinds_are_not_checked():
    assert [invalid_gold(kind)("{") for kind in ("custom", "http", "environment")] == [""] * 3
    assert invalid_gold("math")("{")


@pytest.mark.parametrize("answer", [None, "1", [1.0], object(), 10**400, float("nan"), {}, {"score": None}, {"correct": 2},
                                    Verdict(Status.OK, score=float("inf"))])
def test_answers_that_mean_nothing_are_errors(answer):
    verdict = verdict_of(answer, right_at=1.0)
    assert verdict.status is Status.ERROR and verdict.reward is None and verdict.reason


def test_answers_of_arrays():
    numpy = pytest.importorskip("numpy")
    assert verdict_of(numpy.float32(0.5), right_at=0.5) == Verdict(Status.OK, score=0.5)
    assert verdict_of(numpy.bool_(False), right_at=0.5) == Verdict(Status.WRONG)
    assert verdict_of({"score": numpy.array(2), "acc": numpy.int64(0)}, right_at=0.5) == Verdict(Status.WRONG, score=2.0)
    assert verdict_of(Status.NO_ANSWER, right_at=0.5).reward == 0.0
    assert verdict_of({"score": 1.0, "correct": None, "acc": False}, right_at=0.5) == Verdict(Status.WRONG, score=1.0)
    assert verdict_of({"score": 1.0, "status": numpy.array([1, 0])}, right_at=0.5).status is Status.ERROR


def test_spans_of_ones_own():
    assert with_answer(Verdict(Status.OK, "a"), "banana").span == (5, 6)
    assert with_answer(Verdict(Status.OK, "z"), "banana").span is None
    assert with_answer(Verdict(Status.OK, span=(0, 3)), "banana").extracted == "ban"
    assert with_answer(Verdict(Status.OK, span=(0, 7)), "banana").status is Status.ERROR
    assert with_answer(Verdict(Status.OK, extracted=5, span=(0, 3)), "banana").status is Status.ERROR  # type: ignore[arg-type]


# --- docs/rewards.md -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The reader's working directory: the functions in my_rewards.py, the endpoint in my_endpoint.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards.py").write_text("\n".join(text for text in EXAMPLES if "HTTPServer" not in text))
    (tmp_path / "my_endpoint.py").write_text(next(text for text in EXAMPLES if "HTTPServer" in text))
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("my_rewards", "my_endpoint"):
        sys.modules.pop(name, None)


def test_every_command_of_the_page_is_accepted(folder, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "hush")
    assert len(COMMANDS) == 5
    for command in COMMANDS:
        line = shlex.split(command)
        assert line[:3] == ["python", "-m", "akl_dist.main"]
        config = compose(check_command_line(line[3:]).overrides)
        validate(config)
        check_rewards(config)


@pytest.mark.parametrize(("function", "signature", "right", "wrong"), [
    ("brief", "akl", 1.0, 0.0), ("judged", "akl", 1.0, 0.1), ("compute_score", "verl", 1.0, 0.0),
    ("reward_func", "openrlhf", 1.0, 0.0)])
def test_every_function_of_the_page_judges(folder, function, signature, right, wrong):
    config = VerifyConfig(kind="custom", custom=f"my_rewards:{function}", signature=signature)
    judge = RewardJudge(RewardSettings.of(config))
    for words in ("7+9={}", "<think>7+9={}</think>\\boxed{{{}}}"):  # the second as the model of +exp=tiny writes it
        verdicts = [judge.judge(RewardItem("16", words.format(answer, answer), False, prompt="7+9=")) for answer in (16, 15)]
        assert [(v.status, v.reward) for v in verdicts] == [(Status.OK, right), (Status.WRONG, wrong)], words


def test_the_endpoint_of_the_page_answers(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), importlib.import_module("my_endpoint").Score)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        judge = RewardJudge(RewardSettings.of(VerifyConfig(kind="http", http_url=f"http://127.0.0.1:{server.server_port}/score")))
        verdicts = [judge.judge(RewardItem("16", f"7+9=\\boxed{{{answer}}}", False)) for answer in (16, 15)]
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
    assert [v.reward for v in verdicts] == [1.0, 0.0] and verdicts[1].reason == "another number"
