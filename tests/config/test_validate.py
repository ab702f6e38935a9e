"""Every rule refuses its violation and lets its border pass; all problems are raised at once."""

from __future__ import annotations

import functools
import inspect
import json
import typing
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from akl_dist.config import choices, models, typed
from akl_dist.config.command_line import check_command_line
from akl_dist.config.compose import compose
from akl_dist.config.resolve import kl_roles, resolved_objective
from akl_dist.config.schema import Config
from akl_dist.config.validate import not_run_yet, validate, warnings
from akl_dist.contract.errors import ConfigError, DataError, ModelError, UserError

CUDA = ("+exp=akl_7b",)
LARGE = ("+exp=akl_72b",)
SMOL = ("+exp=gsm8k_smollm2",)
IN_REWARD = ("objective.kl.placement=reward", "objective.kl.direction_reasoning=reverse", "objective.kl.estimator=sampled")


@functools.cache
def base(*choices_of_groups: str) -> Config:
    return compose(check_command_line(choices_of_groups).overrides)


def composed(*overrides: str) -> Config:
    """As compose() makes it; plain keys are set on a composed base, since composing takes a tenth of a second each time."""
    check_command_line(overrides)
    plain_keys = [line for line in overrides if "." in line.partition("=")[0] or line.partition("=")[0] in typed.hints()]
    data = typed.plain(base(*[line for line in overrides if line not in plain_keys]))
    for override in OverridesParser.create().parse_overrides(plain_keys):
        *parents, last = override.key_or_group.split(".")
        node = functools.reduce(lambda inner, name: inner[name], parents, data)
        node[last] = override.value()
    config, wrong = typed.build(data)
    if wrong:
        raise ConfigError(wrong)
    return config


def test_composed_is_what_compose_makes() -> None:
    line = ("+exp=gsm8k_smollm2", "learner.lr=1e-4", "objective.policy_loss_params.clip_low=0.1", "weight_sync.max_gap=null")
    assert composed(*line) == compose(check_command_line(line).overrides)


def problems(*overrides: str) -> dict[str, UserError]:
    try:
        validate(composed(*overrides))
    except ConfigError as error:
        assert all(problem.remedy and problem.expected for problem in error.problems)
        return {problem.subject: problem for problem in error.problems}
    return {}


