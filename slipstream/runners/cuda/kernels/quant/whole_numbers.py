"""Activations as whole numbers of 15 bits, for products on the integer tensor cores (matmul/linear_whole.py).

Every 256 columns of a token have a unit, a power of two, so that a bfloat16 is not rounded at all unless it is less
than a 64th of the largest one among them; then by half a unit, 2^-14 of that one. A number is 256 * high + low, signed
bytes. Infinite values, and those that are no numbers, make the unit no number, and so the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options
from slipstream.runners.cuda.kernels.quant.code_layout import TILE

SUMMED = 16  # columns whose sum is kept: the smallest group of weights with a scale


@dataclass(frozen=True, slots=True)
class WholeNumbers:
    """A tile's columns are in the order in which a warp takes them: [2 parts, 4 places, 4 lanes, 8 columns], part u and
    place n having columns 64 n + 32 u to 64 n + 32 u + 31."""

    numbers: Tensor  # int8 [tokens, tiles, parts, places, 2, lanes, 8]: high bytes, then low bytes
    units: Tensor  # float32 [tokens, tiles]
    sums: Tensor  # int32 [tokens, tiles, parts, places, 2]: of SUMMED columns

    @property
    def num_tokens(self) -> int:
        return self.units.shape[0]


@triton.jit
def _whole_numbers(x, numbers, units, sums, width, token_stride, K: tl.constexpr):
    launch_dependents_and_wait()
    token = tl.program_id(0)
    tile = tl.program_id(1)
    row = token * tl.num_programs(1) + tile
    at = tl.arange(0, K)  # in the order of the result
    piece = at // 32  # 4 * part + place
    column = tile * K + (piece % 4 * 2 + piece // 4) * 32 + at % 32
    found = tl.load(x + token.to(tl.int64) * token_stride + column, mask=column < width, other=0.0).to(tl.float32)
    largest = tl.max(found.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)  # of positive numbers the bits are in order
    exponent = tl.maximum(largest >> 23, 14)
    unit = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    over_unit = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    is_finite = exponent < 255
    whole = tl.floor(tl.where(is_finite, found * over_unit, 0.0) + 0.5).to(tl.int32)
    high = (whole + 128) >> 8
    target = numbers + row.to(tl.int64) * (2 * K) + piece * 64 + at % 32
    tl.store(target, high.to(tl.int8))
    tl.store(target + 32, (whole - (high << 8)).to(tl.int8))
    tl.store(units + row, tl.where(is_finite, unit, float("nan")))
    summed = tl.sum(whole.reshape([K // 16, 16]), axis=1)
    tl.store(sums + row * (K // 16) + tl.arange(0, K // 16), summed)


def whole_numbers(x: Tensor) -> WholeNumbers:
    """x: [tokens, columns], the columns of a token neighbours"""
    num_tokens, width = x.shape
    assert x.stride(1) == 1
    tiles = triton.cdiv(width, TILE)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    made = WholeNumbers(
        empty(num_tokens, tiles, 2 * TILE, dtype=torch.int8),
        empty(num_tokens, tiles, dtype=torch.float32),
        empty(num_tokens, tiles, TILE // SUMMED, dtype=torch.int32),
    )
    _whole_numbers[(num_tokens, tiles)](
        x, made.numbers, made.units, made.sums, width, x.stride(0), K=TILE, num_warps=1, **pdl_options(x.device)
    )
    return made
