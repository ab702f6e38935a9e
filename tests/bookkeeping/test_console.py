from __future__ import annotations

import io

import pytest

from akl_dist.bookkeeping.console import Console, before_after_table, duration


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def ascii_stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")


def text_of(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (185, "3:05"), (7385, "2:03:05")])
def test_duration(seconds, text):
    assert duration(seconds) == text


METRICS = {
    "verify/accuracy": 0.5, "objective/kl_value_k3": 0.01234, "learner/grad_norm": 0.8437, "rollout/tokens_per_s": 1234.4,
    "time/step_s": 3.14, "time/rollout_s": 1.24, "time/learner_s": 1.5, "time/idle_fraction": 0.1,
}


def test_step_line():
    stream = ascii_stream()
    ticks = iter([100.0, 120.0])
    Console(50, first_step=11, stream=stream, clock=lambda: next(ticks)).step(12, METRICS)
    # 2 steps took 20 s, 38 remain: 380 s
    assert text_of(stream) == (
        "step 12/50 | acc 0.500 | KL 0.0123 | grad 0.844 | tok/s 1234 | 3.1 s (rollout 1.2, learner 1.5) | eta 6:20\n"
    )


def test_responses_without_a_verdict_show():
    """Whatever kept them from a verdict: they do not count in the accuracy beside."""
    stream = ascii_stream()
    faults = {"verify/error_fraction": 0.2, "verify/timeout_fraction": 0.05, "verify/no_answer_fraction": 0.5}
    Console(1, stream=stream).step(1, {"verify/accuracy": 0.5, **faults})
    assert text_of(stream) == "step 1/1 | acc 0.500 | without verdict 25 %\n"


def test_absent_metrics_are_left_out():
    stream = ascii_stream()
    Console(1, stream=stream).step(1, {})
    assert text_of(stream) == "step 1/1\n"


def test_running_stage_only_on_a_terminal():
    stream = ascii_stream()
    Console(5, stream=stream).stage(1, "rollout")
    assert text_of(stream) == ""
    terminal = Terminal()
    console = Console(5, stream=terminal)
    console.stage(1, "rollout")
    console.say("done")
    assert terminal.getvalue() == "step 1/5 rollout ..." + "\r" + " " * 20 + "\rdone\n"


def test_unshowable_characters_are_escaped():
    stream = ascii_stream()
    Console(1, stream=stream).say("é ± \ud800")
    assert text_of(stream) == "\\xe9 \\xb1 \\ud800\n"


BEFORE = {
    "accuracy": 0.481, "accuracy_standard_error": 0.0213, "answer_span_tokens": 2.5, "response_tokens": 21.04,
    "kl_per_token": 0.0,
}
AFTER = {"accuracy": 0.93, "accuracy_standard_error": 0.011, "answer_span_tokens": 2.0, "response_tokens": 25.4}


def test_table():
    assert before_after_table(BEFORE, AFTER) == "\n".join([
        "held-out                           before        after  change",
        "--------------------------------------------------------------",
        "accuracy (%)                  48.1 +- 2.1  93.0 +- 1.1   +44.9",
        "answer-span tokens                   2.50         2.00   -0.50",
        "response length (tokens)             21.0         25.4    +4.4",
        "KL to reference (nats/token)       0.0000            -       -",
    ])


def test_table_is_ascii_unless_on_a_terminal():
    stream, terminal = ascii_stream(), Terminal()
    Console(1, stream=stream).final(BEFORE, AFTER)
    Console(1, stream=terminal).final(BEFORE, AFTER)
    assert "48.1 +- 2.1" in text_of(stream) and "48.1 ± 2.1" in terminal.getvalue()
    assert all(len(line) == len(terminal.getvalue().splitlines()[0]) for line in terminal.getvalue().splitlines())


def test_table_keys_are_those_of_an_evaluation():
    import dataclasses

    from akl_dist.bookkeeping.console import TABLE
    from akl_dist.summaries import Evaluation

    fields = {field.name for field in dataclasses.fields(Evaluation)}
    assert {key for row in TABLE for key in (row.key, row.error) if key} <= fields
