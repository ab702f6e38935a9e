"""Evaluate a model: ``python -m akl_dist.evaluate model.path=DIR data=gsm8k evaluate.samples=8``.

Engines and graders of a training run, without the rest: every problem of the data's evaluation side is sampled
``evaluate.samples`` times at ``rollout.temperature`` and judged by the trainer's own verifier. Writes ``evaluation.json`` and
prints a table. Each judged problem is on disk before the next round, so the same command with the same ``run_id`` goes on after
a kill.

Exit codes as of ``akl_dist.main``: 0 finished, 1 failed, 2 a mistake, 130 or 143 interrupted (what was judged is saved).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from akl_dist import job
from akl_dist.cluster import environment, preflight
from akl_dist.cluster.placement import evaluation_layout, lacks
from akl_dist.config import typed
from akl_dist.config.choices import GENERATED_RECIPES
from akl_dist.config.command_line import ParsedCommand, check_command_line, help_text
from akl_dist.config.compose import compose
from akl_dist.config.mixture import OWN_WORDS, verifiers
from akl_dist.config.resolve import resolved_data
from akl_dist.config.schema import Config
from akl_dist.config.validate import validate
from akl_dist.contract.errors import AklError, ClusterError, DataError, RunError, UserError
from akl_dist.rollout.tools import check_environment
from akl_dist.verify.rewards import check_rewards

if TYPE_CHECKING:
    from akl_dist.bookkeeping.journal import RunDirectory
    from akl_dist.bookkeeping.sample_records import SampleFile
    from akl_dist.contract.records import JudgedGroup, Prompt, RolloutGroup
    from akl_dist.data.source import LoadedData
    from akl_dist.evaluation import SampleRecord
    from akl_dist.published import Protocol
    from akl_dist.rollout.pool import RolloutPool
    from akl_dist.verify.pool import VerifyPool

EXAMPLE = "python -m akl_dist.evaluate model.path=DIR data=gsm8k evaluate.samples=8 rollout.max_response_tokens=1024"
EXPERIMENT = "evaluate"  # <output_dir>/evaluate/<run id>/: a training run of the same id keeps its own directory
SAMPLED_WITH = ("model.path", "evaluate.samples", "evaluate.seed", "rollout.temperature", "rollout.max_response_tokens",
                "rollout.dtype", "verify.kind", "verify.custom", "verify.signature", "verify.http_url", "verify.right_at",
                "verify.terms")
SAMPLED_WITH_GROUPS = ("data.", "rollout.tools.")
MANY_TRUNCATED = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = any(a.replace(" ", "").lower() == "debug=true" for a in arguments)
    try:
        command = check_command_line(arguments)
        if command.help:
            job.say(help_text("akl_dist.evaluate", EXAMPLE, sweeps=False))
            return 0
        config = configuration(command)
    except AklError as error:
        return job.complain(error, replace(Config(), debug=debug))
    return run(config)


def configuration(command: ParsedCommand) -> Config:
    """The composed configuration. Without an experiment and without ``evaluate.num_problems`` the whole benchmark is evaluated.

    Raises ConfigError (the command line, the values) and UserError (a sweep).
    """
    if command.multirun:
        raise UserError("-m", got="a sweep", expected="one evaluation a command", stage="config",
                        remedy="Call the command once per model.")
    config = compose(command.overrides)
    chosen = any(text.lstrip("+").startswith(("exp=", "evaluate.num_problems=")) for text in command.overrides)
    if not chosen and config.data.recipe not in GENERATED_RECIPES:
        config = replace(config, evaluate=replace(config.evaluate, num_problems=None))
    data = config.data
    if data.recipe in OWN_WORDS and data.name is None and data.path is None and data.eval_path is None:
        raise UserError("data.eval_path", got="null", expected=f"a file, or data.name, for data.recipe={data.recipe}",
                        remedy="Write data.eval_path=FILE or data.name=HUB_NAME.", stage="config")
    validate(_without_training_limits(config))
    if config.evaluate.num_problems == 0:
        raise UserError("evaluate.num_problems", got="0", expected="at least 1, or null for all", stage="config",
                        remedy="Write evaluate.num_problems=null.")
    return config


def _without_training_limits(config: Config) -> Config:
    """The configuration with the token budgets of learner and reference wide enough, since neither takes part."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return replace(config, learner=replace(config.learner, max_tokens_per_micro_batch=longest),
                   reference=replace(config.reference, max_tokens_per_batch=longest))