@pytest.mark.parametrize(
    ("overrides", "key", "part"),
    [
        (["roles.rule=majorty"], "roles.rule", "roles.rule=majority"),
        (["roles.entropy_source=policy"], "roles.entropy_source", "policy_forward, rollout_topk"),
        (["roles.rule=position", "roles.entropy_source=policy_forward"], "roles.entropy_source", "nothing reads it"),
        (["roles.rule=verifier", "roles.position=tail"], "roles.position", "nothing reads it"),
        (["roles.position=tale"], "roles.position", "roles.position=tail"),
        (["roles.code_answer=program"], "roles.code_answer", "verify.kind=code"),
        (["objective.policy_loss=pppo"], "objective.policy_loss", "objective.policy_loss=ppo"),
        (["objective.policy_loss_params.clip_lo=0.1"], "objective.policy_loss_params.clip_lo", "Write clip_low"),
        (["objective.policy_loss_params.clip_low=-1"], "objective.policy_loss_params.clip_low", "from 0 to 1"),
        (["objective.policy_loss_params.clip_low=true"], "objective.policy_loss_params.clip_low", "from 0 to 1"),
        (["objective.policy_loss_params.dual_clip=0.5"], "objective.policy_loss_params.dual_clip", "above 1"),
        (["objective.anchor=new"], "objective.anchor", "old, rollout"),
        (["objective.aggregation=token_men"], "objective.aggregation", "objective.aggregation=token_mean"),
        (["objective.aggregation_norm=100"], "objective.aggregation_norm", "seq_mean_token_sum_norm"),
        (["objective.kl.placement=advantage"], "objective.kl.placement", "loss"),
        (["objective.kl.kl_denominator=rol"], "objective.kl.kl_denominator", "role"),
        (["objective.kl.estimator=top"], "objective.kl.estimator", "sampled, topk, full"),
        (["objective.kl.direction_answer=revers"], "objective.kl.direction_answer", "=reverse"),
        (["objective.kl.beta_answer=-0.1"], "objective.kl.beta_answer", "at least 0"),
        (["objective.kl.beta_reasoning=.inf"], "objective.kl.beta_reasoning", "got '.inf'"),
        (["objective.kl.beta_reasoning=inf"], "objective.kl.beta_reasoning", "at least 0"),
        (["objective.kl.beta_reasoning=nan"], "objective.kl.beta_reasoning", "at least 0"),
        (["objective.kl.estimator=sampled", "objective.kl.max_weight=0.5"], "objective.kl.max_weight", "at least 1"),
        (["objective.kl.estimator=full", "objective.kl.max_weight=3"], "objective.kl.max_weight", "nothing reads it"),
        (["roles.rule=position", "roles.entropy_window=5"], "roles.entropy_window", "nothing reads it"),
        (["roles.entropy_window=4"], "roles.entropy_window", "odd"),
        (["roles.entropy_quantile=1.5"], "roles.entropy_quantile", "at most 1"),
        (["rollout.temperature=0"], "rollout.temperature", "at least 0.01"),
        (["rollout.temperature=0.009"], "rollout.temperature", "at least 0.01"),
        (["rollout.group_size=0"], "rollout.group_size", "at least 1"),
        (["rollout.gpu_memory_utilization=0.9"], "rollout.gpu_memory_utilization", "cluster.device=cuda"),
        (["rollout.tensor_parallel_size=2"], "rollout.tensor_parallel_size", "1 with cluster.device=cpu"),
        (["rollout.num_engines=9"], "rollout.num_engines", "at most rollout.prompts_per_step=8"),
        (["learner.updates_per_step=5"], "learner.updates_per_step", "learner.updates_per_step=4"),
        (["learner.num_ranks=5", "learner.updates_per_step=2"], "learner.num_ranks", "at most 4"),
        (["learner.lr=-1"], "learner.lr", "at least 0"),
        (["learner.adam_betas=[0.9,1.0]"], "learner.adam_betas", "below 1"),
        (["learner.max_tokens_per_micro_batch=127"], "learner.max_tokens_per_micro_batch", "at least 128"),
        (["learner.offload_optimizer=true"], "learner.offload_optimizer", "cluster.device=cuda"),
        (["reference.max_tokens_per_batch=127"], "reference.max_tokens_per_batch", "at least 128"),
        (["reference.ranks_per_worker=2"], "reference.ranks_per_worker", "1 with cluster.device=cpu"),
        (["verify.batch_timeout_s=5"], "verify.batch_timeout_s", "above verify.timeout_s=5"),
        (["verify.timeout_s=0"], "verify.timeout_s", "above 0"),
        (["weight_sync.max_gap=0.01"], "weight_sync.max_gap", "0.001"),
        (["weight_sync.max_gap=null"], "weight_sync.max_gap", "0.001"),
        (["rollout.dtype=bfloat16", "weight_sync.mean_gap=0.05"], "weight_sync.max_gap", "null with bfloat16"),
        (["rollout.dtype=bfloat16", "weight_sync.max_gap=null"], "weight_sync.mean_gap", "0.05"),
        (["model.dtype=float16"], "model.dtype", "float32, bfloat16"),
        (["model.attention=flash_attention_2"], "model.attention", "sdpa"),
        (["cluster.devices_per_node=1"], "cluster.devices_per_node", "0 with cluster.device=cpu"),
        (["cluster.address=local", "cluster.num_nodes=2"], "cluster.num_nodes", "cluster.address=auto"),
        (["cluster.address=10.0.0.1:6379", "cluster.num_cpus=2"], "cluster.num_cpus", "null"),
        (["steps=0"], "steps", "at least 1"),
        (["seed=-1"], "seed", "at least 0"),
        (["resume=atuo"], "resume", "resume=auto"),
        (["resume=/no/such/checkpoint"], "resume", "existing checkpoint"),
        (["run_id=../x"], "run_id", "letters, digits"),
        (["run_id=a/b/c"], "run_id", "one / at most"),
        (["experiment='a b'"], "experiment", "letters, digits"),
        (["data=generic", "data.max_prompt_tokens=64"], "data.path", "data.name"),
        (["checkpoint.keep=0"], "checkpoint.keep", "at least 1"),
        (["data.name=org/set"], "data.name", "nothing reads it"),
    ],
)
def test_refused(overrides: list[str], key: str, part: str) -> None:
    if overrides[-1].endswith("=.inf"):  # Hydra reads .inf as a text: refused before validation
        with pytest.raises(ConfigError) as caught:
            composed(*overrides)
        assert part in str(caught.value)
        return
    found = problems(*overrides)
    assert list(found) == [key]
    assert part in str(found[key]) and found[key].exit_code == 2


