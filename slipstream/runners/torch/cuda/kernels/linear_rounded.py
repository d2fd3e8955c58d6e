"""Products with matrices in 8 or 4 bits for any number of tokens, in blocks of up to ``TOKEN_BLOCK``.

As the products for few tokens in linear.py: bound by reading the weights, split along the inner side where there are
few programs. The levels are unpacked between memory and the tensor cores; the scale of a row meets the finished sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.runners.torch.cuda.kernels.int4 import plain, weights_of
from slipstream.runners.torch.cuda.kernels.int8 import UNIT, halves
from slipstream.runners.torch.cuda.kernels.linear import (
    FEW,
    FEW_TOKENS,
    MAX_TOKENS,
    PROCESSORS,
    Scratch,
    Tiling,
    padded,
)
from slipstream.runners.torch.cuda.kernels.product import leave_part, product
from slipstream.runners.torch.cuda.kernels.rounding import RoundedMatrix
from slipstream.runners.torch.cuda.kernels.turns import IN_TURN, let_next_in, wait_for_last

TOKEN_BLOCK = 128
LEAST_TOKENS = 8  # that a product in 4 bits is made for; in 8 bits FEW_TOKENS
LIBRARY_TOKENS = {8: 512, 4: 256}  # by bits; beyond: unpack the matrix once and let the library multiply
VAST = 100_000  # rows of a matrix that is never unpacked as a whole
LEAST_COLUMNS = 512  # that a program of a split product takes
SCRATCH = 2 * PROCESSORS * TOKEN_BLOCK * 128  # floats
MEETINGS = 2 * PROCESSORS  # blocks of a split product


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "split"])
def _rounded(
    x, words, facts, bias, out, add, partial, arrived, num_tokens, num_out, num_tiles, split,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
    SPLIT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * M
    block = tl.program_id(1)
    part = tl.program_id(2)
    dtype: tl.constexpr = out.dtype.element_ty
    rows = block * N + tl.arange(0, N)
    if BITS == 8:  # nobody writes them: before the turn
        scales = tl.load(facts + rows, mask=rows < num_out, other=0.0) * UNIT
    wait_for_last()
    if M > FEW:
        let_next_in()
    total = tl.zeros([N, M], tl.float32)
    for tile in range(num_tiles * part // split, num_tiles * (part + 1) // split):
        found = words.load([block * N, tile * (K * BITS // 16)])
        if BITS == 8:
            low, high = halves(found, dtype)
            total = product(low, x.load([first, tile * K]).T, total)
            total = product(high, x.load([first, tile * K + K // 2]).T, total)
        else:
            weights = weights_of(found, facts.load([tile * 4, block * N]), dtype)
            total = product(weights, x.load([first, tile * K]).T, total)
    let_next_in()
    tokens = first + tl.arange(0, M)
    where = tokens[None, :].to(tl.int64) * num_out + rows[:, None]
    inside = (rows[:, None] < num_out) & (tokens[None, :] < num_tokens)
    if SPLIT:
        meeting = tl.program_id(0) * tl.num_programs(1) + block
        place = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
        base = partial + meeting.to(tl.int64) * split * (N * M)
        if leave_part(total, base + part * (N * M) + place, arrived + meeting) < split - 1:
            return
        total = tl.zeros([N, M], tl.float32)
        for other in range(split):
            total += tl.load(base + other * (N * M) + place, cache_modifier=".cg")
        tl.store(arrived + meeting, 0)
    if BITS == 8:
        total *= scales[:, None]
    else:
        total = plain(total, dtype)
    if BIAS:
        total += tl.load(bias + rows, mask=rows < num_out, other=0.0).to(tl.float32)[:, None]
    if ADD:
        total += tl.load(add + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(dtype), mask=inside)


def tokens_of_a_block(bits: int, num_tokens: int) -> int:
    if bits == 4 and num_tokens <= LEAST_TOKENS:
        return LEAST_TOKENS
    return padded(num_tokens) or TOKEN_BLOCK


def compiled_for(num_tokens: int) -> int:
    """Products of numbers of tokens with the same one need the same kernels, whatever matrices are stored in."""
    if num_tokens <= MAX_TOKENS:
        return tokens_of_a_block(4, num_tokens)  # tells more apart than others do
    return triton.cdiv(num_tokens, TOKEN_BLOCK) * TOKEN_BLOCK if num_tokens <= max(LIBRARY_TOKENS.values()) else 0


def tiling(bits: int, num_out: int, num_tiles: int, tile: int, num_tokens: int) -> Tiling | None:
    """How to cut a matrix; None: unpack it for the library."""
    if num_tokens > LIBRARY_TOKENS[bits] and num_out < VAST:
        return None
    return (_of_8_bits if bits == 8 else _of_4_bits)(num_out, num_tiles, tile, num_tokens)


def _of_8_bits(num_out: int, num_tiles: int, tile: int, num_tokens: int) -> Tiling:
    """From a sweep on an H200, but for splits of many tokens."""
    if num_tokens > MAX_TOKENS:
        return _shared_out(Tiling(128, tile, 2, warps=8), num_out, num_tiles, num_tokens, 2 * PROCESSORS)
    few = num_tokens <= FEW_TOKENS
    blocks = triton.cdiv(num_out, 64)
    if few and (num_out > VAST or PROCESSORS < blocks <= 2 * PROCESSORS):
        return Tiling(64, tile, 6, warps=2)
    if not few and blocks > 2 * PROCESSORS:
        return Tiling(128, tile, 4, warps=8)
    return _shared_out(Tiling(64, tile, 4), num_out, num_tiles, num_tokens, (3 if few else 2) * PROCESSORS)


def _of_4_bits(num_out: int, num_tiles: int, tile: int, num_tokens: int) -> Tiling:
    """Measured on an H200: up to MAX_TOKENS within 4 % of the best that a sweep found for each of seven matrices."""
    blocks = triton.cdiv(num_out, 64)
    if num_tokens > MAX_TOKENS:
        cut, most = Tiling(128, tile, 2, warps=8), 2 * PROCESSORS
    elif num_tokens > FEW_TOKENS:
        narrow = 3 * blocks <= PROCESSORS
        cut, most = Tiling(64, tile, 3) if narrow else Tiling(128, tile, 3, warps=8), PROCESSORS
    elif num_tokens <= LEAST_TOKENS:
        cut, most = Tiling(64, tile, 4, warps=2), 7 * PROCESSORS // 2
    elif 3 * PROCESSORS < 2 * blocks <= 4 * PROCESSORS:  # three stages leave room for four programs on a processor
        cut, most = Tiling(64, tile, 3), 4 * PROCESSORS
    else:
        cut, most = Tiling(64, tile, 4), 3 * PROCESSORS
    return _shared_out(cut, num_out, num_tiles, num_tokens, most)


def _shared_out(cut: Tiling, num_out: int, num_tiles: int, num_tokens: int, most_programs: int) -> Tiling:
    """Split as far as there are processors, and columns enough to be worth a program."""
    programs = triton.cdiv(num_out, cut.rows) * triton.cdiv(num_tokens, TOKEN_BLOCK)
    most = 8 if num_tokens <= FEW_TOKENS else 3
    worth = num_tiles * cut.inner // LEAST_COLUMNS
    return replace(cut, split=max(1, min(most_programs // programs, worth, most)))


def rounded_linear(
    x: Tensor,  # [tokens, width], contiguous
    matrix: RoundedMatrix,
    cut: Tiling,
    scratch: Scratch,
    bias: Tensor | None = None,  # [num_out]
    add: Tensor | None = None,  # [tokens, num_out], contiguous
) -> Tensor:
    num_tokens, width = x.shape
    num_out, words = matrix.num_rows, matrix.words
    made_for = tokens_of_a_block(matrix.bits, num_tokens)
    grid = (triton.cdiv(num_tokens, made_for), triton.cdiv(num_out, cut.rows), cut.split)
    assert cut.inner == matrix.tile
    assert width == matrix.width
    assert x.is_contiguous()
    assert add is None or add.is_contiguous()
    if cut.split > 1:
        assert grid[0] * grid[1] <= scratch.arrived.numel()
        assert grid[0] * grid[1] * grid[2] * cut.rows * made_for <= scratch.partial.numel()
    out = torch.empty(num_tokens, num_out, device=x.device, dtype=x.dtype)
    _rounded[grid](
        TensorDescriptor(x, [num_tokens, width], [width, 1], [made_for, matrix.at_once]),
        TensorDescriptor(words, list(words.shape), list(words.stride()), [cut.rows, matrix.tile * matrix.bits // 16]),
        matrix.facts(cut.rows), x if bias is None else bias, out, x if add is None else add,
        scratch.partial, scratch.arrived, num_tokens, num_out, matrix.num_tiles, cut.split,
        M=made_for, N=cut.rows, K=cut.inner, BITS=matrix.bits,
        SPLIT=cut.split > 1, BIAS=bias is not None, ADD=add is not None,
        num_stages=cut.stages, num_warps=cut.warps, **IN_TURN,
    )  # fmt: skip
    return out