def run(config: Config) -> int:
    """One evaluation, or with ``dry_run=true`` the data report and what this machine lacks. Returns the exit code."""
    from akl_dist.bookkeeping.journal import RunDirectory, new_run_id

    config = replace(config, run_id=config.run_id or new_run_id())
    directory = RunDirectory(Path(config.output_dir) / EXPERIMENT / str(config.run_id))
    stop = _Stop()
    try:
        environment.prepare(config.cluster.address)
        check_rewards(config)
        check_environment(config)
        job.check_models(config)
        missing = _missing(config)
        if config.dry_run:
            job.say("\n".join([str(load(config).report), *(f"this machine lacks: {item}" for item in missing)]))
            return 0
        if missing:
            raise ClusterError("this machine", got="; ".join(missing), expected="room for the engines", stage="cluster",
                               remedy="Ask for fewer engines or devices.")
        job.check_writable(directory.root)
        with stop:
            return _Evaluation(config, directory, load(config), stop).execute()
    except AklError as error:
        return job.complain(error, config)
    except KeyboardInterrupt:
        job.say(f"interrupted; the same command with run_id={config.run_id} goes on from there")
        return job.INTERRUPTED_EXIT[signal.SIGINT]
    except SystemExit as error:  # Ray's own SIGTERM handler, before ours is back in place
        return job.INTERRUPTED_EXIT[signal.SIGTERM] if error.code == signal.SIGTERM else 1
    except OSError as error:
        return job.complain(RunError("file system", got=str(error), expected="files that can be written and read", stage="run",
                                     remedy="Free space or mend permissions, then go on with the same run_id."), config)


def load(config: Config) -> LoadedData:
    """The evaluation side of the data, tokenised."""
    from akl_dist.data.hub import model_folder
    from akl_dist.data.source import load_evaluation
    from akl_dist.verify.golds import invalid_gold

    loaded = load_evaluation(resolved_data(config), model_folder(config.model.path), num_problems=config.evaluate.num_problems,
                             invalid_gold=invalid_gold(config.verify.kind), gold_checks=invalid_gold)
    if not loaded.evaluation:
        raise DataError("evaluation problems", got="0", expected="at least one", remedy=str(loaded.report), stage="data")
    return loaded


def _missing(config: Config) -> list[str]:
    if environment.resolve_address(config.cluster.address) is not None:
        return []
    return lacks(evaluation_layout(config), [preflight.machine_resources(config)])


