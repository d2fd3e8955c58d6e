"""What a benchmark asks of the device itself: its name, how fast it copies, how much of it was taken.

Knows no model. Everything here works on a CPU too, so that benchmarks can be tried anywhere.
"""

from __future__ import annotations

import gc
import time

import torch

from slipstream.host import cpu_name, peak_resident_bytes, trim_heap

COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}  # far more than any cache holds
COPY_ROUNDS = 10


class TorchDevice:
    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.kind = device.type

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.kind == "cuda" else cpu_name()

    def copy_bandwidth(self) -> float:
        """What is free may make the copies smaller."""
        num_bytes = COPY_BYTES[self.kind]
        if self.kind == "cuda":
            num_bytes = min(num_bytes, torch.cuda.mem_get_info(self.torch)[0] // 3)
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch)
        target = torch.empty_like(source)
        target.copy_(source)  # its pages are touched before the clock runs
        seconds = min(self._copy_seconds(source, target) for _ in range(COPY_ROUNDS))
        del source, target
        self.release_memory()
        return 2 * num_bytes / seconds

    def release_memory(self) -> None:
        gc.collect()
        if self.kind == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # each engine thread leaves one, 32 MiB
            torch.cuda.empty_cache()
        trim_heap()

    def watch_memory(self) -> TorchPeakMemory:
        return TorchPeakMemory(self.torch)

    def _copy_seconds(self, source: torch.Tensor, target: torch.Tensor) -> float:
        self._synchronize()
        began = time.perf_counter()
        target.copy_(source)
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch)


class TorchPeakMemory:
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
