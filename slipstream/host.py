"""What the operating system says of this process."""

from __future__ import annotations

from pathlib import Path


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