class _Stop:
    """SIGTERM asks for an end after the round that is under way."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Take SIGTERM (again: ``ray.init`` puts its own handler in place)."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        job.say("SIGTERM: finishing the round that is under way")

    def __enter__(self) -> _Stop:
        self._earlier = signal.getsignal(signal.SIGTERM)
        self.listen()
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGTERM, self._earlier)


class _Evaluation:
    """One evaluation in its directory: what is not on file yet is sampled and judged, then everything is summed up."""

    def __init__(self, config: Config, directory: RunDirectory, loaded: LoadedData, stop: _Stop) -> None:
        self.config, self.loaded, self.stop = config, loaded, stop
        self.directory = directory
        self.result = directory.root / "evaluation.json"
        self.sandbox: str | None = None
        self.judged: list[JudgedGroup] = []  # of this attempt, without their arrays

    def execute(self) -> int:
        from akl_dist.bookkeeping.journal import RunDirectory
        from akl_dist.bookkeeping.sample_records import SampleFile

        config = self.config
        job.say(str(self.loaded.report))
        directory = RunDirectory.create(config.output_dir, EXPERIMENT, str(config.run_id), typed.plain(config))
        samples = SampleFile(directory.root / "samples.jsonl", identity=self._identity(), votes={
            prompt.source for prompt in self.loaded.evaluation if (prompt.verifier or config.verify.kind) == "math"})
        done = samples.done
        todo = [prompt for prompt in self.loaded.evaluation if prompt.prompt_id not in done]
        if done:
            job.say(f"{len(done)} problems are on file, {len(todo)} are left")
        if todo:
            self._sample(todo, samples)
        if self.stop.requested and {p.prompt_id for p in self.loaded.evaluation} - samples.done:
            job.say(f"interrupted; the same command with run_id={config.run_id} goes on from there")
            return job.INTERRUPTED_EXIT[signal.SIGTERM]
        self._conclude(samples)
        return 0

    def _identity(self) -> dict[str, Any]:
        """What the samples depend on: settings, the prompts with their golds, and the weights (by size and time)."""
        from akl_dist.data.hub import model_folder
        from akl_dist.data.source import PromptSource

        settings = {key: value for key, value in typed.leaves(self.config)
                    if key in SAMPLED_WITH or key.startswith(SAMPLED_WITH_GROUPS)}
        weights = sorted(model_folder(self.config.model.path).glob("*.safetensors"))
        return {**settings, "prompts": PromptSource(self.loaded.evaluation, seed=0).fingerprint,
                "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights]}

    def _sample(self, prompts: Sequence[Prompt], samples: SampleFile) -> None:
        """Rounds of as many problems as fill the engines; the graders work on one round while the next is sampled."""
        from akl_dist.data.hub import model_folder

        config = self.config
        with ExitStack() as shutdown:
            engines, verify, sampling = self._start(str(model_folder(config.model.path)), shutdown)
            size = max(1, -(-config.rollout.max_num_seqs * config.rollout.num_engines // config.evaluate.samples))
            waiting: tuple[list[RolloutGroup], Any] | None = None
            total = len(self.loaded.evaluation)
            for start in range(0, len(prompts), size):
                if self.stop.requested:
                    break
                verdicts = verify.stream()
                rollouts = engines.sample(prompts[start : start + size], sampling, verdicts.add)
                if waiting:
                    self._store(waiting[0], verify.collect(waiting[1], self.judged), samples)
                    job.say(f"{len(samples.done)} of {total} problems")
                waiting = (rollouts, verdicts.ticket(rollouts))
            if waiting:
                self._store(waiting[0], verify.collect(waiting[1], self.judged), samples)
                job.say(f"{len(samples.done)} of {total} problems")

    def _start(self, model: str, shutdown: ExitStack) -> tuple[RolloutPool, VerifyPool, Any]:
        """Cluster, engines and graders; ``shutdown`` closes them in the reverse order."""
        from akl_dist.cluster.connect import connect
        from akl_dist.cluster.gather import gather
        from akl_dist.cluster.reserve import Reservation
        from akl_dist.contract.records import Sampling
        from akl_dist.rollout.launch import engine_settings
        from akl_dist.rollout.pool import RolloutPool
        from akl_dist.rollout.sampling import end_ids
        from akl_dist.verify.pool import VerifyPool, VerifySettings

        config, run_id = self.config, str(self.config.run_id)
        connection = connect(config.cluster.address, num_cpus=config.cluster.num_cpus,
                             object_store_mib=config.cluster.object_store_mib, say=job.say)
        shutdown.callback(connection.close)
        self.stop.listen()
        limit = config.cluster.start_timeout_s
        reservation = Reservation(evaluation_layout(config), run_id=run_id, log_dir=self.directory.logs, timeout_s=limit)
        shutdown.callback(reservation.release)
        ends = end_ids(model)
        engines = RolloutPool(run_id=run_id, settings=engine_settings(config, model), timeout_s=config.rollout.timeout_s,
                              actor_options=reservation.options("rollout"))
        shutdown.callback(engines.close)
        verify = VerifyPool(run_id=run_id, actor_options=reservation.options("verify"),
                            settings=VerifySettings(model, ends, config.verify, config.roles, seed=config.seed,
                                                    kinds=tuple(sorted(verifiers(config)))))
        shutdown.callback(verify.close)
        started = gather({**engines.ready(), **verify.ready()}, timeout_s=limit, stage="cluster", doing="starting")
        self.sandbox = job.sandbox_of(started.values())
        return engines, verify, Sampling(
            group_size=config.evaluate.samples, temperature=config.rollout.temperature, end_ids=ends,
            max_response_tokens=config.rollout.max_response_tokens, seed_key=("evaluate", config.evaluate.seed))

    def _store(self, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], samples: SampleFile) -> None:
        from akl_dist.bookkeeping.sample_records import problem_row
        from akl_dist.cluster.gather import fetch_all

        arrays = fetch_all([group.arrays for group in judged], timeout_s=self.config.verify.batch_timeout_s, stage="verify",
                           what=f"verdicts of {len(judged)} problems")
        self.judged += [replace(group, arrays=None) for group in judged]
        for group, verdicts, texts in zip(rollouts, judged, arrays, strict=True):
            samples.append(problem_row(group, verdicts, texts, self.sandbox))

    def _limit(self, benchmark: str) -> int:
        """Tokens that a response may have: the run's limit, or that of the benchmark's source in a mixture."""
        return max(one.max_response_tokens or self.config.rollout.max_response_tokens for one in self.loaded.evaluation
                   if one.source == benchmark)

    def _protocol(self, benchmark: str, *, problems: int) -> Protocol:
        """How a benchmark was measured here, in the words of :mod:`akl_dist.published`."""
        from akl_dist.published import Protocol

        config, suffix = self.config, self.loaded.suffixes[benchmark]
        words = [part.strip() for part in (config.data.system_prompt or "", suffix) if part.strip()]
        return Protocol(
            mode="non-thinking" if config.data.template_kwargs.get("enable_thinking") is False else "thinking", problems=problems,
            shots=0, samples=config.evaluate.samples, temperature=config.rollout.temperature, top_p=1.0, top_k=0,
            presence_penalty=0.0, max_tokens=self._limit(benchmark), prompt=" ".join(words), tools=config.rollout.tools.environment)

    def _truncation(self, benchmark: str, records: Sequence[SampleRecord]) -> list[str]:
        """Where many responses did not end by themselves: what ended them, and the keys that allow them more. A cause that less
        than half of ``MANY_TRUNCATED`` ended by goes without saying."""
        if sum(record.truncated for record in records) <= MANY_TRUNCATED * len(records):
            return []
        rollout, limit = self.config.rollout, self._limit(benchmark)
        key = "rollout.max_response_tokens"
        if limit < rollout.max_response_tokens:
            key = "max_response_tokens of its source in data.mixture"
        where = f"end at the limit of {limit} tokens"
        if rollout.tools.environment and rollout.tools.max_turn_tokens is not None:
            where = f"end at a limit, {limit} tokens or {rollout.tools.max_turn_tokens} in one turn,"
            key += " or rollout.tools.max_turn_tokens"
        kinds = {one.verifier or self.config.verify.kind for one in self.loaded.evaluation if one.source == benchmark}
        counts = " and count as no answer" if kinds <= {"math", "code"} else ""  # other verifiers judge them all the same
        causes = ((False, where, key),
                  (True, f"want more answers of the environment than the {rollout.tools.max_turns} they may have",
                   "rollout.tools.max_turns"))
        shares = [(sum(one.truncated and one.turns_used_up is used_up for one in records) / len(records), what, raised)
                  for used_up, what, raised in causes]
        return [f"{100 * share:.0f} % of the responses on {benchmark} {what}{counts}: raise {raised}."
                for share, what, raised in shares if share >= MANY_TRUNCATED / 2]

    def _conclude(self, samples: SampleFile) -> None:
        """evaluation.json and the table. Raises RunError unless every problem has every sample."""
        from akl_dist.bookkeeping.atomic import strict_json, write_text
        from akl_dist.evaluation import summarise, table
        from akl_dist.published import compared
        from akl_dist.published import report as published_report

        config, expected = self.config, {}
        for prompt in self.loaded.evaluation:
            expected.setdefault(prompt.source, []).append(prompt.prompt_id)
        results = summarise(samples.records, expected, samples=config.evaluate.samples)
        model, against = compared(config.model.path, results, {
            name: self._protocol(name, problems=len(ids)) for name, ids in expected.items()})
        report = self.loaded.report
        write_text(self.result, strict_json({
            "status": "finished", "model": config.model.path, "recipe": config.data.recipe,
            "prompt": {"instruction": report.instruction, "system_prompt": config.data.system_prompt,
                       "example": self.loaded.evaluation[0].text, "prompts_sha256": self._identity()["prompts"]},
            "sampling": {"samples": config.evaluate.samples, "temperature": config.rollout.temperature,
                         "max_response_tokens": config.rollout.max_response_tokens,
                         "max_response_tokens_of": {name: self._limit(name) for name in results}, "seed": config.evaluate.seed},
            "data": report.as_dict()["evaluation"], "samples": "samples.jsonl", "sandbox": job.weakest(samples.sandboxes),
            "benchmarks": {name: one.to_dict() for name, one in results.items()},
            "published": {name: one and one.to_dict() for name, one in against.items()}}, indent=2) + "\n")
        job.say("\n" + table(results) + "\n\n" + published_report(model, config.model.path, against))
        for name in results:
            for line in self._truncation(name, [record for record in samples.records if record.benchmark == name]):
                job.say(f"warning: {line}")
        job.say(f"\nresult: {self.result}")


def console() -> None:
    """Entry point of the installed command."""
    sys.exit(main())


if __name__ == "__main__":
    console()
