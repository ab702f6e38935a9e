"""One run, from a composed configuration to an exit code: directory, resume, cluster, stages, loop, result.

Whatever happens after composition, ``result.json`` says how the run ended, with the first failure in time, and nothing
that this process started stays behind.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from akl_dist.bookkeeping.console import printable, write_alarm, write_line
from akl_dist.cluster import environment, preflight
from akl_dist.cluster.placement import lacks, layout
from akl_dist.cluster.plan_text import plan_text
from akl_dist.config import models, typed
from akl_dist.config.compose import config_hash, from_yaml
from akl_dist.config.own_loss import check_own_loss
from akl_dist.config.resolve import kl_roles, resolved_data
from akl_dist.config.schema import Config
from akl_dist.config.validate import not_run_yet, validate, warnings
from akl_dist.contract.errors import AklError, ClusterError, ConfigError, DataError, RunError, UserError
from akl_dist.rollout.tools import check_environment
from akl_dist.verify.rewards import check_rewards

if TYPE_CHECKING:
    from akl_dist.bookkeeping.checkpoint import Checkpoint
    from akl_dist.bookkeeping.journal import RunDirectory
    from akl_dist.data.source import LoadedData
    from akl_dist.loop import Progress
    from akl_dist.recorder import StepRecorder
    from akl_dist.summaries import Evaluation

INTERRUPTED_EXIT = {signal.SIGTERM: 143, signal.SIGINT: 130}


def dry_run(config: Config) -> int:
    """Validate, read local files, print the plan and what this machine lacks; holds no accelerator and starts nothing."""
    try:
        validate(config)
        environment.prepare(config.cluster.address)
        check_own_loss(config)
        check_rewards(config)
        check_environment(config)
        check_models(config)
        lacking = preflight.lacking(config, layout(config))
        if environment.resolve_address(config.cluster.address) is None:
            lacking += [f"this machine alone: {item}" for item in lacks_memory(config)]
        check_replay(config)
        text = plan_text(config, layout(config), lacking=lacking, notes=warnings(config) + not_run_yet(config))
        if not any(item.startswith("hub:") for item in lacking):
            text += f"\n\n{load_data(config).report}"
    except AklError as error:
        return complain(error, config)
    except OSError as error:
        return complain(UserError("file system", got=str(error), expected="files that can be read", stage="config",
                                  remedy="Mend their permissions."), config)
    say(text)
    return 0


def check(config: Config) -> None:
    """Raise ConfigError for everything wrong with a configuration that is to be run, planned-only settings included."""
    validate(config)
    unready = not_run_yet(config)
    if unready:
        raise ConfigError([UserError("configuration", got=item, expected="settings that a run carries out", stage="config",
                                     remedy="Use dry_run=true to see the plan.") for item in unready])


def check_models(config: Config) -> None:
    """Raise ModelError for local weights that are missing or incomplete; nothing is loaded."""
    models.check_weights("model.path", config.model.path)
    if config.objective.advantage == "gae" and config.critic.path is not None:
        models.check_weights("critic.path", config.critic.path)


def lacks_memory(config: Config) -> list[str]:
    """What is set aside at the start on this machine alone, where that is more memory than it has; weights are not counted."""
    caches = config.rollout.num_engines if config.cluster.device == "cpu" and config.rollout.replay is None else 0
    needed = caches * config.rollout.kv_cache_gib + config.cluster.object_store_mib / 1024
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = f"rollout.kv_cache_gib={config.rollout.kv_cache_gib:g} of each of {caches} engines and " if caches else ""
    return [f"{parts}cluster.object_store_mib={config.cluster.object_store_mib}: {needed:,.1f} GiB of memory, the machine has "
            f"{has:,.1f}"] if needed > has else []


def load_data(config: Config) -> LoadedData:
    """Both sides of the data, tokenised; no accelerator is touched before this has succeeded."""
    from akl_dist.data.hub import model_folder
    from akl_dist.data.mixture import prompt_source_of
    from akl_dist.data.source import load
    from akl_dist.verify.golds import invalid_gold

    problems = 0 if config.rollout.replay is not None else config.evaluate.num_problems
    cokl = config.objective.cokl
    loaded = load(resolved_data(config), model_folder(config.model.path), num_eval_problems=problems,
                  invalid_gold=invalid_gold(config.verify.kind), gold_checks=invalid_gold,
                  with_anchor=cokl.beta > 0 and cokl.prompts == "anchor_dataset")
    if config.data.mixture and config.rollout.replay is None:  # its sources must be large enough for their shares of a step
        prompt_source_of(loaded, config.data, config.seed, prompts_per_step=config.rollout.prompts_per_step)
    if len(loaded.train) < config.rollout.prompts_per_step:
        raise DataError("rollout.prompts_per_step", stage="data",
                        got=f"{config.rollout.prompts_per_step} with {len(loaded.train)} usable prompts",
                        expected="at least one step's worth of prompts", remedy="Lower it, or bring more data.")
    return loaded


def check_replay(config: Config, resumed: Checkpoint | None = None) -> None:
    """Hold every dump that a replay will train from against the configuration, by its footer; before Ray starts."""
    if config.rollout.replay is None:
        return
    from akl_dist.bookkeeping.rollout_dump import ReplayOrder, ReplayReader

    reader, done = ReplayReader(config.rollout.replay), 0
    order = ReplayOrder(reader.steps)
    if resumed is not None:
        done = resumed.step
        order = ReplayOrder.resumed(reader.steps, step=done, prompt_source=resumed.state.prompt_source)
    reader.check(order, steps=config.steps - done, prompts=config.rollout.prompts_per_step, group_size=config.rollout.group_size)


def run(config: Config) -> int:
    """Train. Returns 0 finished, 1 failed, 2 user mistake, 130 or 143 interrupted."""
    from akl_dist.bookkeeping.journal import RunDirectory, failure_record, new_run_id

    config = dataclasses.replace(config, run_id=config.run_id or new_run_id())
    directory = RunDirectory(Path(config.output_dir) / config.experiment / str(config.run_id))
    try:
        previous = directory.read_result()
        if previous and previous["status"] == "finished" and previous["steps"] >= config.steps and config.resume == "auto":
            say(f"run {config.run_id} is finished ({previous['steps']} steps): {directory.result}\n{directory.result.read_text()}")
            return 0
        check_writable(directory.root)
    except AklError as error:  # result.json stays as it is: it is damaged (a person decides what it was worth), or has no place
        return complain(error, config)
    attempt = Attempt(config, directory)
    try:
        code = attempt.execute()
    except AklError as error:
        attempt.write_result("failed", failure_record(error))
        return complain(error, config)
    except KeyboardInterrupt:
        attempt.write_result("interrupted", None)
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_EXIT[signal.SIGINT]
    except SystemExit as error:  # Ray's own SIGTERM handler, before ours is back in place
        attempt.write_result("interrupted", None)
        return INTERRUPTED_EXIT[signal.SIGTERM] if error.code == signal.SIGTERM else 1
    except OSError as error:
        attempt.write_result("failed", failure_record(error))
        return complain(RunError("file system", got=str(error), expected="files that can be written and read", stage="run",
                                  remedy="Free space or mend permissions, then resume with the same run_id."), config)
    except Exception as error:
        attempt.write_result("failed", failure_record(error))
        raise
    return code


def check_writable(folder: Path) -> None:
    """Raise UserError when the run directory cannot be made or written, before anything is loaded."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError("output_dir", got=f"{folder}: {error.strerror}", expected="a folder that can be written",
                        remedy="Set output_dir to another folder.", stage="config") from error


