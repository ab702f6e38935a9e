"""Judge a file of answers with the trainer's own verifiers:
``python -m akl_dist.score verifier=math input=IN.jsonl output=OUT.jsonl``.

A plain command line: no Hydra, no Ray, no torch, no run directory. One output row per input row, in the same order, whatever
the rows hold; the output appears whole or not at all. Judgements run in killable grader processes with a wall-clock limit each.

Exit codes: 0 all rows have an output row (malformed ones with status error), 2 a mistake in the command or the files,
1 graders that do not start, 130 and 143 after a signal.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from akl_dist.bookkeeping.atomic import replacing, strict_json
from akl_dist.bookkeeping.console import write_alarm
from akl_dist.config.schema import VerifyConfig
from akl_dist.contract.errors import AklError, UserError, nearest
from akl_dist.contract.records import Status, Verdict
from akl_dist.verify.grader import GraderPool
from akl_dist.verify.rows import FIELDS, PROBES, RowItem, malformed

VERIFIERS = ("math", "code", "extract")
CHUNK_ROWS = 512  # rows held in memory at once
SHOWN_CHARACTERS = 2000  # of a line that is no JSON object
ROW_JUDGE = "akl_dist.verify.rows:judge"

HELP = f"""usage: python -m akl_dist.score verifier=math|code|extract input=IN.jsonl output=OUT.jsonl [key=value ...]

example: python -m akl_dist.score verifier=math input=answers.jsonl output=verdicts.jsonl

Each argument is split at its first '='; paths may hold any characters.

  verifier    math      rows {{id, gold, answer_text}} (already extracted) or {{id, gold, response}}
              extract   rows {{id, response}}: what the extractor takes for the answer
              code      rows {{id, prompt_style, completion, tests}}
  input       JSONL, one object a line (blank lines at the end are no rows)
  output      JSONL: the input row plus status (ok, wrong, no_answer, timeout, error, invalid_gold),
              correct (true, false, null), extracted, reason; written whole or not at all
  workers     grader processes ({VerifyConfig().num_workers})
  timeout_s   wall clock of one judgement of math and extract, in seconds ({VerifyConfig().timeout_s:g})
  allow_unsandboxed   code only: true runs programs where the machine cannot isolate them (false)
  debug       true shows the traceback of a mistake (false)

