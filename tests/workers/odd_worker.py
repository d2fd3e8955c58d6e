"""A worker that ends in every way there is. Its first line: a folder for the marks it leaves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from slipstream.workers.child import Answer, serve

NICENESS = 3


def start(folder: str) -> Answer:
    at_start = niceness()

    def answer(request: Any) -> Any:
        kind, given = request
        match kind:
            case "echo":
                return given
            case "pid":
                return os.getpid()
            case "hang":
                mark(folder, given)
                time.sleep(3600)
            case "niceness":
                return [at_start, niceness()]
            case "sleep":
                time.sleep(given)
            case "compute":
                while True:
                    pass
            case "die":
                mark(folder, given)
                os.kill(os.getpid(), signal.SIGKILL)
            case "die once":
                if mark(folder, given):
                    os.kill(os.getpid(), signal.SIGKILL)
                return "alive"
            case "take":
                return len(bytes(given))
            case "abort":
                os.abort()
            case "panic":
                raise BaseException("a panic")
        return None

    return answer


def niceness() -> int:
    return os.nice(0) if hasattr(os, "nice") else 0


def mark(folder: str, name: str) -> bool:
    """Whether it is the first."""
    path = Path(folder) / name
    first = not path.exists()
    path.write_text(str(os.getpid()))
    return first


if __name__ == "__main__":
    serve(start, memory=256 << 20, niceness=NICENESS)