def complain(error: AklError, config: Config) -> int:
    """One readable message on stderr (the traceback only with ``debug=true``); returns the error's exit code."""
    if config.debug:
        raise error
    where = f" [{error.stage}{' ' + error.actor if error.actor else ''}]" if not isinstance(error, ConfigError) else ""
    print(printable(f"error{where}: {error}", sys.stderr), file=sys.stderr, flush=True)
    return error.exit_code


class Attempt:
    """One attempt at a run; a resumed run is another attempt in the same directory."""

    def __init__(self, config: Config, directory: RunDirectory) -> None:
        self.config, self.directory = config, directory
        self.recorder: StepRecorder | None = None
        self.signal: int | None = None
        self.sandbox: str | None = None

    def execute(self) -> int:
        config = self.config
        with ExitStack() as handlers:
            self._listen_to_signals(handlers)
            return self._execute(config)

    def _execute(self, config: Config) -> int:
        check(config)
        for line in warnings(config):
            say(f"warning: {line}")
        environment.prepare(config.cluster.address)
        check_own_loss(config)
        check_rewards(config)
        check_environment(config)
        check_models(config)
        self._preflight()
        loaded = None if config.rollout.replay is not None else load_data(config)
        if loaded is not None:
            say(str(loaded.report))
        resumed = self._enter_directory()
        check_replay(config, resumed)
        with ExitStack() as shutdown:
            progress = self._train(loaded, resumed, shutdown)
        return self._conclude(progress)

    def _preflight(self) -> None:
        """A local cluster has what this machine has: what is missing is known before Ray starts."""
        if environment.resolve_address(self.config.cluster.address) is None:
            missing = lacks(layout(self.config), [preflight.machine_resources(self.config)]) + lacks_memory(self.config)
            if missing:
                raise ClusterError("this machine", got="; ".join(missing), expected="room for the layout", stage="cluster",
                                   remedy="Ask for fewer ranks, engines, devices or GiB; dry_run=true prints the layout.")

    def _enter_directory(self) -> Checkpoint | None:
        """Find what to resume from, then write config.yaml and environment.json."""
        from akl_dist.bookkeeping.checkpoint import find
        from akl_dist.bookkeeping.journal import RunDirectory

        config = self.config
        if config.resume == "never":
            self._move_earlier_attempt()
        found = find(self.directory.root, config.resume, num_ranks=config.learner.num_ranks)
        if found.checkpoint is not None:
            say(found.reason)
            done = found.checkpoint.step
            if done > config.steps or (done == config.steps and config.resume != "auto"):
                raise UserError("steps", got=str(config.steps), expected=f"more than the checkpoint's {done}", stage="config",
                                remedy=f"Set steps above {done}, or resume from an earlier checkpoint.")
            if found.checkpoint.state.config_hash != config_hash(config) and self.directory.config.exists():
                say(f"note: keys that differ from the earlier attempt: {', '.join(self._changed_keys()) or 'none recorded'}")
        self.directory = RunDirectory.create(config.output_dir, config.experiment, str(config.run_id), typed.plain(config))
        return found.checkpoint

    def _move_earlier_attempt(self) -> None:
        """``resume=never`` with a run_id that was used: its directory is kept under another name, so that nothing is lost and
        nothing of it is taken for this run's."""
        from akl_dist.bookkeeping.journal import new_run_id

        root = self.directory.root
        data = self.config.data
        own = [source.get(key) for source in data.mixture.values() for key in ("path", "eval_path")]
        inputs = (self.config.rollout.replay, self.config.model.path, data.path, data.eval_path, *own)
        inside = [path for path in inputs if path and root.resolve() in Path(path).resolve().parents]
        if inside:
            raise UserError("run_id", got=f"{root.name}, whose directory holds {inside[0]}", expected="another run_id",
                            stage="config", remedy="resume=never moves the earlier directory aside, input included.")
        if self.directory.metrics.exists() or (self.directory.checkpoints.is_dir() and any(self.directory.checkpoints.iterdir())):
            kept = root.with_name(f"{root.name}.before-{new_run_id()}")
            root.rename(kept)
            say(f"resume=never: the earlier attempt's directory is now {kept}")

    def _changed_keys(self) -> list[str]:
        before = dict(typed.leaves(from_yaml(self.directory.config.read_text(encoding="utf-8"))))
        return [key for key, value in typed.leaves(self.config) if before.get(key) != value]

    def _train(self, loaded: LoadedData | None, resumed: Checkpoint | None, shutdown: ExitStack) -> Progress:
        """Cluster, stages, loop; everything opened is closed by ``shutdown`` in the reverse order."""
        from akl_dist.assembly import Assembly
        from akl_dist.bookkeeping.console import Console
        from akl_dist.bookkeeping.journal import Journal
        from akl_dist.cluster.connect import connect
        from akl_dist.loop import Progress, Run, train
        from akl_dist.recorder import Alarms, StepRecorder

        config = self.config
        connection = connect(config.cluster.address, num_cpus=config.cluster.num_cpus,
                             object_store_mib=config.cluster.object_store_mib, say=say)
        shutdown.callback(connection.close)
        signal.signal(signal.SIGTERM, self._on_signal)  # ray.init has put its own in place
        assembly = Assembly(config, directory=self.directory, loaded=loaded, resumed=resumed)
        shutdown.callback(assembly.close)
        self.sandbox = sandbox_of(assembly.wait_until_ready(say).values())
        progress = assembly.restore() if resumed else Progress()
        assembly.sample_reference(progress, stop_requested=lambda: self.signal is not None, say=say)
        journal = Journal(self.directory, tensorboard=config.journal.tensorboard)
        shutdown.callback(journal.close)
        dropped = journal.cut_back(progress.step)
        if dropped:
            say(f"metrics.jsonl: {dropped} lines after step {progress.step} dropped; they are computed again")
        console = Console(config.steps, first_step=progress.step + 1)
        self.recorder = StepRecorder(journal, console, assembly.dump,
                                     Alarms(console.say, kl_roles=kl_roles(config.objective.kl)), sandbox=self.sandbox)
        self.recorder.progress = progress
        progress = train(
            Run(config=config, stages=assembly.stages, prompts=assembly.prompts,
                evaluation_prompts=loaded.evaluation if loaded else (), probe_prompts=assembly.probe_prompts,
                end_ids=assembly.end_ids, recorder=self.recorder, save=assembly.save,
                stop_requested=lambda: self.signal is not None),
            progress,
        )
        if progress.step == config.steps:
            assembly.export(self.directory.hf)
        assembly.flush()
        self.write_result("finished" if progress.step == config.steps else "interrupted", None, progress)
        return progress

    def _listen_to_signals(self, handlers: ExitStack) -> None:
        """SIGTERM finishes the step, saves and ends the run with exit code 143; before the first step there is nothing to save."""
        handlers.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, self._on_signal))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        say(f"{signal.Signals(number).name}: finishing what is under way, then saving")

    def _conclude(self, progress: Progress) -> int:
        from akl_dist.bookkeeping.curve import draw
        from akl_dist.bookkeeping.journal import read_metrics
        from akl_dist.summaries import activity_summary

        if progress.step < self.config.steps:
            say(f"interrupted after step {progress.step}; the same command with run_id={self.config.run_id} goes on from there")
            return INTERRUPTED_EXIT[signal.Signals(self.signal or signal.SIGTERM)]
        seen = progress.evaluations
        if seen:
            say("\n" + evaluation_tables(seen["initial"], seen["last"]))
        say(activity_summary(read_metrics(self.directory.metrics)))
        try:
            say(f"\nlearning curve: {draw(self.directory.root)}")
        except (AklError, OSError, ValueError) as error:  # the run is finished and saved: a picture does not change that
            say(f"\nwarning: no learning curve: {error}")
        say(f"model: {self.directory.hf}\nresult: {self.directory.result}")
        return 0

    def write_result(self, status: str, failure: dict[str, str] | None, progress: Progress | None = None) -> None:
        """result.json; on a failure before the first step it is the only file of the run directory."""
        if progress is None:
            progress = self.recorder.progress if self.recorder else None
        evaluations: dict[str, Any] = {name: None for name in ("initial", "best", "last")}
        steps, sandbox, earlier = 0, self.sandbox, self.directory.read_result()
        if progress is not None:
            steps = progress.step
            evaluations |= {name: evaluation.to_dict() for name, evaluation in progress.evaluations.items()}
        elif earlier is not None:  # this attempt ended before it had taken up the earlier one's work
            steps, evaluations, sandbox = earlier["steps"], earlier["evaluation"], earlier.get("sandbox")
        try:
            self.directory.root.mkdir(parents=True, exist_ok=True)
            self.directory.write_result(status, steps=steps, first_failure=failure, evaluation=evaluations, sandbox=sandbox)
        except OSError as error:
            print(f"error: result.json ({status}) cannot be written: {error}", file=sys.stderr, flush=True)


