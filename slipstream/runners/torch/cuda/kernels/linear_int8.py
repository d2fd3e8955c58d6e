"""Products with 8-bit matrices for any number of tokens, in blocks of up to ``TOKEN_BLOCK``.

As the products for few tokens in linear.py: bound by reading the weights, split along the inner side where there are
few programs. The levels are unpacked between memory and the tensor cores; the scale meets the finished sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.runners.torch.cuda.kernels.int8 import GROUP, UNIT, Int8Matrix, halves
from slipstream.runners.torch.cuda.kernels.linear import (
    FEW,
    FEW_TOKENS,
    MAX_TOKENS,
    PROCESSORS,
    Scratch,
    Tiling,
    padded,
)
from slipstream.runners.torch.cuda.kernels.product import product
from slipstream.runners.torch.cuda.kernels.turns import IN_TURN, let_next_in, wait_for_last

TOKEN_BLOCK = 128
LIBRARY_TOKENS = 512  # beyond: unpack the matrix once and let the library multiply
VAST = 100_000  # rows of a matrix that is never unpacked as a whole
SCRATCH = 2 * PROCESSORS * TOKEN_BLOCK * 128  # floats


@triton.jit(do_not_specialize=["num_tokens", "num_groups", "split"])
def _int8(
    x, words, scale, bias, out, add, partial, arrived, num_tokens, num_out, num_groups, split,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * M
    block = tl.program_id(1)
    part = tl.program_id(2)
    rows = block * N + tl.arange(0, N)
    scales = tl.load(scale + rows, mask=rows < num_out, other=0.0) * UNIT  # nobody writes them: before the turn
    wait_for_last()
    if M > FEW:
        let_next_in()
    total = tl.zeros([N, M], tl.float32)
    for group in range(num_groups * part // split, num_groups * (part + 1) // split):
        low, high = halves(words.load([block * N, group * (K // 2)]), out.dtype.element_ty)
        total = product(low, x.load([first, group * K]).T, total)
        total = product(high, x.load([first, group * K + K // 2]).T, total)
    let_next_in()
    tokens = first + tl.arange(0, M)
    where = tokens[None, :].to(tl.int64) * num_out + rows[:, None]
    inside = (rows[:, None] < num_out) & (tokens[None, :] < num_tokens)
    if SPLIT:
        meeting = tl.program_id(0) * tl.num_programs(1) + block
        place = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
        base = partial + meeting.to(tl.int64) * split * (N * M)
        tl.store(base + part * (N * M) + place, total)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + meeting, 1, sem="acq_rel")
        if before < split - 1:
            return
        total = tl.zeros([N, M], tl.float32)
        for other in range(split):
            total += tl.load(base + other * (N * M) + place, cache_modifier=".cg")
        tl.store(arrived + meeting, 0)
    total *= scales[:, None]
    if BIAS:
        total += tl.load(bias + rows, mask=rows < num_out, other=0.0).to(tl.float32)[:, None]
    if ADD:
        total += tl.load(add + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


def tokens_of_a_block(num_tokens: int) -> int:
    return padded(num_tokens) or TOKEN_BLOCK


def tiling(num_out: int, num_groups: int, num_tokens: int, group: int = GROUP) -> Tiling | None:
    """How to cut a matrix, from a sweep on an H200 (but for splits of many tokens); None: unpack it for the library."""
    if num_tokens > MAX_TOKENS:
        if num_tokens > LIBRARY_TOKENS and num_out < VAST:
            return None
        return _shared_out(Tiling(128, group, 2, warps=8), num_out, num_groups, num_tokens, 2 * PROCESSORS)
    few = num_tokens <= FEW_TOKENS
    blocks = triton.cdiv(num_out, 64)
    if few and (num_out > VAST or PROCESSORS < blocks <= 2 * PROCESSORS):
        return Tiling(64, group, 6, warps=2)
    if not few and blocks > 2 * PROCESSORS:
        return Tiling(128, group, 4, warps=8)
    return _shared_out(Tiling(64, group, 4), num_out, num_groups, num_tokens, (3 if few else 2) * PROCESSORS)


def _shared_out(cut: Tiling, num_out: int, num_groups: int, num_tokens: int, most_programs: int) -> Tiling:
    """Split as far as there are processors, and columns enough to be worth a program."""
    programs = triton.cdiv(num_out, cut.rows) * triton.cdiv(num_tokens, tokens_of_a_block(num_tokens))
    most = 8 if num_tokens <= FEW_TOKENS else 3
    return replace(cut, split=max(1, min(most_programs // programs, num_groups // 4, most)))


def int8_linear(
    x: Tensor,  # [tokens, width], contiguous
    matrix: Int8Matrix,
    cut: Tiling,
    scratch: Scratch,
    bias: Tensor | None = None,  # [num_out]
    add: Tensor | None = None,  # [tokens, num_out], contiguous
) -> Tensor:
    num_tokens, width = x.shape
    num_out, half = matrix.num_rows, cut.inner // 2
    made_for = tokens_of_a_block(num_tokens)
    grid = (triton.cdiv(num_tokens, made_for), triton.cdiv(num_out, cut.rows), cut.split)
    assert cut.inner == matrix.group
    assert width == matrix.width
    assert x.is_contiguous()
    assert add is None or add.is_contiguous()
    if cut.split > 1:
        assert grid[0] * grid[1] <= scratch.arrived.numel()
        assert grid[0] * grid[1] * grid[2] * cut.rows * made_for <= scratch.partial.numel()
    out = torch.empty(num_tokens, num_out, device=x.device, dtype=x.dtype)
    _int8[grid](
        TensorDescriptor(x, [num_tokens, width], [width, 1], [made_for, half]),
        TensorDescriptor(matrix.words, list(matrix.words.shape), list(matrix.words.stride()), [cut.rows, half]),
        matrix.scale, matrix.scale if bias is None else bias, out, x if add is None else add,
        scratch.partial, scratch.arrived, num_tokens, num_out, matrix.num_groups, cut.split,
        M=made_for, N=cut.rows, K=cut.inner, SPLIT=cut.split > 1, BIAS=bias is not None, ADD=add is not None,
        num_stages=cut.stages, num_warps=cut.warps, **IN_TURN,
    )  # fmt: skip
    return out
