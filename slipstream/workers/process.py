"""Our end of a worker process: one request at a time, each within its time, or the process is killed.

What a worker does may hang inside one call, or exhaust memory or a stack: there, not here. Its verdicts are an answer,
OutOfTime and Crashed. A process that somebody else ended has said nothing: another one is asked the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import slipstream

START_SECONDS = 120.0
ATTEMPTS = 2
BUFFER = 1 << 20  # bytes: a long conversation travels at once
# Exit codes of a process that was told to end: by a person, a service manager or the system when memory is short.
# 0: it saw the end of its input.
TOLD_TO_END = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
FROM_OUTSIDE = {0, 1} if os.name == "nt" else {0, *(-getattr(signal, name) for name in TOLD_TO_END)}
OUT_OF_CPU_TIME = {-signal.SIGPROF} if hasattr(signal, "SIGPROF") else set()


class OutOfTime(Exception):
    """The process did not answer within its time and was killed."""


class Crashed(Exception):
    """The process ended itself over a request: memory, a stack, a panic."""


class Unavailable(Exception):
    """No process could be asked: it does not start, is ended from outside, or was closed. No request is at fault."""


class _EndedFromOutside(Exception):
    pass


class _Child:
    """A running process. Any thread may end it."""

    def __init__(self, module: str) -> None:
        self.ready = False
        self.late = self.closed = False
        self.detach: Callable[[], object] = lambda: None  # from its owner, whose end would be its own
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            bufsize=BUFFER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a killed process has nothing useful to say
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())},
            start_new_session=True,  # Ctrl-C is for us
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        _widen(self._input)
        _widen(self._output)

    def exchange(self, line: bytes, seconds: float) -> bytes:
        """A line for a line; empty when the process ended."""
        alarm = threading.Timer(seconds, self._end_late)
        alarm.daemon = True
        alarm.start()
        try:
            self._input.write(line)
            self._input.flush()
            answer = self._output.readline()
        except (OSError, ValueError):  # ended, or its pipes were closed
            return b""
        finally:
            alarm.cancel()
        return answer if answer.endswith(b"\n") else b""

    def exit_code(self) -> int:
        """Of a process that closed its output."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(START_SECONDS)
        return self._process.poll() or 0

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._input, self._output):
            with suppress(OSError):  # unwritten data has no reader any more
                pipe.close()

    def _end_late(self) -> None:
        self.late = True
        self._process.kill()


class WorkerProcess:
    """`ask` is not for two threads at once; any thread may `close`. `first`: what the process is told at its start.

    It is started when it is needed, and again after it ended.
    """

    def __init__(self, module: str, first: Any) -> None:
        self._module = module
        self._first = to_line(first)
        self._child: _Child | None = None
        self.seconds = 0.0  # of processor time that the last request took; of the clock's if it got no answer

    @property
    def pid(self) -> int | None:
        """None while no process runs."""
        child = self._child
        return None if child is None else child.pid

    def start(self) -> None:
        """Without waiting until the process is ready. Raises Unavailable."""
        if self._child is None:
            self._child = self._spawn()

    def ask(self, request: Any, seconds: float, cpu_seconds: float = 0.0) -> Any:
        """The answer. Raises OutOfTime, Crashed or Unavailable; what json.dumps does on a request that is not JSON.

        ``cpu_seconds``: of processor time, where the system counts it: a process that gives way to others may get
        little of it. 0: no limit.
        """
        line = to_line({"request": request, "seconds": seconds, "cpu_seconds": cpu_seconds})
        self.seconds = 0.0
        for _ in range(ATTEMPTS):
            with suppress(_EndedFromOutside):
                return self._ask(self._ready_child(), line, seconds)
        raise Unavailable("it was ended from outside, more than once")

    def close(self) -> None:
        """A request that is being answered gets Unavailable. A later one starts another process."""
        if (child := self._child) is not None:
            child.closed = True
            self._forget(child)

    def _forget(self, child: _Child) -> None:
        if self._child is child:
            self._child = None
        child.detach()
        child.end()

    def _spawn(self) -> _Child:
        try:
            child = _Child(self._module)
        except OSError as error:
            raise Unavailable(f"it does not start: {error.strerror or error}") from error
        child.detach = weakref.finalize(self, child.end).detach
        return child

    def _ready_child(self) -> _Child:
        self.start()
        child = self._child
        assert child is not None
        if not child.ready:
            try:
                self._exchange(child, self._first, START_SECONDS)
            except (OutOfTime, Crashed):
                raise Unavailable("it does not start") from None
            child.ready = True
        return child

    def _ask(self, child: _Child, line: bytes, seconds: float) -> Any:
        began = time.monotonic()
        try:
            reply = self._exchange(child, line, seconds)
        except Exception:
            self.seconds += time.monotonic() - began
            raise
        self.seconds += reply["took"]
        return reply["answer"]

    def _exchange(self, child: _Child, line: bytes, seconds: float) -> Any:
        answer = child.exchange(line, seconds)
        if answer:
            return json.loads(answer)
        code = child.exit_code()
        self._forget(child)
        if child.closed:
            raise Unavailable("it was closed")
        if child.late or code in OUT_OF_CPU_TIME:
            raise OutOfTime
        raise _EndedFromOutside if code in FROM_OUTSIDE else Crashed


def _widen(pipe: IO[bytes]) -> None:
    """Only where the system and the user's limits allow it."""
    with suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, BUFFER)


def to_line(value: Any) -> bytes:
    """JSON in one line. A lone surrogate, which no text should have, passes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _plain(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _import_path() -> list[str]:
    """Ours, so that the process imports the same modules; nothing from its working folder."""
    own = str(Path(slipstream.__file__).parents[1])
    return [own, *(str(Path(entry).resolve()) for entry in sys.path if entry)]
