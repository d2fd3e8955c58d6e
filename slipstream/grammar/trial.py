"""Our end of the process that tries grammars: one at a time, each within its time, or the process is killed.

llguidance can spend minutes inside one call, and a grammar can exhaust memory or a stack: there, not here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import slipstream
from slipstream.errors import GrammarsUnavailable
from slipstream.grammar.specs import Source

START_SECONDS = 120.0


class TrialFailed(Exception):
    """The process was ended, or ended itself; the next trial starts a new one."""


class TrialProcess:
    """Not for two threads at once."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int]) -> None:
        self._first = {"tokens": [token.decode("latin-1") for token in tokens], "special": list(special)}
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self.seconds = 0.0  # of processor time that the last trial took; all it was given if it did not end

    def run(self, source: Source, seconds: float) -> dict[str, Any]:
        """``{"grammar": text}`` or ``{"error": why, "path": where}``."""
        self.seconds = 0.0
        if self._process is None:
            self._start()
        self.seconds = seconds
        answer = self._request({"source": list(source), "seconds": seconds}, seconds)
        self.seconds = answer["took"]
        return answer

    def close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slipstream.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a killed process has nothing useful to say
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())},
            start_new_session=True,  # Ctrl-C is for us
        )
        self._end = weakref.finalize(self, _end, self._process)
        try:
            self._request(self._first, START_SECONDS)
        except TrialFailed:
            raise GrammarsUnavailable("the process that tries grammars does not start") from None

    def _request(self, request: Any, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        alarm = threading.Timer(seconds, self._process.kill)
        alarm.daemon = True
        alarm.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            alarm.cancel()
        if not answer:
            self.close()
            raise TrialFailed
        result: dict[str, Any] = json.loads(answer)
        return result


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # unwritten data has no reader any more
                pipe.close()


def _import_path() -> list[str]:
    """Ours, so that the process imports the same modules; nothing from its working folder."""
    own = str(Path(slipstream.__file__).parents[1])
    return [own, *(str(Path(entry).resolve()) for entry in sys.path if entry)]
