"""Everything under conf/ composes, validates, plans; the result is frozen, strict in types, and survives YAML."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import akl_dist
from akl_dist.cluster.placement import layout
from akl_dist.cluster.plan_text import plan_text
from akl_dist.config import typed
from akl_dist.config.command_line import check_command_line, sweep
from akl_dist.config.compose import compose, conf_dir, config_hash, from_yaml, group_choices, to_yaml
from akl_dist.config.schema import Config
from akl_dist.config.validate import validate
from akl_dist.contract.errors import ConfigError

KEYS = Path(__file__).with_name("config_keys.txt")
EXPERIMENTS = group_choices()["exp"]
# What a choice needs beside it: a model with a longer context than the embedded one, a data set for the generic recipe.
LONG = "model.path=Qwen/Qwen2.5-0.5B-Instruct"
BESIDE = {"data=generic": [LONG, "data.name=an/example"], "data=verl": [LONG, "data.name=an/example"],
          **{f"data={name}": [LONG] for name in ("gsm8k", "math", "gsm8k_math", "math500", "aime24", "aime25", "dapo_math",
                                                 "deepscaler", "mbpp", "mbpp_sanitized", "humaneval", "math_code")}}


def test_defaults_are_the_schemas() -> None:
    config = compose([])
    changed = {key for key, value in typed.leaves(config) if value != typed.default(key)}
    assert changed == set(), "config.yaml's default groups restate the schema's defaults"
    validate(config)


@pytest.mark.parametrize("exp", EXPERIMENTS)
def test_every_experiment(exp: str) -> None:
    config = compose([f"+exp={exp}"])
    assert config.experiment == exp
    validate(config)
    assert exp in plan_text(config, layout(config))
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize("choice", [f"{group}={name}" for group, names in group_choices().items() if group != "exp"
                                    for name in names])
def test_every_group_choice(choice: str) -> None:
    validate(compose(check_command_line([choice, *BESIDE.get(choice, [])]).overrides))


@pytest.mark.parametrize("exp", [exp for exp in EXPERIMENTS if exp.startswith("sweep_")])
def test_every_sweep_job(exp: str) -> None:
    jobs = sweep(check_command_line(["-m", f"+exp={exp}"]), stamp="T")
    assert len(jobs) > 1
    assert len({tuple(job) for job in jobs}) == len({job[-1] for job in jobs}) == len(jobs)
    values: dict[str, list[str]] = {}  # one job for every value of every key
    for job in jobs:
        for override in job[:-1]:
            values.setdefault(override, job)
    chosen = [list(job) for job in {tuple(job) for job in values.values()}]
    configs = [compose(job) for job in chosen]
    for config in configs:
        validate(config)
    assert len({config_hash(config) for config in configs}) == len(chosen)


def test_every_yaml_file_is_reached() -> None:
    reached = {f"{group}/{name}" for group, names in group_choices().items() for name in names} | {"config", "tiny_base"}
    assert reached == {file.relative_to(conf_dir()).with_suffix("").as_posix() for file in conf_dir().rglob("*.y*ml")}


@pytest.mark.parametrize(("name", "directions"), [
    ("akl", ("forward", "reverse")), ("akl_swapped", ("reverse", "forward")), ("symmetric", ("symmetric", "symmetric")),
    ("akl_equal_strength", ("forward", "reverse")), ("uniform_k3", ("forward", "forward")),
    ("uniform_forward", ("forward", "forward")), ("uniform_reverse", ("reverse", "reverse")),
    ("uniform_forward_matched", ("forward", "forward")), ("uniform_reverse_matched", ("reverse", "reverse")),
])
def test_kl_groups_mean_what_they_say(name: str, directions: tuple[str, str]) -> None:
    kl = compose([f"objective/kl={name}"]).objective.kl
    assert (kl.direction_reasoning, kl.direction_answer) == directions
    assert (kl.beta_reasoning, kl.beta_answer, kl.placement) == (1e-3, 4e-2, "loss")
    own = "roles" if name in ("akl", "akl_swapped") else "equal"
    assert kl.strength == ("matched" if name.endswith("_matched") else own)
    assert kl.state_weight == ("none" if name == "uniform_k3" else "token")
    assert kl.estimator == ("sampled" if name.startswith("uniform_reverse") or name == "uniform_k3" else "topk")


def test_the_strength_of_an_arm_survives_an_experiment_with_betas_of_its_own() -> None:
    kl = compose(["+exp=tiny", "objective/kl=akl_equal_strength"]).objective.kl
    assert (kl.strength, kl.beta_reasoning, kl.beta_answer) == ("equal", 0.1, 1.0)


@pytest.mark.parametrize("name", group_choices()["objective/kl"])
def test_kl_groups_are_ablations_of_the_large_recipes(name: str) -> None:
    """The experiment leaves the strengths to the group, so that the choice on the command line is the whole arm."""
    alone, with_recipe = compose([f"objective/kl={name}"]), compose(["+exp=akl_7b", f"objective/kl={name}"])
    assert with_recipe.objective.kl == alone.objective.kl
    validate(with_recipe)


def test_every_kl_group_sets_the_same_keys() -> None:
    """Arms are compared by reading their files, so each one names everything that another one names."""
    files = sorted((conf_dir() / "objective" / "kl").glob("*.yaml"))
    keys = {file.stem: tuple(yaml.safe_load(file.read_text())) for file in files}
    assert len(keys) >= 9 and len(set(keys.values())) == 1


def test_the_large_recipes() -> None:
    config = compose(["+exp=akl_72b"])
    kl, cluster = config.objective.kl, config.cluster
    assert (config.model.path, config.data.recipe) == ("Qwen/Qwen2.5-72B-Instruct", "gsm8k_math")
    assert (kl.beta_reasoning, kl.beta_answer, kl.direction_reasoning, kl.direction_answer) == (1e-3, 4e-2, "forward", "reverse")
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.layout) == (16, 8, "separate")
    assert config.rollout.tensor_parallel_size > 1


@pytest.mark.parametrize("size", ["7b", "72b"])
def test_twins_differ_only_in_size(size: str) -> None:
    large, small = compose([f"+exp=akl_{size}"]), compose([f"+exp=akl_tiny_{size}"])
    same = ["cluster.layout", "roles.rule", "learner.updates_per_step", "learner.gradient_checkpointing", "checkpoint.keep"]
    same += [key for key in typed.hints() if key.startswith("objective.") and key not in
             ("objective.kl.estimator", "objective.kl.beta_reasoning", "objective.kl.beta_answer")]
    assert {key: typed.value_of(small, key) for key in same} == {key: typed.value_of(large, key) for key in same}


def test_keys_are_frozen() -> None:
    """Adding, renaming or removing a key is a decision: change config_keys.txt with it and record it in CHANGELOG.md."""
    assert sorted(typed.hints()) == KEYS.read_text(encoding="utf-8").split()


def test_configuration_is_immutable() -> None:
    config = compose(["+exp=tiny", "objective=dapo"])
    for node in (config, config.learner, config.objective.kl):
        with pytest.raises(dataclasses.FrozenInstanceError):
            node.lr = 1  # type: ignore[attr-defined]
    params = config.objective.policy_loss_params
    for change in (lambda: params.update({"a": 1}), lambda: params.__setitem__("clip_low", 0), lambda: params.pop("clip_low"),
                   lambda: params.clear(), lambda: params.setdefault("a", 1)):
        with pytest.raises(TypeError, match="frozen"):
            change()
    assert isinstance(config.learner.adam_betas, tuple)
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301


def test_command_line_beats_experiment_beats_group() -> None:
    assert compose(["+exp=tiny"]).rollout.max_response_tokens == 64
    assert compose(["+exp=tiny", "rollout.max_response_tokens=32"]).rollout.max_response_tokens == 32
    assert compose(["+exp=gsm8k_smollm2"]).data.recipe == "gsm8k"
    assert compose(["+exp=gsm8k_smollm2", "data=math"]).data.recipe == "math"


PARAMS, LOSS = "objective.policy_loss_params", "objective.policy_loss"


@pytest.mark.parametrize(("line", "loss", "params"), [
    ([], "ppo", {"clip_low": 0.2, "clip_high": 0.28}),
    ([f"{PARAMS}={{}}"], "ppo", {}),
    ([f"{PARAMS}={{clip_low: 0.1}}"], "ppo", {"clip_low": 0.1}),
    ([f"{PARAMS}.clip_low=0.1"], "ppo", {"clip_low": 0.1, "clip_high": 0.28}),
    ([f"{PARAMS}.dual_clip=3"], "ppo", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3}),
    ([f"{PARAMS}={{clip_low: 0.1}}", f"{PARAMS}.clip_high=0.3"], "ppo", {"clip_low": 0.1, "clip_high": 0.3}),
    ([f"{PARAMS}.clip_high=0.3", f"{PARAMS}={{clip_low: 0.1}}"], "ppo", {"clip_low": 0.1}),  # left to right
    ([f"{LOSS}=ppo"], "ppo", {"clip_low": 0.2, "clip_high": 0.28}),  # what the file says already
    ([f"{LOSS}=gspo"], "gspo", {}),
    ([f"{LOSS}=gspo", f"{PARAMS}.clip_low=1e-4"], "gspo", {"clip_low": 1e-4}),
    ([f"{PARAMS}.clip_low=1e-4", f"{LOSS}=gspo"], "gspo", {"clip_low": 1e-4}),
    ([f"{LOSS}=drpo", f"{PARAMS}={{delta: 0.15}}"], "drpo", {"delta": 0.15}),
    ([f"{PARAMS}={{clip_low: '${{seed}}'}}"], "ppo", {"clip_low": 0}),
])
@pytest.mark.parametrize("base", [["objective=dapo"], ["+exp=tiny_dppo", "objective=dapo"]])
def test_parameters_of_the_policy_loss(base: list[str], line: list[str], loss: str, params: dict[str, float]) -> None:
    objective = compose(check_command_line([*base, *line]).overrides).objective
    assert (objective.policy_loss, dict(objective.policy_loss_params)) == (loss, params)


def test_another_policy_loss_over_an_experiment_validates() -> None:
    """Over DPPO's preset, whose delta_low and delta_high are no parameters of DRPO."""
    config = compose(check_command_line(["+exp=tiny_dppo", f"{LOSS}=drpo", f"{PARAMS}={{delta: 0.15}}"]).overrides)
    validate(config)
    assert dict(config.objective.policy_loss_params) == {"delta": 0.15}
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize("exp", [exp for exp in EXPERIMENTS if not exp.startswith("sweep_")])
def test_another_objective_group_inherits_no_parameters_of_an_experiment(exp: str) -> None:
    for group in ("gspo", "drpo_geometry", "grpo"):
        alone, over = compose([f"objective={group}"]).objective, compose([f"+exp={exp}", f"objective={group}"]).objective
        assert (over.policy_loss, over.policy_loss_params) == (alone.policy_loss, alone.policy_loss_params)


