"""The worker's own end: a line of JSON in, a line of JSON out. It may be killed at any moment.

Ends by itself when its parent does. Imports nothing of ours: a worker is to start fast.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

BUFFER = 1 << 20  # bytes
Answer = Callable[[Any], Any]


def serve(start: Callable[[Any], Answer], *, memory: int, niceness: int = 0) -> None:
    """`start` takes the first line and returns what answers the others. `memory`: bytes they may take beyond that.

    Gives way only once it has started: that is our own work, and beside a busy engine it would take minutes.
    """
    _die_first()
    lines = open(sys.stdin.fileno(), "rb", BUFFER, closefd=False)  # noqa: SIM115 - as long as the process runs
    answer = start(json.loads(lines.readline()))
    _limit_memory(memory)
    if niceness:
        _give_way(niceness)
    _write({"ready": True})
    for line in lines:
        asked = json.loads(line)
        _exit_after(asked["seconds"], asked["cpu_seconds"])
        began = _cpu_times()
        reply = answer(asked["request"])
        _write({"answer": reply, "took": max(now - then for now, then in zip(_cpu_times(), began))})
        _exit_after(0, 0)


def _cpu_times() -> tuple[float, float]:
    """Of all threads, which is coarse while a timer counts it, and of this one."""
    return time.process_time(), time.thread_time()


def _write(reply: Any) -> None:
    line = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _exit_after(seconds: float, cpu_seconds: float) -> None:
    """The parent kills us after ``seconds``; this is for a parent that was killed itself. 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _die_first() -> None:
    """When memory is short, the system is to end us and not the server."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _give_way(niceness: int) -> None:
    if hasattr(os, "nice"):
        os.nice(niceness)


def _limit_memory(allowed: int) -> None:
    """Where the system tells how much we have already."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    limit = pages * resource.getpagesize() + allowed
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
