"""Matrix products for few tokens, bound by reading the weights: what surrounds a product is done on the way.

Up to ``MAX_TOKENS`` tokens cost what one costs. The RMSNorm before a product needs no pass of its own: the squares are
summed while the product runs over the same tiles, and the result is scaled at the end. For more tokens the library's
matrix product is faster, and the wrappers are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 16


@triton.jit
def _skinny(
    x,
    weight,
    out,
    add,
    norm,
    partial,
    arrived,
    num_tokens,
    num_out,
    width,
    eps,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
):
    """out [tokens, num_out]. GATED: weight has 2 * num_out rows, and out = silu(first half) * second half."""
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
    product = tl.zeros([N, M], tl.float32)
    second = tl.zeros([N, M], tl.float32)
    squares = tl.zeros([M], tl.float32)
    for step in range(first, last):
        xs = tl.load(at_x, mask=in_tokens, other=0.0)
        if NORM:
            wide = xs.to(tl.float32)
            squares += tl.sum(wide * wide, axis=0)
            xs = (wide * tl.load(norm + step * K + inner)[:, None]).to(xs.dtype)
        tile = tl.load(at_weight, mask=in_rows, other=0.0)
        product = tl.dot(tile, xs, product)
        if GATED:
            tile = tl.load(at_weight + num_out.to(tl.int64) * width, mask=in_rows, other=0.0)
            second = tl.dot(tile, xs, second)
        at_weight += K
        at_x += K
    mine = True
    if SPLIT > 1:
        # The parts meet in memory; whoever comes last adds them up, always in the same order.
        place = tl.arange(0, N)[:, None] * M + tokens[None, :]
        base = partial + block.to(tl.int64) * (SPLIT * N * M)
        tl.store(base + part * (N * M) + place, product)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + block, 1, sem="acq_rel")
        mine = before == SPLIT - 1
        if mine:
            product = tl.zeros([N, M], tl.float32)
            for other in tl.static_range(SPLIT):
                product += tl.load(base + other * (N * M) + place, cache_modifier=".cg")
            tl.store(arrived + block, 0)
    if mine:
        if NORM:
            scale = tl.rsqrt(squares / width + eps)[None, :]
            product *= scale
            if GATED:
                second *= scale
        if GATED:
            product = product * tl.sigmoid(product) * second
        where = tokens[None, :].to(tl.int64) * num_out + rows[:, None]
        inside = in_rows & in_tokens
        if ADD:
            product += tl.load(add + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + where, product.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int  # of the weight, per program
    inner: int  # columns per step
    split: int = 1  # programs that share a row block's columns
    stages: int = 4
    warps: int = 4


def tiling(num_out: int, width: int, *, fused: bool) -> Tiling | None:
    """How to cut a matrix, or None if its width does not suit."""
    if width % 128 or width < 512 or num_out < 16:
        return None
    if fused:
        return Tiling(64, 128, 1, 4, 4)
    if num_out >= 8192:
        return Tiling(64, 128, 1, 4, 4)
    return Tiling(64, 128, 2, 5, 8)


class Scratch:
    """Where the parts of split products meet: one for all matrices of a device, since kernels run one by one."""

    SLOTS = 1 << 12

    def __init__(self, device: torch.device) -> None:
        self.partial = torch.empty(1 << 22, device=device, dtype=torch.float32)
        self.arrived = torch.zeros(self.SLOTS, device=device, dtype=torch.int32)

    def fits(self, blocks: int, split: int, size: int) -> bool:
        return blocks <= self.SLOTS and blocks * split * size <= self.partial.numel()


def skinny_linear(
    x: Tensor,  # [tokens <= MAX_TOKENS, width], contiguous
    weight: Tensor,  # [num_out, width], contiguous; with ``gated`` [2 * num_out, width]
    cut: Tiling,
    scratch: Scratch,
    *,
    add: Tensor | None = None,  # [tokens, num_out]
    norm: tuple[Tensor, float] | None = None,  # float32 [width], eps: x is normalised first
    gated: bool = False,
) -> Tensor:
    num_tokens, width = x.shape
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    blocks = triton.cdiv(num_out, cut.rows)
    assert (norm is None and not gated) or cut.split == 1, "a split program sees only a part of the squares"
    assert cut.split == 1 or scratch.fits(blocks, cut.split, cut.rows * MAX_TOKENS)
    out = torch.empty(num_tokens, num_out, device=x.device, dtype=x.dtype)
    _skinny[(blocks, cut.split)](
        x,
        weight,
        out,
        x if add is None else add,
        x if norm is None else norm[0],
        scratch.partial,
        scratch.arrived,
        num_tokens,
        num_out,
        width,
        0.0 if norm is None else norm[1],
        M=MAX_TOKENS,
        N=cut.rows,
        K=cut.inner,
        SPLIT=cut.split,
        ADD=add is not None,
        NORM=norm is not None,
        GATED=gated,
        num_stages=cut.stages,
        num_warps=cut.warps,
    )
    return out