def test_sweeps_take_the_same_path() -> None:
    jobs = sweep(check_command_line(["-m", "objective=dapo", f"{LOSS}=ppo,gspo", f"{PARAMS}={{}},{{clip_low: 0.1}}"]), stamp="T")
    found = [compose(job).objective for job in jobs]
    assert [(one.policy_loss, dict(one.policy_loss_params)) for one in found] == [
        ("ppo", {}), ("ppo", {"clip_low": 0.1}), ("gspo", {}), ("gspo", {"clip_low": 0.1})]
    jobs = sweep(check_command_line(["-m", "objective=dapo", f"{LOSS}=ppo,gspo", f"{PARAMS}.clip_low=0.1,0.3"]), stamp="T")
    assert [dict(compose(job).objective.policy_loss_params) for job in jobs] == [
        {"clip_low": 0.1, "clip_high": 0.28}, {"clip_low": 0.3, "clip_high": 0.28}, {"clip_low": 0.1}, {"clip_low": 0.3}]


def test_home_folder_in_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in typed.PATHS:
        assert typed.value_of(compose(check_command_line([f"{key}=~/a b"]).overrides), key) == f"{tmp_path}/a b"
        for other in ("a~/b", "~somebody/x", "/x/~", "./~/x"):
            assert typed.value_of(compose(check_command_line([f"{key}={other}"]).overrides), key) == other
    assert compose(check_command_line(["output_dir=~"]).overrides).output_dir == str(tmp_path)
    assert compose(check_command_line(["run_id=~/x"]).overrides).run_id == "~/x"  # a name, no path


