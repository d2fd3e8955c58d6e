"""Products of the FP8 tensor cores: matrices in FP8 (layout ``BYTES``) times activations rounded to FP8 on the fly.

As linear_quantized.py, fused operations included, but nothing is unpacked: both operands go from shared memory into the
tensor cores. Each ``TILE`` columns are summed from zero there, where sums keep few bits, and added in float32 times
both scales. Rows that a checkpoint keeps in more bits are multiplied with the activations as they were.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.linear import (
    FEW_TOKENS,
    MAX_TOKENS,
    NO_NORM,
    PROCESSORS,
    NoNorm,
    Norm,
    Scratch,
    TileConfig,
    Unscaled,
    padded,
)
from slipstream.runners.cuda.kernels.matmul.linear_quantized import (
    LIBRARY_TOKENS,
    MIN_COLUMNS,
    SCRATCH_FLOATS,
    TOKEN_BLOCK,
    operands_of,
    quantized_gated,
    quantized_linear,
    quantized_normed,
    row_blocks,
    tiles_of,
)
from slipstream.runners.cuda.kernels.matmul.product import epilogue, product, store_part, sum_of_parts
from slipstream.runners.cuda.kernels.pdl import launch_dependents, pdl_options, wait_for_previous
from slipstream.runners.cuda.kernels.quant.activations import quantized_activations
from slipstream.runners.cuda.kernels.quant.fp8 import FACTOR_BITS, TILE, Fp8Matrix

_UNIT = tl.constexpr(2.0**-FACTOR_BITS)


@triton.jit
def factors_of(factors, tile, tile_stride, rows, inside):
    """The scales of these rows in a tile. float32 [N]"""
    found = tl.load(factors + tile * tile_stride + rows, mask=inside, other=0.0)
    return found.to(tl.float32) * _UNIT


@triton.jit
def promoted(total, sums, row_factors, token_scales):
    """A tile's sums out of the tensor cores, added in float32. [N, M]"""
    return total + sums * token_scales[None, :] * row_factors[:, None]


@triton.jit
def matrix_tile(source, row, column, width, num_rows, R: tl.constexpr, C: tl.constexpr, POINTERS: tl.constexpr):
    """[R, C] of a matrix of whole tiles, by its descriptor or by a pointer; 0 beyond its rows."""
    if POINTERS:
        rows = row + tl.arange(0, R)
        where = rows.to(tl.int64)[:, None] * width + (column + tl.arange(0, C))[None, :]
        found = tl.load(source + where, mask=(rows < num_rows)[:, None], other=0.0)
    else:
        found = source.load([row, column])
    return found


