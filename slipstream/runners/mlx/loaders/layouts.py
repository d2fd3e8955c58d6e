"""What becomes of a quantised matrix on MLX: one of its packed layouts, where that changes no weight.

MLX's affine layouts hold a weight as scale * code + bias, with codes from 0 on in 2 to 8 bits, and a scale and a bias
for 32, 64 or 128 columns. Whole numbers fit into them, those that a table lists as well, and products of a code and
the factor of its group that are small enough. MXFP4 is a layout of its own. In float32 nothing is rounded; in 16 bits
scales and biases may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from slipstream.load.quantized.codes import E2M1, Codes, Container
from slipstream.load.quantized.types import container_of

GROUPS = (32, 64, 128)
BITS = (2, 3, 4, 5, 6, 8)
# Of codes that need fewer than their container has.
FEWER_BITS = {"Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "TQ1_0": 2, "TQ2_0": 2, "Q1_0": 2, "Q2_0": 2}
# Groups of 16 columns whose factors are so small that they go into the codes: what code 0 stands for, and each further
# one. Q3_K: products from -124 to 128, with a scale below 0 so that the bias is exact; IQ1_M: odd ones up to 135.
FOLDED = {"Q3_K": (128, -1), "IQ1_M": (-135, 2)}

Arrays = dict[str, mx.array]  # a matrix by the parts of its layer: weight, and scales and biases where it is packed


@dataclass(frozen=True, slots=True)
class Layout:
    bits: int
    group: int
    is_mxfp4: bool = False  # else affine
    least: int = 0  # what code 0 stands for where there are no minimums, in scales of the file
    unit: int = 1  # from one code to the next, in scales of the file
    shift: int = 0  # added to the file's codes
    codes: tuple[int, ...] = ()  # by the file's codes, where those choose from a table
    is_folded: bool = False  # a code is a product: of what the file's stands for, and the factor of its group

    def like(self, shape: tuple[int, ...], dtype: mx.Dtype) -> Arrays:
        """Of a matrix of that shape: the same shapes and types, never to be evaluated."""
        *rows, columns = shape
        words = mx.zeros((*rows, columns * self.bits // 32), mx.uint32)
        groups = (*rows, columns // self.group)
        if self.is_mxfp4:
            return {"weight": words, "scales": mx.zeros(groups, mx.uint8)}
        return {"weight": words, "scales": mx.zeros(groups, dtype), "biases": mx.zeros(groups, dtype)}


@cache
def layout_of(dtype: str) -> Layout | None:
    """None: MLX has none for this type."""
    container = container_of(dtype)
    if dtype in FOLDED:
        least, unit = FOLDED[dtype]
        return Layout(8, 128, least=least, unit=unit, is_folded=True)
    if container is None or container.group not in GROUPS:
        return None
    group = container.group
    if container.table == E2M1:
        return Layout(4, group, is_mxfp4=True) if group == 32 else None
    if container.table:
        return _of_table(container)
    if container.kind == "affine4":
        return Layout(FEWER_BITS.get(dtype, 4), group, least=-container.offset)
    bits = FEWER_BITS.get(dtype, 8)
    half = 0 if container.has_minimum else 1 << bits - 1
    return Layout(bits, group, least=-half, shift=half)


def _of_table(container: Container) -> Layout:
    """The fewest bits; of these a power of two as the least value, if it can be: then the bias is exact, too."""
    values = [int(value) for value in container.table if value]  # 0: a code that is never stored
    unit = math.gcd(*(value - values[0] for value in values))
    least = min(values)
    bits = next(each for each in BITS if (max(values) - least) // unit < 1 << each)
    rounder = -(1 << (-least - 1).bit_length())
    if (least - rounder) % unit == 0 and (max(values) - rounder) // unit < 1 << bits:
        least = rounder
    codes = tuple((int(value) - least) // unit if value else 0 for value in container.table)
    return Layout(bits, container.group, least=least, unit=unit, codes=codes)


def packed(codes: Codes, layout: Layout, dtype: mx.Dtype) -> Arrays:
    """``dtype``: of scales and biases."""
    numbers, scale, minimum = codes.codes.view(np.uint8), codes.scale(), codes.minimum()
    if layout.is_mxfp4:
        return {"weight": mx.array(_words(numbers, 4)), "scales": mx.array(exponents(scale))}
    if layout.is_folded:
        numbers, scale = _products(codes, layout), np.repeat(codes.step, codes.container.span // layout.group, axis=1)
    elif layout.codes:
        numbers = np.array(layout.codes, np.uint8)[numbers]
    elif layout.shift:
        numbers = numbers + np.uint8(layout.shift)  # as signed bytes they may be negative
    scales = mx.array(scale * np.float32(layout.unit)).astype(dtype)
    biases = scales.astype(mx.float32) * (layout.least / layout.unit) if minimum is None else mx.array(minimum)
    return {"weight": mx.array(_words(numbers, layout.bits)), "scales": scales, "biases": biases.astype(dtype)}


def _products(codes: Codes, layout: Layout) -> np.ndarray:
    """uint8 [rows, columns]"""
    assert codes.factor is not None
    found = codes.values()
    found *= np.repeat(codes.factor, codes.container.group, axis=1)
    found -= layout.least
    found /= layout.unit
    whole: np.ndarray = found.astype(np.uint8)
    return whole


def exponents(scale: np.ndarray) -> np.ndarray:
    """Powers of two as bytes. uint8"""
    exponent: np.ndarray = np.frexp(scale)[1] + 126
    return exponent.astype(np.uint8)


def are_powers_of_two(scale: np.ndarray) -> bool:
    mantissa, _ = np.frexp(scale)
    return bool((mantissa == 0.5).all())


def _words(values: np.ndarray, bits: int) -> np.ndarray:
    """A row's codes as a stream of bits, the lowest first. uint8 [rows, columns] -> uint32 [rows, words]"""
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    elif bits != 8:
        eight = values.reshape(len(values), -1, 8).astype(np.uint64) << np.arange(0, 8 * bits, bits, dtype=np.uint64)
        joined = np.bitwise_or.reduce(eight, axis=2)  # [rows, columns / 8]: as many bytes as a code has bits
        values = joined.astype("<u8")[..., None].view(np.uint8)[..., :bits].reshape(len(values), -1)
    words: np.ndarray = np.ascontiguousarray(values).view("<u4")
    return words