@pytest.mark.parametrize("text", ["2026-11-30", "1e5", "007", "null", "yes", "${seed}", "a: b", "é\n# x", "0x1F"])
def test_yaml_round_trip_keeps_odd_texts(text: str) -> None:
    config = dataclasses.replace(Config(), run_id=text)
    assert from_yaml(to_yaml(config)) == config


def test_yaml_round_trip_keeps_numbers() -> None:
    config = compose(["+exp=akl_7b", "learner.lr=1e-20"])
    again = from_yaml(to_yaml(config))
    assert again.learner.lr == 1e-20 and again.weight_sync.max_gap is None and again.learner.adam_betas == (0.9, 0.999)


def test_foreign_yaml_is_refused_with_all_problems() -> None:
    data = yaml.safe_load(to_yaml(compose(["+exp=tiny"])))
    data["learner"]["lrr"] = 1
    data["seed"] = 1.5
    with pytest.raises(ConfigError) as caught:
        from_yaml(yaml.safe_dump(data))
    assert {problem.subject for problem in caught.value.problems} == {"learner.lrr", "seed"}
    for text in ("[1, 2]", "a: [", ""):
        with pytest.raises(ConfigError):
            from_yaml(text)


def test_own_yaml_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my files"
    (folder / "exp").mkdir(parents=True)
    (folder / "exp" / "mine.yaml").write_text("# @package _global_\ndefaults: [tiny]\nexperiment: mine\nseed: 5\n")
    (folder / "exp" / "bad.yaml").write_text("# @package _global_\nlearner: {lrr: 1}\nrollout: {group_size: 2.5}\n")
    search = f"hydra.searchpath=['{folder}']"
    config = compose(check_command_line([search, "+exp=mine"]).overrides)
    assert (config.experiment, config.seed, config.steps) == ("mine", 5, 40)
    with pytest.raises(ConfigError) as caught:
        compose(check_command_line([search, "+exp=bad"]).overrides)
    assert {problem.subject for problem in caught.value.problems} == {"learner.lrr", "rollout.group_size"}