@triton.jit
def _sums(
    codes, scales, weights, factors, first, first_row, num_tokens, end_row, width, begin, end, scale_stride,
    factor_stride, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, POINTERS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The sums over these tiles. [N, M]; with BLOCKS [M, N]"""
    tokens = first + tl.arange(0, M)
    rows = first_row + tl.arange(0, N)
    inside = rows < end_row
    total = tl.zeros([M, N] if BLOCKS else [N, M], tl.float32)
    # Scales feed no product, so Triton does not fetch them ahead: they are read a tile early.
    token_scales = tl.load(scales + begin * scale_stride + tokens)
    row_factors = factors_in(factors, begin, factor_stride, first_row, rows, inside, BLOCKS)
    for tile in range(begin, end):
        following = tl.minimum(tile + 1, end - 1)
        next_scales = tl.load(scales + following * scale_stride + tokens)
        next_factors = factors_in(factors, following, factor_stride, first_row, rows, inside, BLOCKS)
        column = tile * K
        a = matrix_tile(weights, first_row, column, width, end_row, N, K, POINTERS)
        b = matrix_tile(codes, first, column, width, num_tokens, M, K, POINTERS)
        if BLOCKS:
            spread = tl.where(rows & 8 == 0, row_factors[0], row_factors[1])
            sums = product(b, a.T, tl.zeros([M, N], tl.float32))
            total += sums * (token_scales[:, None] * spread[None, :])
        else:
            total = promoted(total, product(a, b.T, tl.zeros([N, M], tl.float32)), row_factors, token_scales)
        token_scales = next_scales
        row_factors = next_factors
    return total


@triton.jit
def factors_in(factors, tile, tile_stride, first_row, rows, inside, BLOCKS: tl.constexpr):
    """The scales of these rows in a tile. float32 [N]; with BLOCKS two: of 8 rows, and of the next 8"""
    if BLOCKS:
        start = factors + tile * tile_stride + first_row
        found = (tl.load(start).to(tl.float32) * _UNIT, tl.load(start + 8).to(tl.float32) * _UNIT)
    else:
        found = factors_of(factors, tile, tile_stride, rows, inside)
    return found


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "split"])
def _fp8(
    x, codes, scales, squares, weights, factors, kept, out, add, bias, norm, normed, normed_squares, partial, arrived,
    num_tokens, num_out, num_coded, width, num_tiles, num_squares, token_stride, scale_stride, factor_stride, eps,
    split, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    SPLIT: tl.constexpr, SQUARES: tl.constexpr, GATED: tl.constexpr, POINTERS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """N rows times M tokens."""
    first = tl.program_id(0) * M
    block = tl.program_id(1)
    part = tl.program_id(2)
    first_row = block * N
    end_row = num_coded
    wait_for_previous()
    launch_dependents()
    tokens = first + tl.arange(0, M)
    found = None
    if squares is not None:
        which = tl.arange(0, SQUARES)[:, None]
        found = tl.load(squares + which * token_stride + tokens[None, :], mask=which < num_squares, other=0.0)
    begin = num_tiles * part // split
    end = num_tiles * (part + 1) // split
    beyond = block - tl.cdiv(num_coded, N)
    if kept is None or beyond < 0:
        total = _sums(
            codes, scales, weights, factors, first, first_row, num_tokens, num_coded, width, begin, end, scale_stride,
            factor_stride, M, N, K, POINTERS, BLOCKS,
        )  # fmt: skip
        if BLOCKS:
            total = total.T
    else:
        total = tl.zeros([N, M], tl.float32)
        for half in range(2 * begin, 2 * end):
            column = half * (K // 2)
            a = matrix_tile(kept, beyond * N, column, width, num_out - num_coded, N, K // 2, POINTERS)
            b = matrix_tile(x, first, column, width, num_tokens, M, K // 2, POINTERS)
            total = product(a, b.T, total)
        first_row = num_coded + beyond * N
        end_row = num_out
    counter = tl.program_id(0) * tl.num_programs(1) + block
    if SPLIT:
        if not store_part(total, partial, arrived, counter, part, split, N, M):
            return
        total = sum_of_parts(partial, arrived, counter, split, N, M)
    epilogue(
        total, found, first_row, end_row, tokens, num_tokens, num_out, width, eps,
        out, add, bias, norm, normed, None if norm is None else normed_squares + block * token_stride, N, M, GATED,
    )  # fmt: skip


class Tiles(NamedTuple):
    """Of a program, for up to so many tokens."""

    max_tokens: int
    block_tokens: int  # at most
    rows: int
    stages: int
    warps: int
    max_split: int


# Measured on an H200 (log 241), but for those of up to FEW_TOKENS. The last of each is for all sizes beyond
# LIBRARY_TOKENS, too, which are served by the same compiled kernels.
IN_BLOCKS = (
    Tiles(FEW_TOKENS, FEW_TOKENS, 64, 6, 4, 8),
    Tiles(MAX_TOKENS, MAX_TOKENS, 128, 3, 4, 6),
    Tiles(LIBRARY_TOKENS[8], 64, 128, 3, 4, 2),
    Tiles(1 << 30, 64, 128, 3, 4, 1),
)
ANY_SCALES = (
    Tiles(FEW_TOKENS, FEW_TOKENS, 64, 6, 4, 8),
    Tiles(MAX_TOKENS, MAX_TOKENS, 64, 4, 4, 3),
    Tiles(256, 128, 64, 3, 4, 2),
    Tiles(LIBRARY_TOKENS[8], 128, 128, 3, 8, 3),
    Tiles(1 << 30, 128, 128, 3, 8, 1),
)


def multiplies_in_blocks(matrix: Fp8Matrix) -> bool:
    return matrix.in_blocks and gpu(matrix.words.device).multiplies_from_shared


def tiles_for(matrix: Fp8Matrix, num_tokens: int) -> Tiles:
    table = IN_BLOCKS if multiplies_in_blocks(matrix) else ANY_SCALES
    return next(tiles for tiles in table if num_tokens <= tiles.max_tokens)


def fp8_tile_config(matrix: Fp8Matrix, num_tokens: int) -> TileConfig:
    tiles = tiles_for(matrix, num_tokens)
    block = tokens_of_a_block(matrix, num_tokens)
    # Of sizes that need the same compiled kernels (``compiled_for``) all products are split, or none.
    most = num_tokens if num_tokens <= MAX_TOKENS else triton.cdiv(num_tokens, TOKEN_BLOCK) * TOKEN_BLOCK
    programs = row_blocks(matrix, tiles.rows) * triton.cdiv(most, block)
    split = max(1, min(2 * PROCESSORS // programs, matrix.width // MIN_COLUMNS, tiles.max_split))
    while split > 1 and programs * split * tiles.rows * block > SCRATCH_FLOATS:
        split -= 1
    return TileConfig(tiles.rows, TILE, tiles.stages, split, tiles.warps)


def tokens_of_a_block(matrix: Fp8Matrix, num_tokens: int) -> int:
    return padded(num_tokens) or tiles_for(matrix, num_tokens).block_tokens


def launch_fp8(
    x: Tensor | Unscaled,
    matrix: Fp8Matrix,
    config: TileConfig,
    scratch: Scratch,
    out: Tensor,
    add: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    norm: Norm | NoNorm = NO_NORM,
    block_tokens: int = 0,  # of a program; 0: as many as usual
) -> None:
    block_tokens = block_tokens or tokens_of_a_block(matrix, x.shape[0])
    # Tensor cores take 64 rows or more of their left operand: that is the tokens, where scales are those of blocks.
    in_blocks = multiplies_in_blocks(matrix) and block_tokens >= 64 and config.rows <= TILE
    fused = gated or norm is not NO_NORM
    given = operands_of(x, matrix, config, scratch, add, block_tokens, fused=fused)
    (num_tokens, width), codes, kept = given.values.shape, matrix.codes, matrix.kept
    rounded, pointers = quantized_activations(given.values), not gpu(out.device).multiplies_from_shared

    def tiles(source: Tensor, num_rows: int, num_columns: int) -> Tensor | TensorDescriptor:
        return source if pointers else tiles_of(source, num_rows, num_columns)

    _fp8[given.grid](
        None if kept is None else tiles(given.values, block_tokens, TILE // 2),
        tiles(rounded.codes, block_tokens, TILE), rounded.scales, given.squares,
        tiles(codes, config.rows, TILE), matrix.factors,
        None if kept is None else tiles(kept, config.rows, TILE // 2),
        out, add, bias, *norm, scratch.partial, scratch.arrived,
        num_tokens, matrix.num_rows, codes.shape[0], width, matrix.num_tiles, *given.sizes,
        rounded.scales.stride(0), matrix.factors.stride(0), given.eps, config.split,
        GATED=gated, POINTERS=pointers, BLOCKS=in_blocks,
        **(given.constants(config) | {"M": block_tokens}), **pdl_options(out.device),
    )  # fmt: skip


fp8_linear = partial(quantized_linear, launch=launch_fp8)
fp8_gated = partial(quantized_gated, launch=launch_fp8)
fp8_normed = partial(quantized_normed, launch=launch_fp8)
