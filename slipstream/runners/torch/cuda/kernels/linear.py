"""Matrix products for few tokens, bound by reading the weights: up to ``MAX_TOKENS`` tokens cost what one costs.

For more tokens the library's product is faster. A narrow matrix is split along its inner side as well, so that enough
programs read at once; the parts meet in memory and are added by the last to arrive, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.torch.cuda.kernels.product import product

MAX_TOKENS = 16
PROGRAMS = 240  # enough to keep the memory of a large GPU busy


@triton.jit
def _skinny(
    x, weight, out, add, partial, arrived, num_tokens, num_out, width,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    part = tl.program_id(1)
    rows = block * N + tl.arange(0, N)
    tokens = tl.arange(0, M)
    inner = tl.arange(0, K)
    steps = width // K
    first = steps * part // SPLIT
    last = steps * (part + 1) // SPLIT
    column = first * K + inner
    at_weight = weight + rows[:, None].to(tl.int64) * width + column[None, :]
    at_x = x + tokens[None, :] * width + column[:, None]
    in_rows = rows[:, None] < num_out
    in_tokens = tokens[None, :] < num_tokens
    total = tl.zeros([N, M], tl.float32)
    for _ in range(first, last):
        total = product(tl.load(at_weight, mask=in_rows, other=0.0), tl.load(at_x, mask=in_tokens, other=0.0), total)
        at_weight += K
        at_x += K
    where = tokens[None, :].to(tl.int64) * num_out + rows[:, None]
    inside = in_rows & in_tokens
    if SPLIT > 1:
        place = tl.arange(0, N)[:, None] * M + tokens[None, :]
        base = partial + block.to(tl.int64) * (SPLIT * N * M)
        tl.store(base + part * (N * M) + place, total)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + block, 1, sem="acq_rel")
        if before < SPLIT - 1:
            return
        total = tl.zeros([N, M], tl.float32)
        for other in tl.static_range(SPLIT):
            total += tl.load(base + other * (N * M) + place, cache_modifier=".cg")
        tl.store(arrived + block, 0)
    if ADD:
        total += tl.load(add + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int  # of the weight, per program
    inner: int  # columns per step
    split: int = 1  # programs that share a row block's columns
    stages: int = 4
    warps: int = 4


def tiling(num_out: int, width: int) -> Tiling | None:
    """How to cut a matrix, measured on an H200; None: its width does not suit."""
    if width % 128 or width < 512 or num_out < 16:
        return None
    if num_out > 100_000:
        return Tiling(64, 128, stages=5)
    if num_out > 24_000 and width % 256 == 0:
        return Tiling(32, 256)
    blocks = triton.cdiv(num_out, 64)
    if blocks > PROGRAMS + 24:  # three stages leave room for more programs on a processor: all run at once
        return Tiling(64, 128, stages=3)
    if blocks <= PROGRAMS // 6:  # one program a processor
        return Tiling(64, 128, max(1, min(PROGRAMS // 2 // blocks, width // 512, 8)), stages=5)
    return Tiling(64, 128, max(1, min(PROGRAMS // blocks, width // 512, 8)))


class Scratch:
    """Where the parts of split products meet: one for all matrices of a device, since kernels run one by one."""

    def __init__(self, device: torch.device) -> None:
        self.partial = torch.empty(PROGRAMS * 64 * MAX_TOKENS, device=device, dtype=torch.float32)
        self.arrived = torch.zeros(PROGRAMS, device=device, dtype=torch.int32)


def skinny_linear(
    x: Tensor,  # [tokens <= MAX_TOKENS, width], contiguous
    weight: Tensor,  # [num_out, width], contiguous
    cut: Tiling,
    scratch: Scratch,
    add: Tensor | None = None,  # [tokens, num_out], contiguous
) -> Tensor:
    num_tokens, width = x.shape
    num_out = weight.shape[0]
    blocks = triton.cdiv(num_out, cut.rows)
    assert num_tokens <= MAX_TOKENS
    assert x.is_contiguous()
    assert add is None or add.is_contiguous()
    assert cut.split == 1 or blocks * cut.split * cut.rows <= PROGRAMS * 64
    out = torch.empty(num_tokens, num_out, device=x.device, dtype=x.dtype)
    _skinny[(blocks, cut.split)](
        x, weight, out, x if add is None else add, scratch.partial, scratch.arrived, num_tokens, num_out, width,
        M=MAX_TOKENS, N=cut.rows, K=cut.inner, SPLIT=cut.split, ADD=add is not None,
        num_stages=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
    return out