@pytest.mark.parametrize(
    ("overrides", "key", "part"),
    [
        ([*CUDA, "cluster.devices_per_node=0"], "cluster.devices_per_node", "at least 1"),
        ([*CUDA, "learner.num_ranks=9"], "cluster.num_nodes", "takes 9 GPUs"),
        ([*CUDA, "rollout.tensor_parallel_size=4", "rollout.num_engines=2"], "rollout.tensor_parallel_size", "layout=separate"),
        ([*CUDA, "rollout.kv_cache_gib=4"], "rollout.kv_cache_gib", "cluster.device=cpu"),
        ([*LARGE, "cluster.num_nodes=15"], "cluster.num_nodes", "at least 16"),
        ([*LARGE, "objective.advantage=gae"], "cluster.num_nodes", "24: the separate layout takes 192 GPUs (engines 48, reference "
         "16, critic 64, learner 64)"),
        ([*LARGE, "rollout.tensor_parallel_size=3"], "rollout.tensor_parallel_size", "64 heads"),
        ([*LARGE, "rollout.tensor_parallel_size=16", "rollout.num_engines=3"], "rollout.tensor_parallel_size", "devices_per_"),
        ([*CUDA, "rollout.max_response_tokens=40000", "learner.max_tokens_per_micro_batch=50000",
          "reference.max_tokens_per_batch=50000"], "rollout.max_response_tokens", "32768"),
    ],
)
def test_refused_with_devices_and_models(overrides: list[str], key: str, part: str) -> None:
    found = problems(*overrides)
    assert list(found) == [key] and part in str(found[key])


@pytest.mark.parametrize("overrides", [
    ["learner.max_tokens_per_micro_batch=128", "reference.max_tokens_per_batch=128"],
    ["learner.num_ranks=4", "learner.updates_per_step=2"],
    ["objective.kl.beta_answer=0", "objective.kl.beta_reasoning=0"],
    ["objective.policy_loss_params={clip_low: 0, clip_high: 0.3, dual_clip: 3}"],
    ["objective.policy_loss_params.dual_clip=null"],
    ["objective.aggregation=seq_mean_token_sum_norm", "objective.aggregation_norm=100"],
    ["objective.kl.estimator=sampled", "objective.kl.max_weight=null"],
    ["objective.kl.estimator=sampled", "objective.kl.max_weight=1"],
    ["verify.batch_timeout_s=5.1"],
    ["rollout.dtype=bfloat16", "weight_sync.max_gap=null", "weight_sync.mean_gap=0.05"],
    ["run_id=multirun-x/3"],
    ["learner.lr=0"],
    ["evaluate.num_problems=0"],
    ["rollout.temperature=0.01"],
    ["data.prompt_suffix=''"],
])
def test_borders_pass(overrides: list[str]) -> None:
    assert problems(*overrides) == {}


def local_model(folder: Path, **changed: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
        "vocab_size": 263, "max_position_embeddings": 128, "tie_word_embeddings": True} | changed))
    return str(folder)