Rows with a response may carry the booleans truncated and think_open. For extract, ok says that there is an answer.
exit codes: 0 done (a malformed row is status error), 2 a mistake in the command or the files, 1 graders that do not start"""


@dataclass(frozen=True)
class Command:
    """A command line without mistakes."""

    verifier: str
    input: Path
    output: Path
    workers: int = VerifyConfig().num_workers
    timeout_s: float = VerifyConfig().timeout_s
    allow_unsandboxed: bool = False
    debug: bool = False


class Judges(Protocol):
    """Verdicts of rows, in order; ends its processes on close."""

    def judge(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]: ...

    def close(self) -> None: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        print(HELP, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    earlier = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        command = parse(arguments)
        counts = score(command)
    except AklError as error:
        if "debug=true" in arguments:
            raise
        print(f"error: {_printable(str(error), sys.stderr)}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: no output was written", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, earlier)
    listed = ", ".join(f"{status.value} {counts[status]}" for status in Status if counts[status])
    print(_printable(f"{sum(counts.values())} rows ({listed or 'none'}): {command.output}", sys.stdout))
    faulty, limit = sum(count for status, count in counts.items() if not status.trains), VerifyConfig().max_faulty_fraction
    if faulty > limit * sum(counts.values()):
        print(f"warning: {faulty} of {sum(counts.values())} rows have no verdict, more than {limit:.0%} (where a run would stop): "
              "see their reasons", file=sys.stderr)
    return 0


def _on_sigterm(number: int, frame: object) -> None:
    sys.exit(143)  # unwinds: the graders end, the unfinished output is removed


def parse(arguments: Sequence[str]) -> Command:
    """The command of ``key=value`` arguments. Raises UserError for a mistake in them."""
    keys = tuple(Command.__dataclass_fields__)
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in keys:
            near = nearest(key, keys)
            raise _mistake(repr(argument), got="an unknown argument" if equals else "an argument without '='",
                           expected=f"key=value with a key of {', '.join(keys)}",
                           remedy=f"Write {near}=..." if near else "See --help.")
        if key in given:
            raise _mistake(key, got="two values", expected="one", remedy="Leave one out.")
        given[key] = value
    for key in ("verifier", "input", "output"):
        if not given.get(key):
            raise _mistake(key, got="nothing", expected="verifier=, input= and output=", remedy=f"Add {key}=...; see --help.")
    if given["verifier"] not in VERIFIERS:
        near = nearest(given["verifier"], VERIFIERS)
        raise _mistake("verifier", got=repr(given["verifier"]), expected=f"one of {', '.join(VERIFIERS)}",
                       remedy=f"Write verifier={near}." if near else "Choose one of them.")
    default = Command("", Path(), Path())
    return Command(
        given["verifier"], Path(given["input"]), Path(given["output"]),
        workers=int(_number(given, "workers", default.workers, whole=True)),
        timeout_s=_number(given, "timeout_s", default.timeout_s), debug=_flag(given, "debug"),
        allow_unsandboxed=_flag(given, "allow_unsandboxed"))


def _number(given: dict[str, str], key: str, default: float, *, whole: bool = False) -> float:
    text = given.get(key, str(default))
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e9:
        raise _mistake(key, got=repr(text), expected=f"a {'whole ' if whole else ''}number above 0",
                       remedy=f"Write {key}={default}.")
    return value


def _flag(given: dict[str, str], key: str) -> bool:
    text = given.get(key, "false")
    if text not in ("true", "false"):
        raise _mistake(key, got=repr(text), expected="true or false", remedy=f"Write {key}=true.")
    return text == "true"


def score(command: Command) -> collections.Counter[Status]:
    """Judge every row and write the output. Returns how often each status was given.

    Raises:
        UserError: the input cannot be read or the output cannot be written.
        VerifierFault: the graders do not start, or judge their probes otherwise than they must.
    """
    output = _checked_output(command)
    try:
        lines = open(command.input, "rb")  # noqa: SIM115 (closed below)
        lines.peek(1)  # a file that opens and cannot be read shows before graders start
    except OSError as error:
        raise _mistake(f"input {command.input}", got=error.strerror or str(error), expected="a file that can be read",
                       remedy="Correct the path or its permissions.") from error
    with lines, contextlib.closing(make_judges(command)) as judges:
        try:
            return _write(read_rows(lines), judges, output)
        except OSError as error:
            raise _mistake(f"output {command.output}", got=error.strerror or str(error), expected="a file that can be written",
                           remedy="Name another output, or free space.") from error


def _write(rows: Iterator[Row], judges: Judges, output: Path) -> collections.Counter[Status]:
    """Judge chunk by chunk; ``output`` appears when the last row is written."""
    counts: collections.Counter[Status] = collections.Counter()
    with replacing(output) as temporary, temporary.open("w", encoding="ascii") as out:
        while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
            for row, verdict in zip(chunk, judged(chunk, judges), strict=True):
                counts[verdict.status] += 1
                out.write(_output_line(row, verdict) + "\n")
    return counts


def _checked_output(command: Command) -> Path:
    """Where the output goes; links are followed, so that a link stays one."""
    try:
        output = command.output.resolve()
        same = output.exists() and command.input.exists() and output.samefile(command.input)
        what = ("the input file itself" if same else "no regular file" if output.exists() and not output.is_file()
                else "" if output.parent.is_dir() else f"no folder {output.parent}")
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        output, what = command.output, str(error)
    if what:
        raise _mistake("output", got=f"{command.output}: {what}", expected="a file of its own in an existing folder",
                       remedy="Name another output.")
    return output


@dataclass(frozen=True)
class Row:
    """One input row: its object, or None with the reason why it is none and the line as it stands."""

    number: int
    values: dict[str, Any] | None
    raw: str = ""
    reason: str = ""


def read_rows(lines: Iterator[bytes]) -> Iterator[Row]:
    """Rows of a JSONL file. A malformed line is a row, too, and so is a blank one unless nothing but blank lines follows it: rows
    stay beside each other when the two files are read line by line."""
    blank: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            blank.append(Row(number, None, "", "a blank line"))
            continue
        yield from blank
        blank.clear()
        reason, values = "", None
        try:
            values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=_no_constant)
            strict_json(values)  # what is read can be written: no overflowing number, no bottomless nesting
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            reason = f"no JSON object ({type(error).__name__}: {error})"
        if not reason and not isinstance(values, dict):
            reason = f"a JSON {type(values).__name__}, not an object"
        if reason:
            yield Row(number, None, line.decode("utf-8", "backslashreplace").strip()[:SHOWN_CHARACTERS], reason[:300])
        else:
            yield Row(number, values)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def judged(rows: Sequence[Row], judges: Judges) -> list[Verdict]:
    """One verdict per row; the rows that are no objects do not reach the judges."""
    verdicts = iter(judges.judge([row.values for row in rows if row.values is not None]))
    return [malformed(row.reason) if row.values is None else next(verdicts) for row in rows]


def _output_line(row: Row, verdict: Verdict) -> str:
    values = {"line": row.number, "input": row.raw} if row.values is None else row.values
    return strict_json({**values, "status": verdict.status.value, "correct": verdict.correct, "extracted": verdict.extracted,
                        "reason": verdict.reason})


def make_judges(command: Command) -> Judges:
    """The judges of a command, started and probed."""
    if command.verifier == "code":
        from akl_dist.verify.code_rows import CodeJudges  # its sandbox is started only where programs are judged

        judges = CodeJudges(workers=command.workers, allow_unsandboxed=command.allow_unsandboxed)
        if judges.isolation == "none":
            write_alarm("UNSANDBOXED: this machine cannot isolate programs, and allow_unsandboxed=true lets them run with this "
                        "user's rights, files and network.", sys.stderr)
        return judges
    return TextJudges(command.verifier, workers=command.workers, timeout_s=command.timeout_s)


class TextJudges:
    """Math and extraction, in killable grader processes."""

    def __init__(self, verifier: str, *, workers: int, timeout_s: float) -> None:
        self._verifier = verifier
        self._pool = GraderPool(num_workers=workers, timeout_s=timeout_s, judge=ROW_JUDGE, probes=PROBES)

    def judge(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        wanted = FIELDS[self._verifier]
        return self._pool.judge_many([RowItem(self._verifier, {k: row[k] for k in wanted if k in row}) for row in rows])

    def close(self) -> None:
        self._pool.close()


def _mistake(subject: str, *, got: str, expected: str, remedy: str) -> UserError:
    return UserError(subject, got=got, expected=expected, remedy=remedy, stage="config")


def _printable(message: str, stream: TextIO) -> str:
    encoding = stream.encoding or "ascii"
    return message.encode(encoding, "backslashreplace").decode(encoding)


def console() -> None:
    """Entry point of the installed command."""
    sys.exit(main())


if __name__ == "__main__":
    console()
