"""Train: ``python -m akl_dist.main +exp=NAME [key=value ...]``, ``-m`` for sweeps.

compose -> freeze -> validate -> preflight -> place -> build stages -> loop.train. Nothing heavy is imported before the
configuration and the local files have been found sound.

Exit codes: 0 finished (or a dry run whose configuration is sound), 1 a run that failed, 2 a mistake in the command,
configuration or data, 130 after Ctrl-C, 143 after SIGTERM (state saved). A dry run's does not depend on whether its output
is read to the end (``| head``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from akl_dist import job
from akl_dist.config.command_line import ParsedCommand, check_command_line, help_text, sweep
from akl_dist.config.compose import beaten_choices, compose
from akl_dist.config.schema import Config
from akl_dist.config.validate import validate
from akl_dist.contract.errors import AklError

EXAMPLE = "python -m akl_dist.main +exp=tiny learner.lr=1e-4 objective.kl.beta_answer=0.5"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (of a sweep: the worst of its jobs)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = any(a.replace(" ", "").lower() == "debug=true" for a in arguments)
    try:
        command = check_command_line(arguments)
        if command.help:
            job.say(help_text("akl_dist.main", EXAMPLE))
            return 0
        overrides_of_jobs = jobs(command)
        configs = [compose(overrides) for overrides in overrides_of_jobs]
        notes = [note for job_, config in zip(overrides_of_jobs, configs, strict=True) for note in beaten_choices(job_, config)]
        if len(configs) > 1:  # a mistake in the last job shows before the first one starts
            for config in configs:
                validate(config)
    except AklError as error:
        return complain(error, debug=debug)
    for note in dict.fromkeys(notes):
        job.say(f"note: {note}")
    codes = []
    for number, config in enumerate(configs, start=1):
        if len(configs) > 1:
            job.say(f"--- job {number} of {len(configs)}: {config.run_id}")
        codes.append(run(config))
        if codes[-1] in (130, 143):  # a person or a scheduler wants the whole command to stop
            break
    return max(codes, default=0)


def jobs(command: ParsedCommand) -> list[list[str]]:
    """Override lists: one, or one per job of a sweep."""
    if not command.multirun:
        return [list(command.overrides)]
    return sweep(command, stamp=time.strftime("%Y%m%d-%H%M%S"))


def run(config: Config) -> int:
    """One job: validate, then a dry run or training."""
    return job.dry_run(config) if config.dry_run else job.run(config)


def complain(error: AklError, *, debug: bool) -> int:
    """One readable message on stderr; the traceback only with ``debug=true``."""
    if debug:
        raise error
    print(f"error: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def console() -> None:
    """Entry point of the installed command."""
    sys.exit(main())


if __name__ == "__main__":
    console()
