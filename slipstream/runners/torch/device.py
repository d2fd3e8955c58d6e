"""What a benchmark asks of the device itself: its name, how fast it copies, how much of it was taken.

Knows no model. Everything here works on a CPU too, so that benchmarks can be tried anywhere.
"""

from __future__ import annotations

import gc
import platform
import time
from pathlib import Path

import torch

from slipstream.host import peak_resident_bytes

COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}  # far more than any cache holds
COPY_ROUNDS = 10


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Bytes read and written a second by the fastest of some large copies; what is free may make them smaller.

    Keeps no memory.
    """
    wanted = num_bytes or COPY_BYTES[device.type]
    if device.type == "cuda":
        wanted = min(wanted, torch.cuda.mem_get_info(device)[0] // 3)
    source = torch.zeros(wanted, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # its pages are touched before the clock runs
    seconds = min(_copy_seconds(source, target) for _ in range(COPY_ROUNDS))
    del source, target
    release_memory(device)
    return 2 * wanted / seconds


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    synchronize(source.device)
    began = time.perf_counter()
    target.copy_(source)
    synchronize(source.device)
    return time.perf_counter() - began


def release_memory(device: torch.device) -> None:
    """Give back what nobody holds any more: the next model plans with what the device calls free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class PeakMemory:
    """From its making on. On a GPU: tensors at the peak, what the allocator held for them, and what the device lacks
    since then (libraries, kernels and graphs included). On a CPU: the whole process at its peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._free = torch.cuda.mem_get_info(device)[0]

    def read(self) -> dict[str, int]:
        if self._device.type != "cuda":
            return {"resident": peak_resident_bytes()}
        return {
            "allocated": torch.cuda.max_memory_allocated(self._device),
            "reserved": torch.cuda.max_memory_reserved(self._device),
            "device": self._free - torch.cuda.mem_get_info(self._device)[0],
        }
