"""Mistakes on the command line: each is refused, all at once, with the nearest valid spelling. Good lines pass unchanged."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import akl_dist
from akl_dist import evaluate, main
from akl_dist.config.command_line import check_command_line, help_text, sweep
from akl_dist.config.compose import compose
from akl_dist.contract.errors import ConfigError, nearest


def refusals(*argv: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check_command_line(argv)
    return {problem.subject: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("learner.lrr=1", "learner.lr."),
        ("lr=1", "learner.lr or critic.lr."),
        ("leaner.lr=1", "learner.lr."),
        ("kl.beta_answer=1", "objective.kl.beta_answer."),
        ("rollout.groupsize=4", "rollout.group_size."),
        ("++learner.lrr=1", "learner.lr."),
        ("~learner.lrr", "learner.lr."),
        ("+seed=1", "Write seed=1"),
        ("++seed=1", "key=value"),
        ("~seed", "key=null"),
        ("+foo=1", "unknown key"),
        ("hydra.run.dir=/tmp/x", "output_dir="),
        ("hydra/launcher=basic", "hydra.searchpath only"),
        ("+hydra.verbose=true", "hydra.searchpath only"),
        ("++hydra.run.dir=/tmp/x", "hydra.searchpath only"),
        ("exp=tiny", "+exp=tiny"),
        ("+exp=tny", "Write tiny."),
        ("data=gsm", "Write gsm8k."),
        ("objective/kl=akll", "Write akl."),
        ("objective.kl=akl", "objective/kl=akl"),
        ("objective/kll=akl", "objective/kl"),
        ("data@x=gsm8k", "without @package"),
        ("data=null", "one of"),
        ("data=", "Choose one of them."),
        ("objective=TV", "Write dppo_tv."),
        ("objective=DAPO", "Write dapo."),
        ("+exp=TIN", "Write tiny."),
        ("++objective.policy_loss_params.clip_low=1", "write objective.policy_loss_params.clip_low=1."),
        ("~data", "write data=CHOICE"),
        ("~objective.correction", "set its keys: objective.correction.kind, "),
        ("++objective.correction.hgh=1", "Write objective.correction.high."),
        ("+objective.correction={kind: tis}", "Write objective.correction={kind: tis}."),
        ("~objective.policy_loss_params", "objective.policy_loss_params={} empties it"),
        ("~objective.policy_loss_params.clip_low", "objective.policy_loss_params={name: value, ...}"),
        ("objective.correction={kind: tis, hgh: 3}", "Write objective.correction.high."),
        ("data.columns={promt: q}", "Write data.columns.prompt."),
        ("objective.correction=tis", "objective.correction.kind"),
        ("learner=5", "learner.num_ranks"),
        ("seed=1.5", "an integer"),
        ("seed=true", "an integer"),
        ("seed=null", "an integer"),
        ("learner.lr=fast", "a number"),
        ("dry_run=1", "true or false"),
        ("learner.adam_betas=[0.9]", "a list of 2 numbers"),
        ("run_id=", "null for none"),
        ("seed=1,2", "Add -m"),
        ("tiny", "+exp=tiny"),
        ("model.path=/a, (b]", "'model.path=\"/a, (b]\"'"),
        ("learner.lr=(1)", "Quote the value"),
        ("--multirn", "Write --multirun."),
        ("hydra.searchpath=[/no/such/folder]", "existing folders"),
    ],
)
def test_refused_with_advice(argument: str, advice: str) -> None:
    (message,) = refusals(argument).values()
    assert advice in message


@pytest.mark.parametrize(("argument", "fault"), [
    ("seed=interval(0,1)", "range()"), ("run_id=a,b", "run_id"), ("seed=1,x", "an integer"), ("data=tiny,gsm", "gsm8k"),
    ("+exp=glob(nothing*)", "matches nothing"),
])
def test_sweeps_are_checked_value_by_value(argument: str, fault: str) -> None:
    (message,) = refusals("-m", argument).values()
    assert fault in message


def test_all_problems_at_once_and_exit_code_2() -> None:
    found = refusals("learner.lrr=1", "data=gsm", "seed=1.5", "~steps", "rollout.group_size=4")
    assert set(found) == {"learner.lrr", "data", "seed", "steps"}
    with pytest.raises(ConfigError) as caught:
        check_command_line(["learner.lrr=1", "seed=x"])
    assert caught.value.exit_code == 2


def test_one_experiment_a_command() -> None:
    """Hydra answers with advice on its own defaults lists."""
    assert "Leave one" in refusals("+exp=tiny", "+exp=akl_7b")["exp"]
    assert check_command_line(["+exp=tiny,tiny_grpo", "-m"]).overrides == ("+exp=tiny,tiny_grpo",)


def test_good_lines() -> None:
    command = check_command_line(["+exp=tiny", "objective/kl=symmetric", "learner.lr=1e-4", "data.columns={prompt: q}",
                                  "learner.adam_betas=[0.9,0.95]", "run_id=null", "-m"])
    assert command.multirun and not command.help
    assert command.overrides == ("+exp=tiny", "objective/kl=symmetric", "learner.lr=1e-4", "data.columns={prompt: q}",
                                 "learner.adam_betas=[0.9,0.95]", "run_id=null")
    assert check_command_line(["-h"]).help
    config = compose(command.overrides)
    assert (config.learner.lr, config.learner.adam_betas, config.data.columns.prompt) == (1e-4, (0.9, 0.95), "q")


@pytest.mark.parametrize("text", ["007", "1234_5", "1e5", "true", "-3", "a b", "a=b", "x:y/z", "/a (b)/c", "é ü", "#1"])
def test_text_keys_keep_what_was_typed(text: str) -> None:
    """Hydra alone reads 1234_5 (a Slurm array job) as the number 12345 and 1e5 as 100000.0."""
    assert compose(check_command_line([f"run_id={text}"]).overrides).run_id == text


def test_quotes_reach_the_value() -> None:
    command = check_command_line(['model.path="/data/my (new) model, v2"', "data.system_prompt='Say \"hi\", then think.'"])
    config = compose(command.overrides)
    assert config.model.path == "/data/my (new) model, v2"
    assert config.data.system_prompt == 'Say "hi", then think.'


def test_empty_text_is_no_instruction() -> None:
    for empty in ('data.prompt_suffix=""', "data.prompt_suffix=''"):
        assert compose(check_command_line([empty]).overrides).data.prompt_suffix == ""
    assert compose(check_command_line(["data.prompt_suffix=null"]).overrides).data.prompt_suffix is None
    (message,) = refusals("data.prompt_suffix=").values()  # what a shell leaves of data.prompt_suffix=""
    assert "'data.prompt_suffix=\"\"'" in message
    for other in ('run_id=""', 'model.path=""', 'seed=""'):
        assert "null for none" in next(iter(refusals(other).values()))


@pytest.mark.parametrize(("argument", "value"), [
    ('data.system_prompt=Say "hi", (then', 'Say "hi", (then'), ('data.system_prompt="Say "hi""', 'Say "hi"'),
    ("data.system_prompt=don't [", "don't ["), ("data.system_prompt='don't'", "don't"),
    ('model.path=/a\\b", {', '/a\\b", {'), ('data.system_prompt="', '"'),
])
def test_advised_quoting_is_read_as_meant(argument: str, value: str) -> None:
    """What the message advises, typed into a shell, must parse and mean the text."""
    (message,) = refusals(argument).values()
    advised = shlex.split(message.partition("for the grammar: ")[2].removesuffix("."))
    assert len(advised) == 1
    config = compose(check_command_line(advised).overrides)
    assert value in (config.data.system_prompt, config.model.path)


def test_loss_parameters_are_free_names() -> None:
    command = check_command_line(["objective=dapo", "objective.policy_loss_params.clip_low=0.1"])
    assert dict(compose(command.overrides).objective.policy_loss_params) == {"clip_low": 0.1, "clip_high": 0.28}


def test_sweep_order_and_run_directories() -> None:
    jobs = sweep(check_command_line(["-m", "+exp=tiny", "seed=0,1,2", "learner.lr=1e-4,3e-4"]), stamp="T")
    assert [job[:-1] for job in jobs] == [
        ["+exp=tiny", f"seed={seed}", f"learner.lr={lr}"] for seed in (0, 1, 2) for lr in ("0.0001", "0.0003")
    ]
    configs = [compose(job) for job in jobs]
    assert [config.run_id for config in configs] == [f"multirun-T/{number}" for number in range(6)]
    assert [(config.seed, config.learner.lr) for config in configs] == [(s, lr) for s in (0, 1, 2) for lr in (1e-4, 3e-4)]


@pytest.mark.parametrize(("argument", "values"), [
    ("seed=0,1,2", [0, 1, 2]), ("seed=range(0,3)", [0, 1, 2]), ("seed=range(1,10,4)", [1, 5, 9]), ("seed=choice(7,3)", [7, 3]),
])
def test_sweep_grammar_is_hydras(argument: str, values: list[int]) -> None:
    assert [compose(job).seed for job in sweep(check_command_line(["-m", argument]), stamp="T")] == values


def test_sweep_over_groups_globs_and_experiments() -> None:
    jobs = sweep(check_command_line(["-m", "objective/kl=glob(*forward*)"]), stamp="T")
    assert [compose(job).objective.kl.strength for job in jobs] == ["equal", "matched"]
    jobs = sweep(check_command_line(["-m", "+exp=tiny,tiny_uniform_reverse"]), stamp="T")
    assert [compose(job).experiment for job in jobs] == ["tiny", "tiny_uniform_reverse"]


def test_sweep_from_an_experiment_file_and_run_id() -> None:
    jobs = sweep(check_command_line(["-m", "+exp=sweep_kl_direction", "seed=7", "run_id=again"]), stamp="T")
    configs = [compose(job) for job in jobs]
    assert [config.objective.kl.direction_answer for config in configs] == [
        "reverse", "reverse", "forward", "symmetric"]
    assert {config.seed for config in configs} == {7}  # the command line wins over the file's range(0,5)
    assert configs[3].run_id == "multirun-again/3"


def test_a_sweep_of_one_is_one_job() -> None:
    assert len(sweep(check_command_line(["-m", "+exp=tiny"]), stamp="T")) == 1


def test_help_names_every_key_and_the_example() -> None:
    text = help_text("akl_dist.main", "python -m akl_dist.main +exp=tiny seed=1")
    for part in ("+exp=tiny seed=1", "learner.lr = 1e-06", "objective/kl", "uniform_reverse", "run_id = null"):
        assert part in text


def test_help_offers_sweeps_only_where_they_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    for command, offered in ((main, True), (evaluate, False)):
        assert command.main(["--help"]) == 0
        assert ("-m runs every combination" in (text := capsys.readouterr().out)) is offered
        assert ("[-m]" in text) is offered
    assert evaluate.main(["-m", "seed=1,2"]) == 2


def into_closed_pipe(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a Python command whose reader has gone before it prints."""
    read, write = os.pipe()
    os.close(read)
    try:
        env = {**os.environ, "PYTHONPATH": str(Path(akl_dist.__file__).parents[1])}
        done = subprocess.run([sys.executable, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60,
                              check=False, env=env)
    finally:
        os.close(write)
    return done.returncode, done.stderr


def test_a_reader_that_has_gone_ends_the_printing_only() -> None:
    assert into_closed_pipe("-m", "akl_dist.main", "--help") == (0, "")
    assert into_closed_pipe("-c", "import sys; from akl_dist.job import say; say('a'); say('b'); sys.exit(2)") == (2, "")
    code, errors = into_closed_pipe("-c", "print('a', flush=True)")  # negative control: the pipe is broken indeed
    assert code != 0 and "BrokenPipeError" in errors


def test_several_names_that_begin_so_are_all_named() -> None:
    (message,) = refusals("objective=drpo").values()
    assert message.endswith("Write drpo_geometry or drpo_paper or drpo_reciprocal or drpo_unclipped.")
    (message,) = refusals("objective=zzzz").values()
    assert "drpo_paper, " in message and message.endswith("Choose one of them.")  # nothing close: the list, no invention


def test_everything_unknown_in_a_section_at_once() -> None:
    assert set(refusals("objective.correction={hgh: 3, lw: 1, kind: tis}")) == {
        "objective.correction.hgh", "objective.correction.lw"}
    assert set(refusals("-m", "objective.correction={hgh: 3},{lw: 1}")) == {
        "objective.correction.hgh", "objective.correction.lw"}


@pytest.mark.parametrize(("typed", "close"), [
    ("RLOO", "rloo"), ("TIS", "tis"), ("drpo", "drpo_paper"), ("Mi", "mis"), ("grop", "grpo"), ("m", None), ("", None),
])
def test_nearest_ignores_case_and_prefers_what_begins_so(typed: str, close: str | None) -> None:
    assert nearest(typed, ["auto", "none", "tis", "mis", "grpo", "rloo", "drpo_geometry", "drpo_paper"]) == close
    assert nearest("Tis", ["TIS"]) == "TIS"


def test_nearest_is_not_far() -> None:
    """Negative control: nothing is advised where nothing is close."""
    assert nearest("zzzz", ["learner", "data"]) is None
    assert "Did you" not in refusals("qqqq=1")["qqqq"]
