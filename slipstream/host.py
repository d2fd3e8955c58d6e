"""What the operating system says of this machine and process, and a thread's priority."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NICENESS = 10  # of work that streams come before
UNKNOWN_FREE = 8 << 30  # bytes


def lower_priority() -> None:
    """Of the calling thread, from now on, where the system knows threads by number."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Never less niceness than before: that takes a privilege.
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def allow_open_files(count: int) -> None:
    """At least so many for this process, if the system lets it have them."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def keeping_max_open_files() -> Iterator[None]:
    """What is called meanwhile cannot change how many files this process may ever be allowed to open."""
    try:
        import resource
    except ImportError:
        yield
        return
    set_limits = resource.setrlimit

    def keep(which: int, limits: tuple[int, int]) -> None:
        if which != resource.RLIMIT_NOFILE or limits[1] == resource.getrlimit(which)[1]:
            set_limits(which, limits)

    resource.setrlimit = keep
    try:
        yield
    finally:
        resource.setrlimit = set_limits


def max_open_files() -> int | None:
    """That this process, and those it starts, may be allowed. None: any number, or the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def available_threads() -> int:
    """Cores this process may use: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def available_bytes() -> int:
    """Memory of the machine that is free; a guess where the system does not say."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return UNKNOWN_FREE


def trim_heap() -> None:
    """Hands free memory of the C library's heap back to the system, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """What it holds now; 0 where the system does not say."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