def sandbox_of(replies: Iterable[Any]) -> str | None:
    """The weakest form of isolation in which actors run generated programs, from what they report at their start; None where none
    runs any. Said aloud, in red, where it is none at all."""
    found = weakest(reply["isolation"] for reply in replies if isinstance(reply, dict) and reply.get("isolation") is not None)
    if found == "none":
        write_alarm("UNSANDBOXED: this machine cannot isolate programs, and verify.allow_unsandboxed=true lets them run: what the "
                    "model writes has this user's rights, files and network.", sys.stdout)
    return found


def weakest(forms: Iterable[str]) -> str | None:
    """The weakest of several forms of isolation; None of none. A name that is no form (of an environment of one's own) says
    nothing."""
    from akl_dist.sandbox.isolation import MODES

    return max((form for form in forms if form in MODES), key=MODES.index, default=None)


def evaluation_tables(before: Evaluation, after: Evaluation) -> str:
    """Before and after, a table for each source: benchmarks are never pooled."""
    from akl_dist.bookkeeping.console import before_after_table

    sources = [name for name in after.by_source if name in before.by_source]
    if len(sources) < 2:
        return before_after_table(before.to_dict(), after.to_dict())
    return "\n\n".join(f"{name}\n{before_after_table(before.by_source[name].to_dict(), after.by_source[name].to_dict())}"
                       for name in sources)


def say(message: str) -> None:
    """A whole line for people."""
    write_line(message, sys.stdout)


