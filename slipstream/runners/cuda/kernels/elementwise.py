"""The gated activation of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, INTERLEAVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    source = gate_up + token * stride + cols
    if INTERLEAVE < WIDTH:
        source += cols // INTERLEAVE * INTERLEAVE
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + INTERLEAVE, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + cols, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, interleave: int | None = None) -> Tensor:
    """silu(gate) * up. -> [tokens, width]

    gate_up: [tokens, 2 * width], gate first, or both interleaved, ``interleave`` columns of each; rows may lie apart.
    """
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    assert width % (interleave or width) == 0
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    # Few tokens: small blocks, so that many processors share the row.
    block, num_warps = (256, 1) if num_tokens <= 16 else (1024, 4)
    _silu_mul_kernel[(num_tokens, triton.cdiv(width, block))](
        gate_up,
        out,
        gate_up.stride(0),
        INTERLEAVE=interleave or width,
        WIDTH=width,
        BLOCK=block,
        num_warps=num_warps,
        **pdl_options(out.device),
    )
    return out
