"""What share of the processors other processes had while something was measured: a number is worth no more than that.

Reads Linux's /proc; elsewhere the share is not known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

STAT = Path("/proc/stat")
BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, two kinds of interrupts, time that a hypervisor gave to others
DISTURBING = 0.1


class OtherProcesses:
    """Everyone but this process and ``pids``, from now on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = [os.getpid(), *pids]
        self._began, self._before = time.perf_counter(), self._seconds()

    def share(self) -> float | None:
        """0: the machine was ours alone. 1: others had all of it."""
        seconds = self._seconds()
        if seconds is None or self._before is None:
            return None
        possible = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        return round(max(0.0, seconds - self._before) / possible, 3)

    def _seconds(self) -> float | None:
        """Of all processors since the machine started, without what our own processes had."""
        if not STAT.exists():
            return None
        counts = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:]]
        return sum(counts[i] for i in BUSY) / os.sysconf("SC_CLK_TCK") - sum(map(cpu_seconds, self._pids))


def cpu_seconds(pid: int) -> float:
    """That a process has had, with all its threads."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def warning(shares: Sequence[float | None]) -> str:
    """A sentence if others had too much; empty if they had not, or if it is not known."""
    highest = max((share for share in shares if share is not None), default=0.0)
    if highest <= DISTURBING:
        return ""
    return (
        f"other processes had up to {100 * highest:.0f} % of the processors: measure again on a quiet machine. Threads "
        "that wait for each other spinning, as llama.cpp's do, lose most by it"
    )
