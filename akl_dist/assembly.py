"""Builds the stages of one run on a connected cluster, and takes them down again. main's and job's own part: nothing else
imports it. All actors start at once; the wait for them has one limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from akl_dist.bookkeeping import checkpoint
from akl_dist.bookkeeping.checkpoint import Checkpoint, CheckpointState
from akl_dist.bookkeeping.journal import RunDirectory
from akl_dist.bookkeeping.pool import ReplayPool, Scribe
from akl_dist.bookkeeping.rollout_dump import ReplayOrder, ReplayReader
from akl_dist.cluster.gather import gather
from akl_dist.cluster.placement import layout
from akl_dist.cluster.reserve import Reservation
from akl_dist.cokl.pool import BufferPool
from akl_dist.cokl.stage import (
    Anchors,
    WithReferenceSamples,
    drawn_with,
    needs_reference_samples,
    prompts_of_run,
    sample_reference,
)
from akl_dist.config import models
from akl_dist.config.compose import config_hash
from akl_dist.config.mixture import verifiers
from akl_dist.config.resolve import resolved_objective
from akl_dist.config.schema import Config
from akl_dist.contract.errors import ResumeMismatch
from akl_dist.contract.records import Prompt, Sampling
from akl_dist.critic.pool import CriticPool, CriticSettings
from akl_dist.critic.warmup import AfterWarmup
from akl_dist.data.hub import model_folder
from akl_dist.data.mixture import prompt_source_of
from akl_dist.data.source import LoadedData
from akl_dist.learner.pool import LearnerPool, LearnerSettings
from akl_dist.loop import Progress, PromptTaker, Stages
from akl_dist.reference.pool import ReferencePool, ReferenceSettings
from akl_dist.rollout.launch import engine_settings
from akl_dist.rollout.pool import RolloutPool
from akl_dist.rollout.sampling import end_ids
from akl_dist.summaries import Evaluation
from akl_dist.verify.pool import VerifyPool, VerifySettings
from akl_dist.weight_sync.pool import WeightSyncPool


class Assembly:
    """Stages of one run. Construction starts every actor; :meth:`wait_until_ready` waits for them.

    Args:
        loaded: the data; None in a replay, whose prompts come from the dumps.
        resumed: the checkpoint to go on from, None for a fresh run.
    """

    def __init__(
        self, config: Config, *, directory: RunDirectory, loaded: LoadedData | None, resumed: Checkpoint | None
    ) -> None:
        self._config, self._directory, self._resumed = config, directory, resumed
        self._run_id, self._model = str(config.run_id), str(model_folder(config.model.path))
        replay = config.rollout.replay
        assert loaded is not None or replay is not None, "only a replay runs without data"
        order = None if replay is None else replay_order(replay, resumed)
        source = prompt_source(loaded, resumed, config) if loaded is not None and order is None else None
        self.end_ids = end_ids(self._model)
        self._version = int(resumed.state.counters["policy_version"]) if resumed else 0
        self._reservation = Reservation(layout(config), run_id=self._run_id, log_dir=directory.logs,
                                        timeout_s=config.cluster.start_timeout_s)
        self._learner = self._make_learner()
        self._critic = self._make_critic() if config.objective.advantage == "gae" else None
        self._verify = VerifyPool(
            run_id=self._run_id, actor_options=self._reservation.options("verify"),
            settings=VerifySettings(self._model, self.end_ids, config.verify, config.roles, seed=config.seed,
                                    kinds=tuple(sorted(verifiers(config)))),
            policy_entropies=self._learner.entropies if config.roles.entropy_source == "policy_forward" else None)
        self._reference = self._make_reference()
        self._train_prompts = loaded.train if loaded is not None else []
        self._anchors = Anchors(loaded.anchor, seed=config.seed, per_step=config.rollout.prompts_per_step) if (
            loaded is not None and loaded.anchor) else None
        self._buffer = self._make_buffer() if needs_reference_samples(config) else None
        self.dump = Scribe(run_id=self._run_id, folder=directory.rollouts, evaluations=directory.evaluations,
                           timeout_s=config.rollout.timeout_s,
                           options=self._reservation.beside_driver("scribe")) if config.journal.dump_rollouts else None
        self._engines = self._make_engines() if order is None else None
        self._replay = None if order is None else self._make_replay(str(replay), order)
        prompts = source or self._replay
        assert prompts is not None
        self.prompts: PromptTaker = prompts
        self.probe_prompts: list[Prompt] = loaded.train[:config.weight_sync.probe_sequences] if loaded else []
        self.stages = self._make_stages()

    # --- construction --------------------------------------------------------------------------------------------

    def _make_engines(self) -> RolloutPool:
        return RolloutPool(run_id=self._run_id, settings=engine_settings(self._config, self._model),
                           actor_options=self._reservation.options("rollout"), timeout_s=self._config.rollout.timeout_s)

    def _make_learner(self) -> LearnerPool:
        config = self._config
        settings = LearnerSettings(
            model_path=self._model, dtype=config.model.dtype, attention=config.model.attention, device=config.cluster.device,
            learner=config.learner, objective=resolved_objective(config), temperature=config.rollout.temperature, seed=config.seed,
            failures=str((self._directory.root / "failures").resolve()))
        return LearnerPool(run_id=self._run_id, settings=settings, actor_options=self._reservation.options("learner"),
                           max_staleness=config.rollout.max_staleness, current_version=lambda: self._version)

    def _make_critic(self) -> CriticPool:
        config, critic, objective = self._config, self._config.critic, self._config.objective
        settings = CriticSettings(
            model_path=str(model_folder(critic.path or config.model.path)), dtype=config.model.dtype,
            attention=config.model.attention, device=config.cluster.device,
            learner=replace(config.learner, lr=critic.lr, max_grad_norm=critic.max_grad_norm, warmup_steps=0), seed=config.seed,
            failures=str((self._directory.root / "failures").resolve()), clip=critic.clip, gamma=objective.gamma,
            lam=objective.gae_lambda, whiten=critic.whiten)
        return CriticPool(run_id=self._run_id, settings=settings, actor_options=self._reservation.options("critic"))

    def _make_reference(self) -> ReferencePool:
        config = self._config
        settings = ReferenceSettings(
            model_path=self._model, dtype=config.model.dtype, attention=config.model.attention, device=config.cluster.device,
            temperature=config.rollout.temperature, num_threads=config.reference.num_threads,
            max_tokens_per_batch=config.reference.max_tokens_per_batch,
            logprob_chunk_tokens=config.learner.logprob_chunk_tokens,
            kl_estimator=config.objective.kl.estimator, topk=config.objective.kl.topk, timeout_s=config.reference.timeout_s)
        return ReferencePool(run_id=self._run_id, settings=settings, actor_options=self._reservation.options("reference"))

    def _make_buffer(self) -> BufferPool:
        return BufferPool(run_id=self._run_id, folder=self._directory.root / "cokl_reference",
                          drawn_with=drawn_with(self._config, self._model), options=self._reservation.beside_driver("cokl"),
                          timeout_s=self._config.rollout.timeout_s)

    def _make_replay(self, folder: str, order: ReplayOrder) -> ReplayPool:
        return ReplayPool(run_id=self._run_id, folder=folder, order=order, options=self._reservation.beside_driver("replay"),
                          timeout_s=self._config.rollout.timeout_s, policy_version=self._version)

    def _make_stages(self) -> Stages:
        rollout = self._engines or self._replay
        assert rollout is not None
        sync = self._config.weight_sync
        weights = self._replay or WeightSyncPool(
            learner_ranks=self._learner.ranks, engines=self._engines.engines if self._engines else {},
            bucket_bytes=int(sync.bucket_mib * 2**20), mean_gap=sync.mean_gap, max_gap=sync.max_gap, timeout_s=sync.timeout_s)
        learner = self._learner if self._buffer is None else WithReferenceSamples(self._learner, self._buffer, self._anchors)
        if self._critic is not None:
            learner = AfterWarmup(learner, self._config.critic.warmup_steps)
        return Stages(rollout=rollout, verify=self._verify, reference=self._reference, learner=learner,
                      weight_sync=Versioned(weights, self._moved), critic=self._critic)

    def _moved(self, policy_version: int) -> None:
        self._version = policy_version

    # --- life ----------------------------------------------------------------------------------------------------

    def wait_until_ready(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Wait until every actor has loaded what it needs; returns actor name -> what it reports of itself."""
        begin = time.perf_counter()
        pools = [p for p in (self._engines, self._learner, self._critic, self._reference, self._verify) if p is not None]
        waiting = {name: ref for pool in pools for name, ref in pool.ready().items()}
        say(f"starting {len(waiting)} actors: {', '.join(waiting)}")
        started = gather(waiting, timeout_s=self._config.cluster.start_timeout_s, stage="cluster", doing="starting")
        say(f"all actors are up after {time.perf_counter() - begin:.0f} s")
        return started

    def restore(self) -> Progress:
        """Load the checkpoint into the learner; the first sync of the loop brings the weights to the engines."""
        assert self._resumed is not None, "nothing to restore"
        for owner in (self._learner, self._critic):
            if owner is not None:
                owner.load(self._resumed.folder)
        state = self._resumed.state
        evaluations = {name: Evaluation.from_dict(fields) for name, fields in state.evaluation.items() if fields is not None}
        return Progress(step=self._resumed.step, policy_version=int(state.counters["policy_version"]),
                        optimizer_steps=int(state.counters["optimizer_steps"]),
                        kl_coefficient=state.counters.get("kl_coefficient", 1.0), evaluations=evaluations)

    def sample_reference(self, progress: Progress, *, stop_requested: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Have the engines draw CoKL's reference samples that are not there yet. Before the first sync: until then the engines
        hold the weights of ``model.path``, on a resumed run, too."""
        if self._buffer is None:
            return
        config, rollout, cokl = self._config, self._config.rollout, self._config.objective.cokl
        prompts = self._anchors.of_run(progress.step + 1, config.steps) if self._anchors is not None else prompts_of_run(
            self._train_prompts, self.prompts.state(), config, steps_left=config.steps - progress.step)
        how = Sampling(group_size=cokl.reference_samples, temperature=rollout.temperature, end_ids=self.end_ids,
                       max_response_tokens=rollout.max_response_tokens, seed_key=("cokl", config.seed))
        sample_reference(
            prompts, self._buffer, self.stages.rollout, self._verify, self._reference, sampling=how, say=say,
            prompts_per_draw=rollout.prompts_per_step * max(1, rollout.group_size // cokl.reference_samples),
            stop_requested=stop_requested)

    def save(self, progress: Progress) -> None:
        """A whole checkpoint or none; older ones go only after this one is verified. Raises CheckpointError for a full disk."""
        config, root = self._config, self._directory.root
        evaluation: dict[str, Any] = {name: None for name in ("initial", "best", "last")}
        evaluation |= {name: e.to_dict() for name, e in progress.evaluations.items()}
        state = CheckpointState(
            num_ranks=config.learner.num_ranks, config_hash=config_hash(config), prompt_source=self.prompts.state(),
            counters={"policy_version": progress.policy_version, "optimizer_steps": progress.optimizer_steps,
                      "kl_coefficient": progress.kl_coefficient},
            evaluation=evaluation, best_step=None)
        checkpoint.check_free_space(root, needed_bytes(config, root))
        with checkpoint.saving(root, progress.step) as temporary:
            for owner in (self._learner, self._critic):
                if owner is not None:
                    owner.save(temporary)
            saved = checkpoint.commit(temporary, progress.step, state)
        checkpoint.remove_old(root, saved, config.checkpoint.keep, ())

    def export(self, folder: Any) -> None:
        """The final Hugging Face folder."""
        self._learner.export(folder.resolve())

    def flush(self) -> None:
        """Everything that is still being written is on disk afterwards."""
        if self.dump is not None:
            self.dump.flush()

    def close(self) -> None:
        """Stop engines first, then graders and models, then give the bundles back."""
        with ExitStack() as closing:  # goes on to the next one where one raises
            closing.callback(self._reservation.release)
            for pool in (self._learner, self._critic, self._reference, self._verify, self._buffer, self.dump, self._replay,
                         self._engines):  # the last one first
                if pool is not None:
                    closing.callback(pool.close)


class Versioned:
    """Weight sync that tells the learner's staleness check which version is current, once a sync has succeeded."""

    def __init__(self, inner: Any, moved: Callable[[int], None]) -> None:
        self._inner, self._moved = inner, moved

    def sync(self, policy_version: int, probe: Any) -> Any:
        report = self._inner.sync(policy_version, probe)
        self._moved(report.policy_version)
        return report


def prompt_source(loaded: LoadedData, resumed: Checkpoint | None, config: Config) -> PromptTaker:
    """A run's prompts from the beginning, or from where the checkpoint was taken. Raises ResumeMismatch for a replay's."""
    state = None if resumed is None else resumed.state.prompt_source
    if resumed is not None and "num_prompts" not in resumed.state.prompt_source:
        raise ResumeMismatch(
            f"{resumed.folder}: prompts", got=f"the checkpoint of a replay ({', '.join(sorted(resumed.state.prompt_source))})",
            expected="the position of a prompt source, for a run that samples", stage="checkpoint",
            remedy="Set rollout.replay to its dumps, or resume from a checkpoint of a run with engines.")
    return prompt_source_of(loaded, config.data, config.seed, state, prompts_per_step=config.rollout.prompts_per_step)


def replay_order(folder: str, resumed: Checkpoint | None) -> ReplayOrder:
    """Which dumps a replay of ``folder`` takes, from the first or from where the checkpoint was taken."""
    dumped = ReplayReader(folder).steps
    if resumed is None:
        return ReplayOrder(dumped)
    return ReplayOrder.resumed(dumped, step=resumed.step, prompt_source=resumed.state.prompt_source)


def needed_bytes(config: Config, run_dir: Path) -> int:
    """Bytes that the next checkpoint takes: those of the last one; before it 4 (master weights) + 8 (Adam's moments) and the
    weight's own bytes a parameter of the policy and of a critic; 0 for a model whose sizes are not known."""
    last = checkpoint.newest_size(run_dir)
    if last is not None:
        return last
    trained = [config.model.path, *([config.critic.path or config.model.path] if config.objective.advantage == "gae" else [])]
    sizes = [one for one in map(models.sizes, trained) if one is not None]
    weight = 2 if config.model.dtype == "bfloat16" else 4
    return sum(one.num_parameters for one in sizes) * (4 + 8 + weight)