def test_composition_errors_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="composition"):
        compose(["run_id=${no.such.key}"])


def test_hash_ignores_where_and_sees_what() -> None:
    base = config_hash(compose(["+exp=tiny"]))
    assert base == config_hash(compose(["+exp=tiny", "run_id=x", "output_dir=/elsewhere", "debug=true", "resume=never"]))
    assert base == config_hash(from_yaml(to_yaml(compose(["+exp=tiny"]))))
    for change in ("seed=1", "objective.kl.beta_answer=0.5", "rollout.group_size=4"):
        assert base != config_hash(compose(["+exp=tiny", change]))


def fresh_python(code: str, *, folder: Path, package_root: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(package_root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """--help, validation and dry runs must start at once: no torch, Ray, vLLM, DeepSpeed or transformers."""
    code = (
        "import sys\n"
        "from akl_dist.config import choices, command_line, compose, models, schema, typed, validate\n"
        "from akl_dist.cluster import placement, plan_text\n"
        "config = compose.compose(['+exp=akl_7b']); validate.validate(config)\n"
        "plan_text.plan_text(config, placement.layout(config))\n"
        "print([m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'numpy', 'datasets') if m in sys.modules])\n"
    )
    assert fresh_python(code, folder=tmp_path, package_root=Path(akl_dist.__file__).parents[1]) == "[]"


def test_validation_needs_only_the_standard_library(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from akl_dist.config import choices, models, schema, typed, validate\n"
        "from akl_dist.cluster import placement\n"
        "print([m for m in ('hydra', 'omegaconf', 'yaml', 'torch') if m in sys.modules])\n"
    )
    assert fresh_python(code, folder=tmp_path, package_root=Path(akl_dist.__file__).parents[1]) == "[]"


@pytest.mark.parametrize("installed", [False, True])
def test_any_folder_and_a_path_with_a_space(tmp_path: Path, installed: bool) -> None:
    """A checkout (conf beside the package) and an installed wheel (conf inside it), both under a path with a space."""
    root, elsewhere = tmp_path / "a b(c)", tmp_path / "else where"
    elsewhere.mkdir()
    package = root / "akl_dist"
    for part in ("config", "contract"):
        shutil.copytree(Path(akl_dist.__file__).parent / part, package / part)
    shutil.copy(akl_dist.__file__, package)
    shutil.copytree(conf_dir(), (package if installed else root) / "conf")
    code = (
        "from akl_dist.config.compose import compose, conf_dir\n"
        "print(conf_dir()); print(compose(['+exp=tiny', 'objective/kl=symmetric']).objective.kl.direction_answer)\n"
    )
    shown = fresh_python(code, folder=elsewhere, package_root=root).splitlines()
    assert shown == [str((package if installed else root) / "conf"), "symmetric"]
    assert list(elsewhere.iterdir()) == []  # composing writes nothing