def test_the_critics_model(tmp_path: Path) -> None:
    """The embedded policy has 263 token ids; the longest sequence is 64 + 64 tokens."""
    gae = "objective.advantage=gae"

    def found(path: str) -> str:
        wrong = problems(gae, f"critic.path={path}")
        assert set(wrong) <= {"critic.path"}
        return str(wrong.get("critic.path", ""))

    assert found(local_model(tmp_path / "fits")) == ""
    assert "263 token ids" in found(local_model(tmp_path / "other", vocab_size=264))
    assert "at least 128 tokens" in found(local_model(tmp_path / "short", max_position_embeddings=127))
    assert "missing model directory" in found("/no/such/critic") and "not empty" in found("' '")
    assert "151,936" in found("Qwen/Qwen3-4B") and found("some/unknown") == ""
    assert isinstance(problems(gae, "critic.path=/no/such/critic")["critic.path"], ModelError)
    both = problems(gae, "critic.path=/no/such/critic", "model.path=/no/such/model")
    assert set(both) == {"critic.path", "model.path"}
    assert list(problems("critic.path=/no/such/critic")) == ["critic.path"]  # without a critic nothing reads it


def test_weights_are_held_against_their_own_headers(tmp_path: Path) -> None:
    """One tensor of 4 x 2 float32 after its header: 8 + len(header) + 32 bytes."""
    folder = Path(local_model(tmp_path / "m", vocab_size=4))

    def written(name: str, rows: int = 4, cut: int = 0) -> None:
        header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [rows, 2], "data_offsets": [0, rows * 8]}})
        data = len(header).to_bytes(8, "little") + header.encode() + bytes(rows * 8)
        (folder / name).write_bytes(data[:len(data) - cut])

    def said() -> str:
        with pytest.raises(ModelError) as caught:
            models.check_weights("model.path", str(folder))
        return str(caught.value)

    assert "model.safetensors: No such file" in said()
    written("model.safetensors")
    models.check_weights("model.path", str(folder))
    written("model.safetensors", cut=1)
    assert "bytes of " in said()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "not a safetensors file" in said()
    written("model.safetensors", rows=5)
    assert "5 rows" in said() and "4 token ids" in said()
    (folder / "model.safetensors").unlink()
    written("a.safetensors")
    (folder / models.INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert "b.safetensors: No such file" in said()
    written("b.safetensors")
    models.check_weights("model.path", str(folder))
    (folder / models.INDEX).write_text("[]")
    assert "no weight_map" in said()
    models.check_weights("model.path", "some/hub-name")


def test_a_critic_of_experts_is_planned_only() -> None:
    config = composed("+exp=drpo_4b", "objective.advantage=gae", "critic.path=Qwen/Qwen3-30B-A3B")
    (reason,) = not_run_yet(config)
    assert "critic.path" in reason and "128 experts" in reason


def test_all_problems_at_once() -> None:
    found = problems("steps=0", "roles.rule=x", "learner.lr=-1", "objective.policy_loss=x", "data.path=/no/such.jsonl",
                     "learner.updates_per_step=5", "model.path=/no/such/model", "verify.batch_timeout_s=1")
    assert set(found) == {"steps", "roles.rule", "learner.lr", "objective.policy_loss", "data.path", "learner.updates_per_step",
                          "model.path", "verify.batch_timeout_s"}
    assert isinstance(found["model.path"], ModelError) and "missing model directory" in str(found["model.path"])
    assert isinstance(found["data.path"], DataError)


def test_local_files_on_the_command_line(tmp_path: Path) -> None:
    """data=gsm8k data.path=FILE model.path=DIR with an experiment, from a folder with a space."""
    folder = tmp_path / "my model"
    folder.mkdir()
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    arguments = (*SMOL, "data=gsm8k", f"data.path={file}", f"model.path={folder}")
    assert "config.json" in str(problems(*arguments)["model.path"])
    (folder / "config.json").write_text("{not json")
    assert "config.json" in str(problems(*arguments)["model.path"])
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
        "tie_word_embeddings": True}))
    assert problems(*arguments) == {}
    sizes = models.sizes(str(folder))
    assert sizes is not None and sizes.num_parameters == models.KNOWN["HuggingFaceTB/SmolLM2-135M-Instruct"].num_parameters


