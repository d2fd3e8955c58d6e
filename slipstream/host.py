"""What the operating system says of this process, and is told of it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

MODEST = 10  # the niceness of what streams come before


def give_way() -> None:
    """The thread that calls it lets others go first from now on, where the system knows threads by number."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Who is more modest already stays so: to ask for less niceness takes a privilege.
        os.setpriority(os.PRIO_PROCESS, thread, max(MODEST, os.getpriority(os.PRIO_PROCESS, thread)))


def available_threads() -> int:
    """Cores this process may use: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def resident_bytes() -> int:
    """What it holds now; 0 where the system does not tell."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
