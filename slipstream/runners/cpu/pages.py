"""Memory for packed weights: pages that the system hands out as zeros, large ones where it has them.

A model's weights are written once and stay. Pages of 2 MiB take far fewer page faults than small ones, and nothing is
zeroed a second time, so that large files load faster (log 224). Small matrices share a mapping, which lives as long as
any of them.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of a large page
SHARED = 64 << 20  # of a mapping for several matrices
ALONE = SHARED // 4  # matrices from this size on have a mapping of their own
LEAST = 64 << 10  # smaller ones are left to PyTorch
LINE = 64  # where matrices begin: the processor's cache lines
HAS_LARGE = sys.platform == "linux"  # elsewhere PyTorch's own memory does


class Pages:
    def __init__(self) -> None:
        self._shared: weakref.ref[mmap.mmap] | None = None  # the mapping that the next small matrices go to
        self._start = 0  # where it has room

    def zeros(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]"""
        if num_bytes < LEAST or not HAS_LARGE:
            return torch.zeros(num_bytes, dtype=torch.uint8)
        if num_bytes >= ALONE:
            return _part(*_mapped(num_bytes), num_bytes)
        shared = self._shared() if self._shared is not None else None
        if shared is None or self._start + num_bytes > len(shared):
            shared, self._start = _mapped(SHARED)
            self._shared = weakref.ref(shared)
        start = self._start
        self._start += -(-num_bytes // LINE) * LINE
        return _part(shared, start, num_bytes)


def _mapped(num_bytes: int) -> tuple[mmap.mmap, int]:
    """A new mapping, and where in it so many bytes begin: at a large page. Only whole large pages are asked for."""
    found = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(found, dtype=torch.uint8).data_ptr() % HUGE
    if whole := num_bytes // HUGE * HUGE:
        with suppress(OSError):  # a system without them
            found.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return found, start


def _part(mapped: mmap.mmap, start: int, num_bytes: int) -> Tensor:
    """It keeps the mapping."""
    return torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=start)