def test_data_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Root reads everything, so that permission is taken away by hand; inside a folder only the dry run's reading finds it."""
    from akl_dist import job, main

    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    keys = {key: f"{key}={file}" for key in ("data.path", "data.eval_path")}
    assert not set(keys) & set(problems("data=gsm8k", *keys.values()))
    refused = PermissionError(13, "Permission denied", str(file))
    monkeypatch.setattr(job, "load_data", lambda config: (_ for _ in ()).throw(refused))
    assert main.main(["dry_run=true"]) == 2 and "Permission denied" in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda path, mode: path != str(file))
    found = problems("data=gsm8k", *keys.values())
    assert all(isinstance(found[key], DataError) and "may read" in str(found[key]) for key in keys)
    mixture = f"data.mixture={{gsm8k: {{path: '{file}'}}}}"
    assert "may read" in str(problems("data=math_code", mixture)["data.mixture.gsm8k.path"])


def test_replay_and_resume_folders(tmp_path: Path) -> None:
    assert "rollout.replay" in problems(f"rollout.replay={tmp_path}")
    (tmp_path / "step_000001.parquet").write_bytes(b"")
    replay = (f"rollout.replay={tmp_path}", "steps=1", f"resume={tmp_path}")
    assert "without manifest.json" in str(problems(*replay)["resume"])
    (tmp_path / "manifest.json").write_text("{}")
    assert problems(*replay) == {}


def test_replay_takes_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "step_000001.parquet").write_bytes(b"")  # not looked at where there is a rollouts folder
    assert "rollout.replay" in problems(f"rollout.replay={tmp_path}")
    (tmp_path / "rollouts" / "other.parquet").write_bytes(b"")
    assert "rollout.replay" in problems(f"rollout.replay={tmp_path}")
    (tmp_path / "rollouts" / "step_000001.parquet").write_bytes(b"")
    assert problems(f"rollout.replay={tmp_path}", "steps=1") == {}
    assert problems(f"rollout.replay={tmp_path}", "steps=1", "roles.entropy_source=policy_forward") == {}
    (found,) = problems(f"rollout.replay={tmp_path}", "steps=1", "roles.entropy_source=rollout_topk").values()
    assert "carry no entropies" in str(found)


def test_replay_has_a_dump_for_every_step(tmp_path: Path) -> None:
    for step in (4, 5):
        (tmp_path / f"step_{step:06d}.parquet").write_bytes(b"")
    (tmp_path / "step_7.parquet.tmp").write_bytes(b"")
    for steps in (1, 2, 5):  # 5: going on from the checkpoint of step 3
        assert problems(f"rollout.replay={tmp_path}", f"steps={steps}") == {}
    found = problems(f"rollout.replay={tmp_path}", "steps=6")
    assert list(found) == ["steps"] and "at most 2, the dumped steps" in str(found["steps"])


def test_replay_says_what_it_leaves_out() -> None:
    replay = [text for text in warnings(composed("rollout.replay=x", "evaluate.num_problems=8")) if "replay" in text]
    assert len(replay) == 1 and "no evaluation" in replay[0] and "no weight sync" in replay[0]
    assert not any("replay" in text for text in warnings(composed("rollout.replay=x", "evaluate.num_problems=0")))


# Figures of the published checkpoints (model cards and safetensors indices).
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768, "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688, "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664, "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648, "Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624, "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}


def test_known_models() -> None:
    assert {name: sizes.num_parameters for name, sizes in models.KNOWN.items()} == PARAMETERS
    mixture = models.KNOWN["Qwen/Qwen3-30B-A3B"]
    assert 3.2e9 < mixture.num_active_parameters < 3.5e9  # "A3B"


@pytest.mark.parametrize(("path", "local"), [
    ("tiny", True), ("/x", True), ("./x/y", True), ("~/m", True), ("model", True), ("a/b/c", True),
    ("Qwen/Qwen2.5-7B-Instruct", False), ("org/name", False),
])
def test_local_or_hub(path: str, local: bool) -> None:
    assert models.looks_local(path) is local


def test_embedded_model() -> None:
    sizes = models.sizes("tiny")
    assert sizes is not None and sizes.vocabulary < 512 and sizes.num_parameters < 2_000_000
    assert models.resolve("tiny").endswith("tiny/model")


