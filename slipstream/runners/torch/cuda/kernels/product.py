"""Matrix products inside kernels, the same on the GPU and in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(a, b, total):
    """total + a b, summed in float32; exact products of float32 inputs."""
    if INTERPRETED:  # it would multiply the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def leave_part(total, places, arrived):
    """A program's share of a sum, where the last to arrive finds it. How many came before."""
    tl.store(places, total)
    tl.debug_barrier()
    return tl.atomic_add(arrived, 1, sem="acq_rel")


@triton.jit
def split(x):
    """Two bfloat16 that add up to a float32 but for its last 8 bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def split_product(a_high, a_low, b_high, b_low, total):
    """total + a b of split matrices: float32 but for the last bits, at a third of the speed of bfloat16."""
    total = product(a_low, b_high, total)
    total = product(a_high, b_low, total)
    return product(a_high, b_high, total)
