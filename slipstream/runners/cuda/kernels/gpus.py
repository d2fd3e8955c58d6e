"""What the GPU that kernels run on can do. Tiles are chosen by it, and how kernels follow each other.

Asked once for each device, when something is first built for it or launched on it: it takes a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True, slots=True)
class Gpu:
    capability: tuple[int, int]
    shared_bytes: int  # shared memory of a program
    num_processors: int
    has_pdl: bool  # kernels may start before the one in front of them has ended: pdl.py

    @property
    def has_wgmma(self) -> bool:
        """Hopper's instructions for its tensor cores."""
        return self.capability[0] == 9

    @property
    def has_integer_products(self) -> bool:
        """Tensor cores for bytes, 32 columns at a time."""
        return self.capability >= (8, 0)

    @property
    def multiplies_from_shared(self) -> bool:
        """Tensor cores read shared memory themselves, and tiles are fetched by descriptors. Where operands go through
        registers, these are short: smaller tiles, fetched by pointers (as compiled: next to nothing spills)."""
        return self.capability[0] in (9, 10)


INTERPRETED = Gpu((9, 0), 1 << 30, 132, has_pdl=False)  # the tiles of an H100, whatever they take


@cache
def gpu(device: torch.device) -> Gpu:
    return _ask(device)


def _ask(device: torch.device) -> Gpu:
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return INTERPRETED
    capability = torch.cuda.get_device_capability(device)
    shared = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Gpu(capability, int(shared), processors, has_pdl=capability >= (9, 0))