def test_warnings() -> None:
    assert any("group_size=1" in text for text in warnings(composed("rollout.group_size=1")))
    assert any("idle" in text for text in warnings(composed("rollout.num_engines=5")))
    unweighted = ("objective.kl.estimator=sampled", "objective.kl.state_weight=none")
    assert any("is not here" in text and "no stated divergence" in text for text in warnings(composed(*unweighted)))
    assert any("updates_per_step=4" in text for text in warnings(composed(*unweighted, "learner.updates_per_step=4")))
    assert any("betas" in text for text in warnings(composed("objective.kl.beta_answer=0", "objective.kl.beta_reasoning=0")))
    assert warnings(composed("+exp=tiny")) == []


@pytest.mark.parametrize(("overrides", "kind"), [
    ([], "none"),
    (["rollout.dtype=bfloat16"], "tis"),
    (["rollout.dtype=bfloat16", "objective.anchor=rollout"], "none"),
    (["rollout.dtype=bfloat16", "objective.anchor=rollout", "objective.policy_loss=reinforce"], "tis"),
    (["rollout.dtype=bfloat16", "objective.anchor=rollout", "objective.policy_loss=reinforce",
      "objective.policy_loss_params={max_weight: 2}"], "none"),
    (["objective.correction.kind=mis"], "mis"),
])
def test_which_correction_auto_is(overrides: list[str], kind: str) -> None:
    correction = resolved_objective(composed(*overrides)).correction
    assert (correction.kind, correction.level, correction.high) == (kind, "token", 2.0)


ZERO_ANSWER = ("objective.kl.strength=equal", "objective.kl.beta_answer=0", "objective.kl.beta_reasoning=0.1")


@pytest.mark.parametrize(("overrides", "roles"), [
    ([], ["reasoning", "answer"]),
    (["objective.kl.beta_reasoning=0"], ["answer"]),
    (["objective.kl.beta_answer=0"], ["reasoning"]),
    (ZERO_ANSWER, []),
    (["objective.kl.strength=equal", "objective.kl.beta_reasoning=0"], ["reasoning", "answer"]),
    (["objective.kl.strength=matched", "objective.kl.beta_reasoning=0"], ["reasoning", "answer"]),
    (["objective.kl.strength=matched", "objective.kl.beta_answer=0"], ["reasoning", "answer"]),
    (["objective.kl.strength=matched", "objective.kl.beta_reasoning=0", "objective.kl.beta_answer=0"], []),
])
def test_roles_with_a_kl_term(overrides: list[str], roles: list[str]) -> None:
    """What is warned about, adapted and checked goes by the betas that act, and those by the strength."""
    from akl_dist.learner.step import role_betas
    from akl_dist.zero3.planning import Totals

    kl = composed(*overrides).objective.kl
    assert list(kl_roles(kl)) == roles
    assert [role for role, beta in role_betas(kl, Totals(10, 2, 3))._asdict().items() if beta > 0] == roles
    assert any("no KL term" in text for text in warnings(composed(*overrides))) == (not roles)
    assert ("objective.kl.adaptive_target" in problems(*overrides, "objective.kl.adaptive_target=0.1")) == (not roles)
    cokl = [text for text in warnings(composed(*overrides, "objective.cokl.beta=0.1")) if "beside a full KL" in text]
    assert bool(cokl) == bool(roles)
    in_reward = ("objective.kl.estimator=sampled", "objective.kl.placement=reward", "objective.kl.direction_reasoning=forward",
                 "objective.kl.direction_answer=forward")
    assert sorted(problems(*overrides, *in_reward)) == sorted(f"objective.kl.direction_{role}" for role in roles)


def test_one_strength_says_which_beta_it_leaves_out() -> None:
    def notes(*overrides: str) -> list[str]:
        return [text for text in warnings(composed(*overrides)) if "does not read objective.kl.beta_reasoning" in text]

    (note,) = notes("objective.kl.strength=equal", "objective.kl.beta_reasoning=0.3", "objective.kl.beta_answer=0.2")
    assert "both roles take objective.kl.beta_answer=0.2" in note
    assert notes(*ZERO_ANSWER)
    assert not notes("objective.kl.strength=equal") and not notes("objective.kl.beta_reasoning=0.3")
    assert not notes("objective.kl.strength=equal", "objective.kl.beta_reasoning=0.2", "objective.kl.beta_answer=0.2")


