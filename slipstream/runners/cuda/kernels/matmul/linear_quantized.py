"""Products with matrices in 8 or 4 bits for any number of tokens, in blocks of up to ``TOKEN_BLOCK``.

As the products for few tokens in linear.py, what surrounds a product included: bound by reading the weights, split
along the inner side where there are few programs. Levels are unpacked between memory and the tensor cores.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.runners.cuda.kernels.matmul.linear import (
    FEW,
    FEW_TOKENS,
    MAX_TOKENS,
    NO_NORM,
    PROCESSORS,
    NoNorm,
    Norm,
    Scratch,
    Tiling,
    Unscaled,
    padded,
    unscaled_like,
    values_of,
)
from slipstream.runners.cuda.kernels.matmul.product import deliver, leave_part, product
from slipstream.runners.cuda.kernels.pdl import launch_dependents, pdl_options, wait_for_previous
from slipstream.runners.cuda.kernels.quant.fp8 import coded_weights
from slipstream.runners.cuda.kernels.quant.int4 import weights_of
from slipstream.runners.cuda.kernels.quant.int8 import UNIT as INT8_UNIT
from slipstream.runners.cuda.kernels.quant.int8 import halves
from slipstream.runners.cuda.kernels.quant.quantize import RoundedMatrix, plain

TOKEN_BLOCK = 128
LEAST_TOKENS = 8  # that a product in 4 bits is made for; in 8 bits FEW_TOKENS
LIBRARY_TOKENS = {8: 512, 4: 256}  # by bits; beyond: unpack the matrix once and let the library multiply
VAST = 100_000  # rows of a matrix that is never unpacked as a whole
LEAST_COLUMNS = 512  # that a program of a split product takes
SCRATCH = 2 * PROCESSORS * TOKEN_BLOCK * 128  # floats
MEETINGS = 2 * PROCESSORS  # blocks of a split product


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "split"])
def _rounded(
    x, squares, words, facts, kept, out, add, bias, norm, normed, normed_squares, partial, arrived,
    num_tokens, num_out, num_levels, width, num_tiles, num_squares, token_stride, eps, split,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr,
    SPLIT: tl.constexpr, SQUARES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * M
    block = tl.program_id(1)
    part = tl.program_id(2)
    dtype: tl.constexpr = out.dtype.element_ty
    first_row = block * N
    end_row = num_levels
    rows = first_row + tl.arange(0, N)
    scales = row_scales(facts, rows, rows < num_levels, BITS, CODES)  # nobody writes them: before the turn
    wait_for_previous()
    if M > FEW:
        launch_dependents()
    tokens = first + tl.arange(0, M)
    found = None
    if squares is not None:  # on their way while the weights are read
        which = tl.arange(0, SQUARES)[:, None]
        found = tl.load(squares + which * token_stride + tokens[None, :], mask=which < num_squares, other=0.0)
    begin = num_tiles * part // split
    end = num_tiles * (part + 1) // split
    if kept is None:
        total = _of_levels(x, words, facts, scales, first, block, begin, end, dtype, M, N, K, BITS, CODES)
    else:
        beyond = block - tl.cdiv(num_levels, N)
        if beyond < 0:
            total = _of_levels(x, words, facts, scales, first, block, begin, end, dtype, M, N, K, BITS, CODES)
        else:
            total = tl.zeros([N, M], tl.float32)
            for half in range(2 * begin, 2 * end):
                column = half * (K // 2)
                total = product(kept.load([beyond * N, column]), x.load([first, column]).T, total)
            first_row = num_levels + beyond * N
            end_row = num_out
    launch_dependents()
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
    deliver(
        total, found, first_row, end_row, tokens, num_tokens, num_out, width, eps,
        out, add, bias, norm, normed, None if norm is None else normed_squares + block * token_stride, N, M, GATED,
    )  # fmt: skip


@triton.jit
def _of_levels(
    x, words, facts, scales, first, block, begin, end,
    dtype: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """The sums over these tiles. [N, M]"""
    total = tl.zeros([N, M], tl.float32)
    for tile in range(begin, end):
        near = x.load([first, tile * K])
        far = near
        if BITS == 8:
            far = x.load([first, tile * K + K // 2])
        total = add_tile(total, words, facts, block * N, tile, near, far, dtype, K, BITS, CODES)
    return scaled(total, scales, dtype)


@triton.jit
def add_tile(
    total, words, facts, row, tile, near, far,
    dtype: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """A tile of weights, from that row on, times activations.

    near: [M, K], or in 8 bits those of the first half of the columns, and far those of the second. total: [N, M]
    """
    found = words.load([row, tile * (K * BITS // 16)])
    if BITS == 4:
        total = product(weights_of(found, facts.load([tile * 4, row]), dtype), near.T, total)
    else:
        if CODES:
            low, high = coded_weights(found, facts.load([tile, row]), dtype)
        else:
            low, high = halves(found, dtype)
        total = product(low, near.T, total)
        total = product(high, far.T, total)
    return total


@triton.jit
def row_scales(facts, rows, inside, BITS: tl.constexpr, CODES: tl.constexpr):
    """What finished sums over the levels of these rows are multiplied with; None: their tiles were. [N]"""
    scales = None
    if BITS == 8 and not CODES:
        scales = tl.load(facts + rows, mask=inside, other=0.0) * INT8_UNIT
    return scales


@triton.jit
def scaled(total, scales, dtype: tl.constexpr):
    """Finished sums over levels, as if over weights. total: [N, M]"""
    return plain(total, dtype) if scales is None else total * scales[:, None]


def tokens_of_a_block(bits: int, num_tokens: int) -> int:
    if bits == 4 and num_tokens <= LEAST_TOKENS:
        return LEAST_TOKENS
    return padded(num_tokens) or TOKEN_BLOCK


def compiled_for(num_tokens: int) -> int:
    """Products of numbers of tokens with the same one need the same kernels, whatever matrices are stored in."""
    if num_tokens <= MAX_TOKENS:
        return tokens_of_a_block(4, num_tokens)  # tells more apart than others do
    return triton.cdiv(num_tokens, TOKEN_BLOCK) * TOKEN_BLOCK if num_tokens <= max(LIBRARY_TOKENS.values()) else 0


def tiling(matrix: RoundedMatrix, num_tokens: int) -> Tiling | None:
    """How to cut a matrix, from sweeps on an H200; None: unpack it for the library."""
    if num_tokens > LIBRARY_TOKENS[matrix.bits] and matrix.num_rows < VAST:
        return None
    if matrix.bits == 4:
        return _of_4_bits(matrix, num_tokens)
    return (_of_8_bits_many if num_tokens > MAX_TOKENS else _of_8_bits)(matrix, num_tokens)


def _of_8_bits(matrix: RoundedMatrix, num_tokens: int) -> Tiling:
    few, codes = num_tokens <= FEW_TOKENS, matrix.kind == "fp8"  # whose weights take a few instructions more
    blocks = triton.cdiv(matrix.num_rows, 64)
    if few and (matrix.num_rows > VAST or PROCESSORS < blocks <= 2 * PROCESSORS):
        return Tiling(64, matrix.tile, 6, warps=2)
    if few and (codes or blocks > 2 * PROCESSORS):
        return _shared_out(Tiling(64, matrix.tile, 4, warps=2), matrix, num_tokens, 7 * PROCESSORS // 2)
    if not few and blocks > 2 * PROCESSORS:
        return Tiling(64, matrix.tile, 3)
    return _shared_out(Tiling(64, matrix.tile, 4), matrix, num_tokens, (3 if few else 2) * PROCESSORS)


def _of_8_bits_many(matrix: RoundedMatrix, num_tokens: int) -> Tiling:
    if num_tokens <= TOKEN_BLOCK:
        cut = Tiling(64, matrix.tile, 3)
    elif matrix.num_rows > 3 * 64 * PROCESSORS:
        cut = Tiling(64, matrix.tile, 2)
    else:
        cut = Tiling(128, matrix.tile, 2, warps=8)
    return _shared_out(cut, matrix, num_tokens, 2 * PROCESSORS)


def _of_4_bits(matrix: RoundedMatrix, num_tokens: int) -> Tiling:
    blocks = triton.cdiv(matrix.num_rows, 64)
    if num_tokens > MAX_TOKENS:
        cut = Tiling(128, matrix.tile, 2, warps=8)
        most = (1 if num_tokens <= TOKEN_BLOCK else 2) * PROCESSORS
    elif num_tokens > FEW_TOKENS:
        narrow = 3 * blocks <= PROCESSORS
        cut = Tiling(64, matrix.tile, 3) if narrow else Tiling(128, matrix.tile, 3, warps=8)
        most = PROCESSORS
    elif num_tokens <= LEAST_TOKENS:
        cut, most = Tiling(64, matrix.tile, 4, warps=2), 7 * PROCESSORS // 2
    elif 3 * PROCESSORS < 2 * blocks <= 4 * PROCESSORS:  # three stages leave room for four programs on a processor
        cut, most = Tiling(64, matrix.tile, 3), 4 * PROCESSORS
    else:
        cut, most = Tiling(64, matrix.tile, 4), 3 * PROCESSORS
    return _shared_out(cut, matrix, num_tokens, most)


def _shared_out(cut: Tiling, matrix: RoundedMatrix, num_tokens: int, most_programs: int) -> Tiling:
    """Split as far as there are processors, and columns enough to be worth a program."""
    programs = triton.cdiv(matrix.num_rows, cut.rows) * triton.cdiv(num_tokens, TOKEN_BLOCK)
    most = 8 if num_tokens <= FEW_TOKENS else 3
    worth = matrix.num_tiles * cut.inner // LEAST_COLUMNS
    return replace(cut, split=max(1, min(most_programs // programs, worth, most)))


def rounded_linear(
    x: Tensor | Unscaled,  # [tokens, width], contiguous
    matrix: RoundedMatrix,
    cut: Tiling,
    scratch: Scratch,
    bias: Tensor | None = None,  # [num_out]
    add: Tensor | None = None,  # [tokens, num_out], contiguous
) -> Tensor:
    out = values_of(x).new_empty(x.shape[0], matrix.num_rows)
    _launch(x, matrix, cut, scratch, out, add, bias)
    return out


def rounded_gated(x: Tensor | Unscaled, matrix: RoundedMatrix, cut: Tiling, scratch: Scratch) -> Tensor:
    """silu(gate) * up, of a matrix whose rows lie as ``stripes`` says. [tokens <= MAX_TOKENS, num_out / 2]"""
    out = values_of(x).new_empty(x.shape[0], matrix.num_rows // 2)
    _launch(x, matrix, cut, scratch, out, gated=True)
    return out


def rounded_normed(
    x: Tensor, matrix: RoundedMatrix, cut: Tiling, scratch: Scratch, add: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Unscaled]:
    """The product of up to MAX_TOKENS, and the product normalised."""
    out, normed = torch.empty_like(add), unscaled_like(add, cut, eps)
    _launch(x, matrix, cut, scratch, out, add, norm=(norm, normed.values, normed.squares))
    return out, normed


def _launch(
    x: Tensor | Unscaled,
    matrix: RoundedMatrix,
    cut: Tiling,
    scratch: Scratch,
    out: Tensor,
    add: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    norm: Norm | NoNorm = NO_NORM,
) -> None:
    values, squares, eps = (x.values, x.squares, x.eps) if isinstance(x, Unscaled) else (x, None, 0.0)
    num_tokens, width = values.shape
    words, kept = matrix.words, matrix.kept
    num_kept = 0 if kept is None else kept.shape[0]
    made_for = tokens_of_a_block(matrix.bits, num_tokens)
    blocks = triton.cdiv(words.shape[0], cut.rows) + triton.cdiv(num_kept, cut.rows)
    grid = (triton.cdiv(num_tokens, made_for), blocks, cut.split)
    num_squares = 0 if squares is None else squares.shape[0]
    token_stride = padded(num_tokens)
    assert cut.inner == matrix.tile
    assert width == matrix.width
    assert values.is_contiguous()
    assert add is None or add.is_contiguous()
    assert squares is None or squares.shape[1] == token_stride
    assert kept is None or (not gated and norm is NO_NORM)
    if cut.split > 1:
        assert grid[0] * grid[1] <= scratch.arrived.numel()
        assert grid[0] * grid[1] * grid[2] * cut.rows * made_for <= scratch.partial.numel()
    _rounded[grid](
        tiles_of(values, made_for, matrix.at_once), squares,
        tiles_of(words, cut.rows, matrix.tile * matrix.bits // 16), matrix.facts(cut.rows),
        None if kept is None else tiles_of(kept, cut.rows, matrix.at_once),
        out, add, bias, *norm, scratch.partial, scratch.arrived,
        num_tokens, matrix.num_rows, words.shape[0], width, matrix.num_tiles, num_squares, token_stride, eps, cut.split,
        M=made_for, N=cut.rows, K=cut.inner, BITS=matrix.bits, CODES=matrix.kind == "fp8",
        SPLIT=cut.split > 1, SQUARES=triton.next_power_of_2(max(1, num_squares)), GATED=gated,
        num_stages=cut.stages, num_warps=cut.warps, **pdl_options(out.device),
    )  # fmt: skip


def tiles_of(matrix: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [num_rows, num_columns])
