"""Runs one script, read from standard input, as an interactive interpreter runs a cell. Runs inside the sandbox.

Unlike a plain script it shows the value of a last expression, and of an error it writes what a traceback ends with, as one line
whatever lines its message has: the last one of standard error.
"""

from __future__ import annotations

import sys

from akl_dist.sandbox.inside.interpreter_stage import described, execute, fresh_names, start

RAISED = (BaseException,)  # a script may raise anything


def main() -> None:
    source = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    start()
    try:
        execute(source, fresh_names())
    except SystemExit:
        raise
    except RAISED as error:
        sys.stdout.flush()
        sys.stderr.write(" ".join(described(error).splitlines()) + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