@pytest.mark.parametrize(("overrides", "largest"), [
    ([], 2.0), (["objective.kl.state_weight=cumulative"], 5.0), (["objective.kl.state_weight=cumulative",
     "objective.kl.max_weight=2"], 2.0), (["objective.kl.max_weight=null"], None), (["objective.kl.max_weight=auto"], 2.0),
])
def test_truncation_of_kl_weights(overrides: list[str], largest: float | None) -> None:
    config = composed("objective.kl.estimator=sampled", *overrides)
    validate(config)
    assert resolved_objective(config).kl.max_weight == largest


@pytest.mark.parametrize("value", ["aut", "0.5", "0", "nan", "inf"])
def test_truncations_that_are_none(value: str) -> None:
    found = problems("objective.kl.estimator=sampled", f"objective.kl.max_weight={value}")
    assert list(found) == ["objective.kl.max_weight"] and "auto" in str(found["objective.kl.max_weight"])


def test_a_critic_that_warms_up_to_the_end_leaves_no_training() -> None:
    gae = ("objective.advantage=gae", "steps=5")
    found = problems(*gae, "critic.warmup_steps=5")
    assert list(found) == ["critic.warmup_steps"] and "below steps=5" in str(found["critic.warmup_steps"])
    assert problems(*gae, "critic.warmup_steps=4") == {}


@pytest.mark.parametrize("state_weight", ["cumulative", "none"])
def test_kl_in_the_reward_has_no_weights(state_weight: str) -> None:
    found = problems("objective/kl=uniform_reverse", "objective.kl.placement=reward", f"objective.kl.state_weight={state_weight}")
    assert list(found) == ["objective.kl.state_weight"] and "nothing is weighted" in str(found["objective.kl.state_weight"])


def test_planned_but_not_run() -> None:
    assert not_run_yet(composed(*LARGE)) and not not_run_yet(composed(*CUDA))
    assert "ranks_per_worker" in not_run_yet(composed(*LARGE))[0]


FREE_TEXT = {"experiment", "run_id", "output_dir", "resume", "cluster.address", "model.path", "data.name", "data.path",
             "data.anchor_path", "critic.path", "objective.policy_loss_module", "data.split", "data.eval_path",
             "data.eval_split", "data.columns.prompt", "data.columns.answer", "data.columns.id",
             "data.system_prompt", "data.prompt_suffix", "rollout.replay", "rollout.tools.environment", "objective.policy_loss",
             "verify.custom", "verify.http_url", "verify.http_token_env"}


def test_every_key_has_a_rule() -> None:
    """A number without a range or a text without choices would reach a worker unchecked."""
    ranged = {key for key, *_ in choices.RANGES} | {"learner.adam_betas", "objective.kl.max_weight"}
    for key, hint in typed.hints().items():
        members = typing.get_args(hint) or (hint,)
        if bool in members or key in typed.free_form():
            continue
        if typed.is_text(key):
            assert (key in choices.CHOICES) != (key in FREE_TEXT), key
        else:
            assert key in ranged, key
    assert set(choices.CHOICES) | ranged <= set(typed.hints())


def test_loss_table_agrees_with_the_objective() -> None:
    from akl_dist.objective.policy_losses import POLICY_LOSSES

    tensors = ("logp", "anchor_logp", "advantages", "mask")
    registered = {
        name: {p for p in inspect.signature(function).parameters if p not in tensors} for name, function in POLICY_LOSSES.items()
    }
    assert registered == {name: set(params) for name, params in choices.POLICY_LOSS_PARAMS.items()}


def test_recipes_agree_with_the_data_stage() -> None:
    from akl_dist.config.mixture import RECIPE
    from akl_dist.data.recipes import RECIPES

    assert set(choices.CHOICES["data.recipe"]) == {*RECIPES, RECIPE}
