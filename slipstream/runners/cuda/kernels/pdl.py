"""Kernels in turn, nearly: the next one is launched and set up while one still runs.

Every kernel that is launched with ``IN_TURN`` takes its turn before it reads or writes anything that another kernel
writes or reads, and before it may return: what it waits for is the end of the kernel before it, which waited for the
one before that. Needs compute capability 9.0; elsewhere kernels follow each other as usual.

Before its turn a kernel may read what nobody writes: weights. A product lets the next kernel in only in its own turn;
so, behind a product, a kernel may also read before its turn what was written before that product: where the step's rows
lie, and what earlier steps left in caches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAP = tl.constexpr(
    not triton.knobs.runtime.interpret and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
)
IN_TURN = {"launch_pdl": True} if OVERLAP.value else {}  # options of a launch


@triton.jit
def let_next_in():
    """Once all programs have said so, or ended, the next kernel's may come beside them."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_last():
    if OVERLAP:
        gdc_wait()


@triton.jit
def take_turn():
    let_next_in()
    wait_for_last()
