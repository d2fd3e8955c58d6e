"""Products with matrices in 8 or 4 bits for any number of tokens, in blocks of up to ``TOKEN_BLOCK``.

As the products for few tokens in linear.py, fused operations included: bound by reading the weights, split-K where
there are few programs. Codes are unpacked between memory and the tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.linear import (
    FEW,
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
    unscaled_like,
    values_of,
)
from slipstream.runners.cuda.kernels.matmul.linear_whole import MAX_WHOLE_TOKENS, tokens_side_by_side
from slipstream.runners.cuda.kernels.matmul.product import epilogue, product, store_part, sum_of_parts
from slipstream.runners.cuda.kernels.pdl import launch_dependents, pdl_options, wait_for_previous
from slipstream.runners.cuda.kernels.quant.coded import CodedMatrix
from slipstream.runners.cuda.kernels.quant.fp8 import coded_weights
from slipstream.runners.cuda.kernels.quant.int4 import weights_of
from slipstream.runners.cuda.kernels.quant.int8 import UNIT as INT8_UNIT
from slipstream.runners.cuda.kernels.quant.int8 import halves
from slipstream.runners.cuda.kernels.quant.quantize import QuantizedMatrix, plain

TOKEN_BLOCK = 128
MIN_TOKENS = 8  # the smallest block of tokens of a product in 4 bits; in 8 bits FEW_TOKENS
LIBRARY_TOKENS = {8: 512, 4: 256}  # by bits; beyond: unpack the matrix once and let the library multiply
VAST = 65_536  # rows of a matrix that is never unpacked as a whole; as many as heads draft among
MIN_COLUMNS = 512  # of a program of a split product
SCRATCH_FLOATS = 2 * PROCESSORS * TOKEN_BLOCK * 128  # split-K partial sums
SPLIT_K_COUNTERS = 2 * PROCESSORS  # blocks of a split product


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "split"])
def _quantized(
    x, squares, words, scales, kept, out, add, bias, norm, normed, normed_squares, partial, arrived,
    num_tokens, num_out, num_coded, width, num_tiles, num_squares, token_stride, eps, split,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr,
    SPLIT: tl.constexpr, SQUARES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * M
    block = tl.program_id(1)
    part = tl.program_id(2)
    dtype: tl.constexpr = out.dtype.element_ty
    first_row = block * N
    end_row = num_coded
    rows = first_row + tl.arange(0, N)
    row_factors = row_scales(scales, rows, rows < num_coded, BITS, FP8)  # constant: may be read before the wait
    wait_for_previous()
    if M > FEW:
        launch_dependents()
    tokens = first + tl.arange(0, M)
    found = None
    if squares is not None:  # loaded while the weights are read
        which = tl.arange(0, SQUARES)[:, None]
        found = tl.load(squares + which * token_stride + tokens[None, :], mask=which < num_squares, other=0.0)
    begin = num_tiles * part // split
    end = num_tiles * (part + 1) // split
    if kept is None:
        total = _coded_sums(x, words, scales, row_factors, first, block, begin, end, dtype, M, N, K, BITS, FP8)
    else:
        beyond = block - tl.cdiv(num_coded, N)
        if beyond < 0:
            total = _coded_sums(x, words, scales, row_factors, first, block, begin, end, dtype, M, N, K, BITS, FP8)
        else:
            total = tl.zeros([N, M], tl.float32)
            for half in range(2 * begin, 2 * end):
                column = half * (K // 2)
                total = product(kept.load([beyond * N, column]), x.load([first, column]).T, total)
            first_row = num_coded + beyond * N
            end_row = num_out
    launch_dependents()
    if SPLIT:
        counter = tl.program_id(0) * tl.num_programs(1) + block
        if not store_part(total, partial, arrived, counter, part, split, N, M):
            return
        total = sum_of_parts(partial, arrived, counter, split, N, M)
    epilogue(
        total, found, first_row, end_row, tokens, num_tokens, num_out, width, eps,
        out, add, bias, norm, normed, None if norm is None else normed_squares + block * token_stride, N, M, GATED,
    )  # fmt: skip


@triton.jit
def _coded_sums(
    x, words, scales, row_factors, first, block, begin, end,
    dtype: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """The sums over these tiles. [N, M]"""
    total = tl.zeros([N, M], tl.float32)
    for tile in range(begin, end):
        near = x.load([first, tile * K])
        far = near
        if BITS == 8:
            far = x.load([first, tile * K + K // 2])
        total = add_tile(total, words, scales, block * N, tile, near, far, dtype, K, BITS, FP8)
    return scaled(total, row_factors, dtype)


@triton.jit
def add_tile(
    total, words, scales, row, tile, near, far,
    dtype: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A tile of weights, from that row on, times activations.

    near: [M, K], or in 8 bits those of the first half of the columns, and far those of the second. total: [N, M]
    """
    found = words.load([row, tile * (K * BITS // 16)])
    if BITS == 4:
        total = product(weights_of(found, scales.load([tile * 4, row]), dtype), near.T, total)
    else:
        if FP8:
            low, high = coded_weights(found, scales.load([tile, row]), dtype, FP8)
        else:
            low, high = halves(found, dtype)
        total = product(low, near.T, total)
        total = product(high, far.T, total)
    return total


@triton.jit
def row_scales(scales, rows, inside, BITS: tl.constexpr, FP8: tl.constexpr):
    """Factors of finished sums over the codes of these rows; None: each tile was scaled already. [N]"""
    factors = None
    if BITS == 8 and not FP8:
        factors = tl.load(scales + rows, mask=inside, other=0.0) * INT8_UNIT
    return factors


@triton.jit
def scaled(total, row_factors, dtype: tl.constexpr):
    """Finished sums over codes, as if over weights. total: [N, M]"""
    return plain(total, dtype) if row_factors is None else total * row_factors[:, None]


def tokens_of_a_block(bits: int, num_tokens: int) -> int:
    if bits == 4 and num_tokens <= MIN_TOKENS:
        return MIN_TOKENS
    return padded(num_tokens) or TOKEN_BLOCK


def compiled_for(num_tokens: int) -> int:
    """Sizes with the same answer need the same compiled kernels, whatever format matrices are stored in."""
    # The finest distinction of all formats.
    if num_tokens <= MAX_WHOLE_TOKENS:
        return tokens_side_by_side(num_tokens)
    if num_tokens <= MAX_TOKENS:
        return tokens_of_a_block(4, num_tokens)
    return triton.cdiv(num_tokens, TOKEN_BLOCK) * TOKEN_BLOCK if num_tokens <= max(LIBRARY_TOKENS.values()) else 0


def tile_config(matrix: QuantizedMatrix, num_tokens: int) -> TileConfig | None:
    """Tiles of a product with this matrix, from sweeps on an H200; None: unpack it for the library.

    Source: log 81, 82 and 123 (8 bits), 101 to 104 (4 bits).
    """
    if num_tokens > LIBRARY_TOKENS[matrix.bits] and matrix.num_rows < VAST:
        return None
    if num_tokens > FEW_TOKENS and not gpu(matrix.words.device).multiplies_from_shared:
        return _through_registers(matrix, num_tokens)
    if matrix.bits == 4:
        return _of_4_bits(matrix, num_tokens)
    return (_of_8_bits_many if num_tokens > MAX_TOKENS else _of_8_bits)(matrix, num_tokens)


def _through_registers(matrix: QuantizedMatrix, num_tokens: int) -> TileConfig | None:
    """Tiles with which few registers spill, as compiled for 8.6, 8.9 and 12.0; not measured."""
    if num_tokens > MAX_TOKENS and matrix.num_rows < VAST:
        return None
    return with_split(TileConfig(64, matrix.tile, 2, warps=8), matrix, num_tokens, PROCESSORS)


def _of_8_bits(matrix: QuantizedMatrix, num_tokens: int) -> TileConfig:
    few, is_fp8 = num_tokens <= FEW_TOKENS, matrix.kind == "fp8"  # its weights take a few instructions more
    blocks = triton.cdiv(matrix.num_rows, 64)
    if few and (matrix.num_rows > VAST or PROCESSORS < blocks <= 2 * PROCESSORS):
        return TileConfig(64, matrix.tile, 6, warps=2)
    if few and (is_fp8 or blocks > 2 * PROCESSORS):
        return with_split(TileConfig(64, matrix.tile, 4, warps=2), matrix, num_tokens, 7 * PROCESSORS // 2)
    if not few and blocks > 2 * PROCESSORS:
        return TileConfig(64, matrix.tile, 3)
    return with_split(TileConfig(64, matrix.tile, 4), matrix, num_tokens, (3 if few else 2) * PROCESSORS)


def _of_8_bits_many(matrix: QuantizedMatrix, num_tokens: int) -> TileConfig:
    if num_tokens <= TOKEN_BLOCK:
        config = TileConfig(64, matrix.tile, 3)
    elif matrix.num_rows > 3 * 64 * PROCESSORS:
        config = TileConfig(64, matrix.tile, 2)
    else:
        config = TileConfig(128, matrix.tile, 2, warps=8)
    return with_split(config, matrix, num_tokens, 2 * PROCESSORS)


def _of_4_bits(matrix: QuantizedMatrix, num_tokens: int) -> TileConfig:
    blocks = triton.cdiv(matrix.num_rows, 64)
    if num_tokens > MAX_TOKENS:
        config = TileConfig(128, matrix.tile, 2, warps=8)
        limit = (1 if num_tokens <= TOKEN_BLOCK else 2) * PROCESSORS
    elif num_tokens > FEW_TOKENS:
        narrow = 3 * blocks <= PROCESSORS
        config = TileConfig(64, matrix.tile, 3) if narrow else TileConfig(128, matrix.tile, 3, warps=8)
        limit = PROCESSORS
    elif num_tokens <= MIN_TOKENS:
        config, limit = TileConfig(64, matrix.tile, 4, warps=2), 7 * PROCESSORS // 2
    elif 3 * PROCESSORS < 2 * blocks <= 4 * PROCESSORS:  # three stages leave room for four programs on a processor
        config, limit = TileConfig(64, matrix.tile, 3), 4 * PROCESSORS
    else:
        config, limit = TileConfig(64, matrix.tile, 4), 3 * PROCESSORS
    return with_split(config, matrix, num_tokens, limit)


def with_split(
    config: TileConfig,
    matrix: QuantizedMatrix | CodedMatrix,
    num_tokens: int,
    max_programs: int,
    token_block: int = TOKEN_BLOCK,
) -> TileConfig:
    """Split-K as far as there are processors, and enough columns for each program."""
    programs = triton.cdiv(matrix.num_rows, config.rows) * triton.cdiv(num_tokens, token_block)
    limit = 8 if num_tokens <= FEW_TOKENS else 3
    worth = matrix.num_tiles * config.inner // MIN_COLUMNS
    return replace(config, split=max(1, min(max_programs // programs, worth, limit)))


@dataclass(frozen=True, slots=True)
class Operands:
    """What the kernels of products for any number of tokens are launched with, whatever they multiply."""

    values: Tensor
    squares: Tensor | None
    eps: float
    grid: tuple[int, int, int]
    block_tokens: int

    @property
    def num_squares(self) -> int:
        return 0 if self.squares is None else self.squares.shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """Sums of squares, and the stride between them."""
        return self.num_squares, padded(self.values.shape[0])

    def constants(self, config: TileConfig) -> dict[str, int | bool]:
        squares = triton.next_power_of_2(max(1, self.num_squares))
        sizes = {"M": self.block_tokens, "N": config.rows, "K": config.inner, "SQUARES": squares}
        return {**sizes, "SPLIT": config.split > 1, "num_stages": config.stages, "num_warps": config.warps}


def operands_of(
    x: Tensor | Unscaled,
    matrix: QuantizedMatrix,
    config: TileConfig,
    scratch: Scratch,
    add: Tensor | None,
    block_tokens: int,
    *,
    fused: bool,
) -> Operands:
    values, squares, eps = (x.values, x.squares, x.eps) if isinstance(x, Unscaled) else (x, None, 0.0)
    num_tokens, width = values.shape
    grid = (triton.cdiv(num_tokens, block_tokens), row_blocks(matrix, config.rows), config.split)
    assert config.inner == matrix.tile
    assert width == matrix.width
    assert values.is_contiguous()
    assert add is None or add.is_contiguous()
    assert squares is None or squares.shape[1] == padded(num_tokens)
    assert matrix.kept is None or not fused
    if config.split > 1:
        assert grid[0] * grid[1] <= scratch.arrived.numel()
        assert grid[0] * grid[1] * grid[2] * config.rows * block_tokens <= scratch.partial.numel()
    return Operands(values, squares, eps, grid, block_tokens)


def row_blocks(matrix: QuantizedMatrix, num_rows: int) -> int:
    """Those of rows in codes, and after them those of the rows in more bits."""
    num_kept = 0 if matrix.kept is None else matrix.kept.shape[0]
    return -(-matrix.words.shape[0] // num_rows) - (-num_kept // num_rows)


def launch_quantized(
    x: Tensor | Unscaled,
    matrix: QuantizedMatrix,
    config: TileConfig,
    scratch: Scratch,
    out: Tensor,
    add: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    norm: Norm | NoNorm = NO_NORM,
) -> None:
    block_tokens, words, kept = tokens_of_a_block(matrix.bits, x.shape[0]), matrix.words, matrix.kept
    fused = gated or norm is not NO_NORM
    given = operands_of(x, matrix, config, scratch, add, block_tokens, fused=fused)
    num_tokens, width = given.values.shape
    _quantized[given.grid](
        tiles_of(given.values, block_tokens, matrix.at_once), given.squares,
        tiles_of(words, config.rows, matrix.tile * matrix.bits // 16), matrix.kernel_scales(config.rows),
        None if kept is None else tiles_of(kept, config.rows, matrix.at_once),
        out, add, bias, *norm, scratch.partial, scratch.arrived,
        num_tokens, matrix.num_rows, words.shape[0], width, matrix.num_tiles, *given.sizes, given.eps, config.split,
        BITS=matrix.bits, FP8=matrix.fp8_layout, GATED=gated, **given.constants(config), **pdl_options(out.device),
    )  # fmt: skip


def quantized_linear(
    x: Tensor | Unscaled,  # [tokens, width], contiguous
    matrix: QuantizedMatrix,
    config: TileConfig,
    scratch: Scratch,
    bias: Tensor | None = None,  # [num_out]
    add: Tensor | None = None,  # [tokens, num_out], contiguous
    launch: Callable[..., None] = launch_quantized,
) -> Tensor:
    out = values_of(x).new_empty(x.shape[0], matrix.num_rows)
    launch(x, matrix, config, scratch, out, add, bias)
    return out


def quantized_gated(
    x: Tensor | Unscaled,
    matrix: QuantizedMatrix,
    config: TileConfig,
    scratch: Scratch,
    launch: Callable[..., None] = launch_quantized,
) -> Tensor:
    """silu(gate) * up, of a matrix whose rows lie as ``interleaved_rows`` says. [tokens <= MAX_TOKENS, num_out / 2]"""
    out = values_of(x).new_empty(x.shape[0], matrix.num_rows // 2)
    launch(x, matrix, config, scratch, out, gated=True)
    return out


def quantized_normed(
    x: Tensor,
    matrix: QuantizedMatrix,
    config: TileConfig,
    scratch: Scratch,
    add: Tensor,
    norm: Tensor,
    eps: float,
    launch: Callable[..., None] = launch_quantized,
) -> tuple[Tensor, Unscaled]:
    """The product of up to MAX_TOKENS, and the product normalised."""
    out, normed = torch.empty_like(add), unscaled_like(add, config, eps)
    launch(x, matrix, config, scratch, out, add, norm=(norm, normed.values, normed.squares))
    return out, normed


def tiles_of(matrix: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [num_rows, num_columns])
