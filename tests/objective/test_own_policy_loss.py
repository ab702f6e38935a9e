"""The example of docs/changing_the_objective.md as a reader would use it: found, imported, checked, and it trains."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from akl_dist import job, main
from akl_dist.config.command_line import check_command_line
from akl_dist.config.compose import compose
from akl_dist.config.own_loss import check_own_loss
from akl_dist.config.schema import Config, ObjectiveConfig
from akl_dist.config.validate import validate
from akl_dist.contract.errors import ConfigError
from akl_dist.objective import POLICY_LOSSES, aggregate, load_policy_loss_module, policy_loss, policy_losses

PAGE = (Path(__file__).parents[2] / "docs" / "changing_the_objective.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
(COMMAND,) = [block for block in re.findall(r"(?:^    .*\n)+", PAGE, flags=re.MULTILINE) if "policy_loss_module" in block]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory of the reader's own; what its modules register is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before, modules = dict(POLICY_LOSSES), set(sys.modules)
    yield tmp_path
    POLICY_LOSSES.clear()
    POLICY_LOSSES.update(before)
    policy_losses._LOADED.clear()
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).is_relative_to(tmp_path):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()


@functools.cache
def composed() -> Config:
    line = shlex.split(COMMAND.replace("\\\n", " "))
    assert line[:3] == ["python", "-m", "akl_dist.main"]
    return compose(check_command_line(line[3:]).overrides)


def changed(**keys) -> Config:
    return dataclasses.replace(composed(), objective=dataclasses.replace(composed().objective, **keys))


def problem(check, config: Config) -> str:
    with pytest.raises(ConfigError) as raised:
        check(config)
    return str(raised.value)


def test_the_command_line_is_accepted(folder):
    write(folder, "my_losses", EXAMPLE)
    objective: ObjectiveConfig = composed().objective
    assert (objective.policy_loss_module, objective.policy_loss) == ("my_losses", "soft_window")
    validate(composed())
    assert "my_losses" not in sys.modules  # found, not imported
    check_own_loss(composed())
    assert "soft_window" in POLICY_LOSSES
    load_policy_loss_module("my_losses")  # again, as a learner in the same process would


def test_the_example_is_about_twenty_lines():
    assert len(EXAMPLE.splitlines()) <= 22


def test_a_dry_run_imports_it(folder, capsys):
    write(folder, "my_losses", EXAMPLE)
    line = [*shlex.split(COMMAND.replace("\\\n", " "))[3:], "dry_run=true"]
    assert main.main(line) == 0
    assert main.main([*line, "objective.policy_loss_params={widht: 0.1}"]) == 2
    assert "did you mean 'width'" in capsys.readouterr().err


def test_it_trains_a_toy(folder):
    """A bandit with five arms, rewards 0 to 1: the policy moves to the best arm; values and gradient by hand first."""
    write(folder, "my_losses", EXAMPLE)
    load_policy_loss_module("my_losses")
    row = functools.partial(torch.tensor, dtype=torch.float64)
    logp = row([[0.0, 0.1, -0.1]]).requires_grad_(True)
    loss = policy_loss("soft_window", logp=logp, anchor_logp=torch.zeros_like(logp), advantages=row([[1, 1, 1]]),
                       mask=torch.ones(1, 3), width=0.1)  # fmt: skip
    loss.sum().backward()
    # at the anchor 1; moving away one width: half of e^.1; moving back: all of e^-.1
    assert logp.grad[0].tolist() == pytest.approx([-1, -0.5 * 2.718281828459045**0.1, -(2.718281828459045**-0.1)])

    generator = torch.Generator().manual_seed(0)
    logits, rewards = torch.zeros(5, requires_grad=True), torch.linspace(0, 1, 5)
    optimizer = torch.optim.SGD([logits], lr=0.5)
    before = (logits.softmax(0) @ rewards).item()
    for _ in range(40):
        with torch.no_grad():
            probs = logits.softmax(0)
            arms = torch.multinomial(probs, 32, replacement=True, generator=generator).unsqueeze(-1)
            anchor, advantages = probs.log()[arms], rewards[arms[:, 0]] - probs @ rewards
        for _ in range(2):
            optimizer.zero_grad()
            values = policy_loss("soft_window", logp=logits.log_softmax(0)[arms], anchor_logp=anchor, advantages=advantages,
                                 mask=torch.ones_like(arms), width=0.2)  # fmt: skip
            aggregate(values, torch.ones_like(arms), "token_mean").backward()
            optimizer.step()
    assert before == pytest.approx(0.5) and (logits.softmax(0) @ rewards).item() > 0.8


def test_a_module_that_is_not_there_is_refused_by_validation(folder):
    for name in ("my_losses", "my_losses.py", "losses/my_losses.py", "json.absent", "1x"):
        assert "objective.policy_loss_module" in problem(validate, changed(policy_loss_module=name)), name
    assert "objective.policy_loss_module=my_losses " in problem(validate, changed(policy_loss_module="losses/my_losses.py"))


def test_a_dotted_name_is_found_without_importing_its_package(folder):
    (folder / "team").mkdir()
    write(folder, "team/__init__", "raise RuntimeError('imported')")
    write(folder, "team/losses", EXAMPLE)
    validate(changed(policy_loss_module="team.losses"))
    assert "team" not in sys.modules
    assert "RuntimeError: imported" in problem(check_own_loss, changed(policy_loss_module="team.losses"))


def test_a_built_in_name_is_not_read_from_the_module(folder):
    write(folder, "my_losses", EXAMPLE)
    assert "built in" in problem(validate, changed(policy_loss="ppo", policy_loss_params={}))


@pytest.mark.parametrize(("text", "part"), [
    ("import no_such_package_at_all", "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
    ("def broken(:", "SyntaxError"),
    ("1 / 0", "ZeroDivisionError"),
    ("", "registered no policy loss"),
    (EXAMPLE.replace('"soft_window")', '"ppo")'), "second registration"),
    (EXAMPLE.replace('"soft_window")', '"other")'), "objective.policy_loss: got policy loss: got 'soft_window'"),
    (EXAMPLE.replace("width: float = 0.2", "wide: float = 0.2"), "did you mean 'wide'"),
    (EXAMPLE.replace("width: float = 0.2", "width: float, more: float"), "no value for more"),
    (EXAMPLE.replace("width: float = 0.2", "**kwargs"), "name every parameter"),
    ("import sys\nsys.exit(3)", "SystemExit: 3"),
    (EXAMPLE.replace("width <= 0", "1 // 0"), "trial batch: ZeroDivisionError"),
    (EXAMPLE.replace("return -", "return logp.sum(-1)\n    return -"), "result of policy loss 'soft_window'"),
    (EXAMPLE.replace("return -", "return logp / 0\n    return -"), "a loss that is not finite"),
    (EXAMPLE.replace("return -", "return logp.detach()\n    return -"), "no gradient in logp"),
    (EXAMPLE.replace("return -", "return (logp - logp.detach()).sqrt()\n    return -"), "a gradient in logp that is not finite"),
])  # fmt: skip
def test_a_module_that_does_not_fit_is_refused_before_anything_starts(folder, text, part):
    write(folder, "my_losses", text)
    validate(composed())
    message = problem(check_own_loss, composed())
    assert part in message and "changing_the_objective.md" in message


def test_the_learner_loads_it_first(folder):
    """The worker's constructor reads the module before it touches a model, so a node without the file says so."""
    from akl_dist.learner.worker import LearnerWorker

    with pytest.raises(ValueError, match=r"policy loss module 'my_losses'.*PYTHONPATH"):
        LearnerWorker(
            model_path="nowhere", dtype="float32", attention="sdpa", rank=0, world_size=1, master_addr="", master_port=0,
            device="cpu", num_threads=1, learner=composed().learner, objective=composed().objective, seed=0, temperature=1.0,
            timeout_s=1.0, failures=folder,
        )  # fmt: skip


def test_no_module_imports_nothing():
    assert Config().objective.policy_loss_module is None
    check_own_loss(Config())
    assert job.check_own_loss is check_own_loss
