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
