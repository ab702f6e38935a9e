"""An HTTP reward against a server that is slow, broken, hostile or fine, on command of the response."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from akl_dist.config.resolve import http_pauses
from akl_dist.config.schema import VerifyConfig
from akl_dist.contract.records import Status
from akl_dist.verify.adapters import RewardItem
from akl_dist.verify.grader import GraderPool
from akl_dist.verify.http_reward import HttpReward
from akl_dist.verify.worker import grader_options

TOKEN = "hush-1234567890"


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict] = []
        self.tokens: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.tokens.append(self.headers["Authorization"])
        command, _, argument = body["response"].partition(" ")
        tries = sum(one["response"] == body["response"] for one in self.server.asked)
        if command == "sleep":
            time.sleep(float(argument))
        if command == "drip-status":
            for _ in range(20):
                self.wfile.write(b"H")
                self.wfile.flush()
                time.sleep(0.1)
            return
        if command == "drip-headers":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            for _ in range(20):
                self.wfile.write(b"X-Wait: y\r\n")
                self.wfile.flush()
                time.sleep(0.1)
            return
        if command == "drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(20):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)
            return
        if command == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{")
            return
        if command == "redirect":
            self.send_response(307)
            self.send_header("Location", self.server.url)
            self.end_headers()
            return
        if command == "echo":
            argument = json.dumps({"status": "error", "reason": self.headers["Authorization"]}) if argument == "reason" else \
                "x" * 100 + str(self.headers["Authorization"])
        status = int(argument) if command == "status" or (command == "once" and tries == 1) else 200
        answers = {"garbage": "<html>", "list": "[1]", "nan": '{"score": NaN}', "empty": "{}", "huge": "x" * (2 << 20),
                   "echo": argument, "answer": argument}
        text = answers.get(command, json.dumps({"score": 1.0 if body["response"] == body["gold"] else 0.5})).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:
        del format, arguments


@pytest.fixture(scope="module")
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join(timeout=10)
    made.server_close()


def ask(server: Server, response: str, *, timeout_s: float = 5.0, retries: int = 0, token: str | None = TOKEN,
        right_at: float = 1.0):
    item = RewardItem("a", response, False, prompt="what", extra='{"k": [1]}', source="s", prompt_id="s/1")
    return HttpReward(server.url, timeout_s, retries, token).judge(item, right_at=right_at)


def test_what_is_sent_and_what_comes_back(server):
    verdict = ask(server, "a")
    assert (verdict.status, verdict.score) == (Status.OK, 1.0)
    assert server.asked[-1] == {"id": "s/1", "prompt": "what", "response": "a", "gold": "a", "extra": {"k": [1]},
                                "truncated": False, "source": "s"}
    assert server.tokens[-1] == f"Bearer {TOKEN}"
    assert ask(server, "b", token=None).reward == 0.5 and server.tokens[-1] is None
    assert ask(server, "b", right_at=0.5).status is Status.OK


@pytest.mark.parametrize(("answer", "status", "reward"), [
    ('{"status": "no_answer", "reason": "nothing there"}', Status.NO_ANSWER, 0.0),
    ('{"correct": true}', Status.OK, 1.0),
    ('{"correct": false, "score": 2}', Status.WRONG, 2.0),
    ('{"status": "timeout", "score": 1}', Status.TIMEOUT, None),
    ('{"status": "ok", "correct": false}', Status.ERROR, None),
    ('{"status": "fine"}', Status.ERROR, None),
    ('{"score": "1"}', Status.ERROR, None),
    ('{"score": true}', Status.OK, 1.0),
    ('{"correct": "yes", "score": 1}', Status.ERROR, None),
    ('{"score": 1, "reason": 7}', Status.ERROR, None)])
def test_answers(server, answer, status, reward):
    verdict = ask(server, f"answer {answer}")
    assert (verdict.status, verdict.reward) == (status, reward)


@pytest.mark.parametrize("command", ["status 404", "status 401", "redirect", "garbage", "list", "nan", "empty", "huge"])
def test_what_is_no_answer_is_an_error_and_not_asked_again(server, command):
    before = len(server.asked)
    verdict = ask(server, command, retries=2)
    assert verdict.status is Status.ERROR and verdict.reward is None and verdict.reason
    assert len(server.asked) == before + 1


def test_passing_failures_are_tried_again(server):
    assert ask(server, "once 500", retries=1).status is Status.WRONG
    assert ask(server, "once 429", retries=1).status is Status.WRONG
    start = time.monotonic()
    refused = ask(server, "status 503", retries=2)
    assert refused.status is Status.ERROR and "503 (3 tries)" in refused.reason
    assert time.monotonic() - start >= sum(http_pauses(2)) == 0.75
    assert ask(server, "cut").reason == "http reward: an answer cut short by 99 bytes (1 tries)"
    closed = HttpReward("http://127.0.0.1:1/", 1.0, 0).judge(RewardItem("a", "a", False), right_at=1.0)
    assert closed.status is Status.ERROR and "no connection" in closed.reason


@pytest.mark.parametrize("command", ["sleep 2", "drip", "drip-status", "drip-headers"])
def test_the_deadline_holds_for_the_whole_answer(server, command):
    start = time.monotonic()
    verdict = ask(server, command, timeout_s=0.4)
    assert verdict.status is Status.TIMEOUT and time.monotonic() - start < 1.5


@pytest.mark.parametrize("command", ["echo reason", "echo body", "status 401", "status 500"])
def test_the_token_is_in_no_reason(server, command):
    verdict = ask(server, command)
    assert verdict.status is Status.ERROR
    assert not any(TOKEN[:length] in repr(verdict) for length in range(8, len(TOKEN)))
    assert TOKEN not in repr(HttpReward(server.url, 1.0, 0, TOKEN))


def test_in_the_graders(server, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    config = VerifyConfig(kind="http", http_url=server.url, http_token_env="REWARD_TOKEN", http_timeout_s=5.0, http_retries=0,
                          timeout_s=1.5)
    with GraderPool(num_workers=1, **grader_options(config)) as pool:
        verdicts = pool.judge_many([RewardItem("a", text, False) for text in ("a", "\\boxed{b}", "sleep 3", "echo body", "a")])
    assert [v.status.value for v in verdicts] == ["ok", "wrong", "timeout", "error", "ok"]
    assert server.tokens[-1] == f"Bearer {TOKEN}" and not any(TOKEN in repr(v) for v in verdicts)
    assert verdicts[1].extracted == "b" and verdicts[1].span == (7, 8), "roles vote by the standard extractor's answer"
