"""The Python tool: programs that the policy writes are run in the sandbox, and what they print comes back.

An :class:`~akl_dist.rollout.environment.Environment`, named ``python``; it lives in the environment processes. All rollouts in one
process share one sandbox for stateless calls; a persistent interpreter has a sandbox of its own.
"""

from __future__ import annotations

import functools
import signal

from akl_dist.contract.errors import UserError
from akl_dist.rollout.environment import Step, Task
from akl_dist.rollout.tool_calls import STYLES, is_void, parse_call
from akl_dist.sandbox.client import Ended, Sandbox, SandboxFault
from akl_dist.sandbox.interpreter import Interpreter
from akl_dist.sandbox.limits import MIB, Limits
from akl_dist.sandbox.probe import prove

INTERPRETERS = ("stateless", "persistent")
NOTHING = "(no output)"
RESTARTED = "The interpreter was restarted: names of earlier calls are gone."


class Workshop:
    """What the tools of one process share: the sandbox of stateless calls, proven at the start, and the count of interpreters.

    Raises:
        SandboxFault: no isolation here and none waived, or a restriction does not hold.
    """

    def __init__(self, *, allow_unsandboxed: bool) -> None:
        self.allow_unsandboxed = allow_unsandboxed
        self._sandbox: Sandbox | None = None
        self.interpreters = 0
        try:
            prove(self.sandbox)
        except SandboxFault:
            self.close()
            raise

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of stateless calls; a fresh one after a fault."""
        if self._sandbox is None:
            self._sandbox = Sandbox(allow_unsandboxed=self.allow_unsandboxed)
        return self._sandbox

    def close(self) -> None:
        """End the sandbox. The next use opens another one."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


@functools.cache
def workshop(allow_unsandboxed: bool) -> Workshop:
    """The workshop of this process."""
    return Workshop(allow_unsandboxed=allow_unsandboxed)


class PythonTool:
    """Runs the program that a turn calls for; a turn that calls for none ends the response.

    The observation is what the program printed (and, as in an interactive interpreter, the value of its last expression), then the
    last line of the traceback of an error or the limit that ended it; ``(no output)`` where there is nothing.

    Args:
        interpreter: ``stateless`` (each call is a program of its own) or ``persistent`` (the calls of one response share one
            interpreter, started at the first one; a call that overruns ends it, and the observation says so).
        call: how a turn calls, one of ``tool_calls.STYLES``.
        program_s: wall clock of one program, on a busy machine as well: a program that got no processor has had its time.
        allow_unsandboxed: run programs without isolation where the machine allows none.
        max_interpreters: persistent interpreters that may live in one process; a call for one more fails, with an observation that
            says so.
        memory_mib: memory of one program.
        max_output_bytes: of one observation; the middle of a longer one is cut out.

    Raises:
        UserError: a parameter out of its range.
        SandboxFault: isolation is not available and not waived.
    """

    def __init__(
        self, *, interpreter: str = "stateless", call: str = "fenced", program_s: float = 5.0, allow_unsandboxed: bool = False,
        max_interpreters: int = 64, memory_mib: int = 1024, max_output_bytes: int = 16 << 10,
    ) -> None:
        for name, got, valid in (("interpreter", interpreter, INTERPRETERS), ("call", call, STYLES)):
            if got not in valid:
                raise UserError(f"rollout.tools.{name}", got=repr(got), expected=" or ".join(valid), stage="rollout",
                                remedy="Correct the value.")
        for name, size in (("program_s", program_s), ("max_interpreters", max_interpreters), ("memory_mib", memory_mib),
                           ("max_output_bytes", max_output_bytes)):
            if not size > 0:
                raise UserError(f"python tool, {name}", got=f"{size}", expected="a positive number", stage="rollout",
                                remedy="Correct the value.")
        self._persistent, self._style = interpreter == "persistent", call
        self._limits = Limits(wall_s=program_s, cpu_s=int(program_s) + 1, memory_bytes=memory_mib * MIB, output_bytes=1 * MIB)
        self._max_interpreters, self._max_output = max_interpreters, max_output_bytes
        self._workshop = workshop(allow_unsandboxed)
        self._interpreter: Interpreter | None = None
        self._think_open = False

    @property
    def isolation(self) -> str:
        """In which programs run (``Sandbox.isolation``)."""
        return self._workshop.sandbox.isolation

    def reset(self, task: Task) -> None:
        """The tool is the same for every problem; only whether the template opens the reasoning makes a difference."""
        self._think_open = task.think_open

    def step(self, turn: str) -> Step:
        """Run what the turn calls for.

        Raises:
            SandboxFault: the sandbox failed; this rollout has no observation.
        """
        call = parse_call(turn, style=self._style)
        if call is None:
            return Step(None, void=is_void(turn, style=self._style, think_open=self._think_open))
        if call.mistake:
            return Step(call.mistake, call=True, failed=True)
        return self._run_persistent(call.code) if self._persistent else self._run_stateless(call.code)

    def close(self) -> None:
        """End the interpreter, and whatever its programs have started."""
        if self._interpreter is not None:
            self._interpreter.close()
            self._interpreter = None
            self._workshop.interpreters -= 1

    def _run_stateless(self, code: str) -> Step:
        source = code.encode("utf-8", "surrogatepass")
        try:
            finished = self._workshop.sandbox.run_stage(
                "script_stage", stdin=source, limits=self._limits, plain_s=self._limits.wall_s
            )
        except SandboxFault:
            self._workshop.close()
            raise
        error = self._ending(finished.ended)
        if not error and finished.ended.status != 0:
            last = finished.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            error = last or f"SystemExit: {finished.ended.status}"
        return self._step(finished.stdout, error)

    def _run_persistent(self, code: str) -> Step:
        if self._interpreter is None:
            if self._workshop.interpreters >= self._max_interpreters:
                return Step("ToolError: no interpreter is free; go on without one.", call=True, failed=True)
            self._interpreter = Interpreter(self._limits, allow_unsandboxed=self._workshop.allow_unsandboxed)
            self._workshop.interpreters += 1
        result = self._interpreter.run(code)
        if result.ended is None:
            return self._step(result.output, " ".join(result.error.splitlines()))
        error = self._ending(result.ended) or f"SystemExit: {result.ended.status}"
        return self._step(result.output, f"{error}\n{RESTARTED}")

    def _ending(self, ended: Ended) -> str:
        """The limit or signal that ended a program, as an error; "" where it ended by itself."""
        if ended.limit == "time_limit":
            return f"TimeoutError: the program ran longer than {self._limits.wall_s:g} s"
        if ended.limit == "memory":
            return f"MemoryError: the program used more than {self._limits.memory_bytes // MIB} MiB"
        if ended.limit == "output":
            return f"OutputError: the program wrote more than {self._limits.output_bytes // 1024} KiB"
        if ended.status is None:
            return "SystemExit: killed"
        return f"SystemExit: {signal.Signals(-ended.status).name}" if ended.status < 0 else ""

    def _step(self, output: bytes, error: str) -> Step:
        """The observation: output, its middle cut out where it is too long, then the error."""
        room = self._max_output - len(error.encode("utf-8", "replace"))
        if len(output) > max(0, room):
            half = max(0, room) // 2
            cut = f"\n[... {len(output) - 2 * half} bytes cut out ...]\n".encode()
            output = output[:half] + cut + output[len(output) - half:]
        printed = output.decode("utf-8", "replace").rstrip("\n")
        text = "\n".join(part for part in (printed, error) if part) or NOTHING
        return Step(text, call=True, failed=bool(error))
