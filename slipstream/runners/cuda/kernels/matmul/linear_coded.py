"""Products with matrices in the codes of quantised files (quant/coded.py), for up to ``TOKEN_BLOCK`` tokens a program.

As linear_quantized.py: bound by reading the weights, split-K where there are few programs; nothing is fused into them.
The result may be some columns of a wider one: matrices of different types that are applied to the same tokens.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.linear import (
    FEW,
    FEW_TOKENS,
    MAX_TOKENS,
    PROCESSORS,
    Scratch,
    TileConfig,
    padded,
)
from slipstream.runners.cuda.kernels.matmul.linear_quantized import MIN_TOKENS, VAST, tiles_of, with_split
from slipstream.runners.cuda.kernels.matmul.product import epilogue, product, store_part, sum_of_parts
from slipstream.runners.cuda.kernels.pdl import launch_dependents, pdl_options, wait_for_previous
from slipstream.runners.cuda.kernels.quant.code_layout import TILE
from slipstream.runners.cuda.kernels.quant.code_values import (
    RAW_UNIT,
    factors_of,
    pair_high,
    pair_low,
    pair_sum,
    raw_factors,
    spread,
    times_factors,
    times_pairs,
    values_of_codes,
    whole_weights,
)
from slipstream.runners.cuda.kernels.quant.coded import CodedMatrix

TOKEN_BLOCK = MAX_TOKENS
LIBRARY_TOKENS = 2 * TOKEN_BLOCK  # beyond: unpack the matrix once and let the library multiply


@triton.jit
def load_tile(
    source, row, column, stride, num_rows, num_columns, R: tl.constexpr, C: tl.constexpr, POINTERS: tl.constexpr
):  # fmt: skip
    """[R, C] of a matrix, by its descriptor, or where the GPU has no use for one by a pointer; 0 outside of it."""
    if POINTERS:
        rows = row + tl.arange(0, R)
        columns = column + tl.arange(0, C)
        inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        found = tl.load(source + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0)
    else:
        found = source.load([row, column])
    return found


@triton.jit
def add_coded_tile(
    total, step, minimum_step, words, high, scales, minimums, scale_stride, num_rows, num_tiles, row, tile, near,
    dtype: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    GROUPS: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """A tile of weights, from that row on, times activations. near: [M, K], total: [N, M], steps: [N] or None"""
    N: tl.constexpr = total.shape[0]
    W: tl.constexpr = K // 2 if BITS == 8 else K // 4
    G: tl.constexpr = GROUPS // 2 if FACTORS and not MINIMUM else GROUPS
    found = load_tile(words, row, tile * W, num_tiles * W, num_rows, num_tiles * W, N, W, POINTERS)
    more = high
    if high is not None:
        H: tl.constexpr = (BITS - 4) * (K // 16)
        more = load_tile(high, row, tile * H, num_tiles * H, num_rows, num_tiles * H, N, H, POINTERS)
    # With more tokens, and without wgmma, a product of its own for minimums costs more than to add them to each weight.
    WHOLE: tl.constexpr = (MINIMUM and POINTERS) and total.shape[1] > FEW
    # The codes as they are: it saves the instruction that makes one a value.
    RAW: tl.constexpr = ((dtype == tl.bfloat16) and (FACTORS and not TABLE)) and (
        (OFFSET == 0 and BITS < 6) and (GROUPS >= 4 and not WHOLE)
    )
    values = values_of_codes(found, more, dtype, BITS, OFFSET, TABLE, RAW)
    scale = load_tile(scales, tile * G, row, scale_stride, num_tiles * G, num_rows, G, N, POINTERS).T
    if FACTORS:
        factors, minimum_factors = factors_of(scale, dtype, FACTORS, MINIMUM)
        if WHOLE:
            by_group = factors.to(tl.float32) * step[:, None]
            low = minimum_factors.to(tl.float32) * minimum_step[:, None]
            total = product(whole_weights(values, by_group, low, dtype), near.T, total)
        else:
            if RAW:
                factors = raw_factors(factors, BITS)
                step = step * RAW_UNIT
            sums = product(times_factors(values, factors, dtype), near.T, tl.zeros_like(total))
            total += sums * step[:, None]
            if MINIMUM:
                sums = product(spread(minimum_factors, K), near.T, tl.zeros_like(total))
                total += sums * minimum_step[:, None]
    elif MINIMUM:
        lows = load_tile(minimums, tile * G, row, scale_stride, num_tiles * G, num_rows, G, N, POINTERS).T
        if WHOLE:
            total = product(whole_weights(values, pair_sum(scale), pair_sum(lows), dtype), near.T, total)
        else:
            total = product(times_pairs(values, scale, dtype), near.T, total)
            total = product(spread(pair_high(lows).to(dtype), K), near.T, total)
            total = product(spread(pair_low(lows).to(dtype), K), near.T, total)
    else:
        total = product(times_pairs(values, scale, dtype), near.T, total)
    return total


@triton.jit
def load_step(steps, stride, rows, inside, tile, end, MINIMUM: tl.constexpr, WHICH: tl.constexpr):
    """Of a tile's scales (0) or minimums (1): [N]; None without them.

    It feeds no product, so the compiler does not fetch it ahead: a loop asks for the one of its next tile.
    """
    step = None
    if steps is not None and WHICH <= MINIMUM:
        known = tl.minimum(tile, end - 1)  # after the last one nothing is used
        at = steps + (known * (1 + MINIMUM) + WHICH).to(tl.int64) * stride + rows
        step = tl.load(at, mask=inside, other=0.0)
    return step


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "split"])
def _coded(
    x, words, high, scales, minimums, steps, out, add, bias, partial, arrived,
    num_tokens, num_rows, width, row_stride, scale_stride, num_tiles, split,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    TABLE: tl.constexpr, GROUPS: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr,
    POINTERS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * M
    block = tl.program_id(1)
    part = tl.program_id(2)
    dtype: tl.constexpr = out.dtype.element_ty
    row = block * N
    rows = row + tl.arange(0, N)
    inside = rows < num_rows
    begin = num_tiles * part // split
    end = num_tiles * (part + 1) // split
    step = load_step(steps, scale_stride, rows, inside, begin, end, MINIMUM, 0)  # constant: may be read before the wait
    minimum_step = load_step(steps, scale_stride, rows, inside, begin, end, MINIMUM, 1)
    wait_for_previous()
    if M > FEW:
        launch_dependents()
    total = tl.zeros([N, M], tl.float32)
    for tile in range(begin, end):
        near = load_tile(x, first, tile * K, width, num_tokens, width, M, K, POINTERS)
        next_step = load_step(steps, scale_stride, rows, inside, tile + 1, end, MINIMUM, 0)
        next_minimum_step = load_step(steps, scale_stride, rows, inside, tile + 1, end, MINIMUM, 1)
        total = add_coded_tile(
            total, step, minimum_step, words, high, scales, minimums, scale_stride, num_rows, num_tiles, row, tile,
            near, dtype, K, BITS, OFFSET, TABLE, GROUPS, FACTORS, MINIMUM, POINTERS,
        )  # fmt: skip
        if FACTORS:
            step = next_step
            if MINIMUM:
                minimum_step = next_minimum_step
    launch_dependents()
    if SPLIT:
        counter = tl.program_id(0) * tl.num_programs(1) + block
        if not store_part(total, partial, arrived, counter, part, split, N, M):
            return
        total = sum_of_parts(partial, arrived, counter, split, N, M)
    tokens = first + tl.arange(0, M)
    epilogue(
        total, None, row, num_rows, tokens, num_tokens, row_stride, 0, 0.0, out, add, bias, None, None, None,
        N, M, False,
    )  # fmt: skip


def coded_linear(
    x: Tensor,  # [tokens, width], contiguous
    matrix: CodedMatrix,
    config: TileConfig,
    scratch: Scratch,
    out: Tensor,  # [tokens, rows], the columns of a row neighbours
    add: Tensor | None = None,  # as ``out``, with the same strides
    bias: Tensor | None = None,  # [rows]
) -> None:
    num_tokens, width = x.shape
    block_tokens = tokens_of_a_block(num_tokens)
    grid = (triton.cdiv(num_tokens, block_tokens), triton.cdiv(matrix.num_rows, config.rows), config.split)
    assert width == matrix.width
    assert x.is_contiguous()
    assert out.stride(1) == 1
    assert add is None or add.stride() == out.stride()
    if config.split > 1:
        assert grid[0] * grid[1] <= scratch.arrived.numel()
        assert grid[0] * grid[1] * grid[2] * config.rows * block_tokens <= scratch.partial.numel()
    pointers = not gpu(out.device).multiplies_from_shared
    _coded[grid](
        x if pointers else tiles_of(x, block_tokens, TILE), *code_tiles(matrix, config.rows, pointers),
        out, add, bias, scratch.partial, scratch.arrived,
        num_tokens, matrix.num_rows, width, out.stride(0), matrix.scales.stride(0), matrix.num_tiles, config.split,
        M=block_tokens, N=config.rows, K=TILE, SPLIT=config.split > 1, **matrix.constants, POINTERS=pointers,
        num_stages=config.stages, num_warps=config.warps, **pdl_options(out.device),
    )  # fmt: skip


CodeTiles = tuple[Any, Any, Any, Any, Tensor | None]


def code_tiles(matrix: CodedMatrix, num_rows: int, pointers: bool) -> CodeTiles:
    """Words, high bits, scales, minimums and steps as kernels take them, with ``num_rows`` rows a program."""
    assert num_rows >= 64, "a tile of scales must be 128 bytes or more"
    layout = matrix.layout
    if pointers:
        return matrix.words, matrix.high, matrix.scales, matrix.minimums, matrix.steps
    return (
        tiles_of(matrix.words, num_rows, layout.words),
        None if matrix.high is None else tiles_of(matrix.high, num_rows, layout.high_words),
        tiles_of(matrix.scales, layout.scale_rows, num_rows),
        None if matrix.minimums is None else tiles_of(matrix.minimums, layout.groups, num_rows),
        matrix.steps,
    )


def tokens_of_a_block(num_tokens: int) -> int:
    return MIN_TOKENS if num_tokens <= MIN_TOKENS else padded(num_tokens) or TOKEN_BLOCK


def tile_config(matrix: CodedMatrix, num_tokens: int) -> TileConfig | None:
    """Tiles of a product with this matrix; None: unpack it for the library.

    Source: those of 4 bits in linear_quantized.py, not measured for these.
    """
    if num_tokens > LIBRARY_TOKENS and matrix.num_rows < VAST:
        return None
    blocks = triton.cdiv(matrix.num_rows, 64)
    if num_tokens > FEW_TOKENS:
        short = not gpu(matrix.words.device).multiplies_from_shared  # of registers
        narrow = 3 * blocks <= PROCESSORS or short
        config = TileConfig(64, TILE, 2 if short else 3) if narrow else TileConfig(128, TILE, 3, warps=8)
        limit = PROCESSORS
    elif num_tokens <= MIN_TOKENS:
        config, limit = TileConfig(64, TILE, 4, warps=2), 7 * PROCESSORS // 2
    else:
        config, limit = TileConfig(64, TILE, 4 if matrix.layout.bits < 8 else 3), 3 * PROCESSORS
    return with_split(config, matrix, num_tokens, limit, TOKEN_BLOCK)
