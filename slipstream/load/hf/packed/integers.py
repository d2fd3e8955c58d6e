"""Matrices of whole numbers: AWQ, GPTQ and AutoRound, compressed-tensors' pack-quantized and int-quantized.

All words are int32; the first of the numbers in a word has its low bits.

    compressed-tensors  weight_packed [out, in / 8], numbers along the input; zero points packed along the output
    GPTQ, AutoRound     qweight [in / 8, out], numbers along the input; qzeros along the output, stored less one in v1
    AWQ                 qweight [in, out / 8], numbers along the output in the order 0 2 4 6 1 3 5 7; qzeros alike
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from slipstream.load.hf.packed.family import FLOATS, Family
from slipstream.load.hf.packed.groups import TILE, Groups, groups_of, sorted_columns, transposed, with_columns
from slipstream.load.tensor import RawTensor

AWQ_LOW, AWQ_HIGH = (0, 4, 1, 5), (2, 6, 3, 7)  # outputs in the low and the high half of each byte of a word
ZERO = {4: 8, 8: 128}  # the code of weight 0 where there are no zero points, by bits
TYPE = {4: "INT4", 8: "INT8"}
CODES_IN_WORD = {4: 8, 8: 4}


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix as the headers describe it."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], RawTensor]
    order: Callable[[], np.ndarray | None] = lambda: None  # of its columns, as in RawTensor; headers do not show it


def pack_quantized(family: Family) -> Stored:
    """compressed-tensors. Its words are the bytes of our own types already: nothing is copied."""
    *stack, rows, words = family.matrix("weight_packed", ("I32",))
    columns, bits = _columns(family, words)
    *_, count = family.matrix("weight_scale", FLOATS)
    family.check("weight_scale", FLOATS, (*stack, rows, count))
    groups = groups_of(family, columns, count)
    has_zero = "weight_zero_point" in family
    if has_zero:
        _check_four_bits(family, bits)
        words_of_rows = (*stack, -(-rows // 8), count)
        family.check("weight_zero_point", ("I32", "I8"), words_of_rows, (*stack, rows, count))
    dtype, shape = _type(bits, groups, has_zero), (*stack, rows, columns)
    find_order = partial(sorted_columns, family, "weight_g_idx", columns, count)

    def read() -> RawTensor:
        data, order = family.array("weight_packed").view(np.uint8), find_order()
        if order is not None:
            data = with_columns(data.reshape(-1, data.shape[-1]), order, bits).reshape(data.shape)
        if bits == 8:
            data = (data ^ 0x80).view(np.int8)
        zero = groups.spread(_zeros_along_rows(family, rows)) if has_zero else None
        return RawTensor(family.name, dtype, shape, data, groups.spread(family.floats("weight_scale")), zero, order)

    return Stored(dtype, shape, read, find_order)


def _columns(family: Family, words: int) -> tuple[int, int]:
    """The columns of the matrix, and the bits of a code."""
    if "weight_shape" not in family:
        return words * 8, 4
    shape = family.entry("weight_shape").shape
    if len(shape) != 1 or shape[0] not in (2, 3):
        family.check("weight_shape", ("I64", "I32"), (2,))
    family.check("weight_shape", ("I64", "I32"), shape)
    columns = int(family.array("weight_shape")[-1])
    for bits, in_word in CODES_IN_WORD.items():
        if columns == words * in_word:
            return columns, bits
    raise family.unreadable(f"has {columns} columns in {words} words a row, neither 4 nor 8 bits each in whole words")


def _zeros_along_rows(family: Family, rows: int) -> np.ndarray:
    """uint8 [..., rows, groups]"""
    zeros = family.array("weight_zero_point")
    if zeros.dtype == np.int8:  # signed, a number each
        return (zeros + 8).astype(np.uint8)
    each = _nibbles(zeros)  # [..., words, groups, 8]
    each = np.moveaxis(each, -1, -2)
    return each.reshape(*zeros.shape[:-2], -1, zeros.shape[-1])[..., :rows, :]


def gptq_or_awq(family: Family) -> Stored:
    """Which one is seen from the shapes: one packs the input, the other the output."""
    num_in, num_out = family.matrix("qweight", ("I32",))[-2:]
    count, out = family.matrix("scales", FLOATS)[-2:]
    if len(family.entry("qweight").shape) > 2:
        raise family.unreadable("is a stack of experts in GPTQ's or AWQ's layout")
    family.check("scales", FLOATS, (count, out))
    if num_out == out:
        return _gptq(family, num_in, out, count)
    if num_out * 8 == out:
        return _awq(family, num_in, out, count)
    raise family.unreadable(
        f"has a qweight of {[num_in, num_out]} and scales of {[count, out]}, not GPTQ's or AWQ's (gemm)"
    )


def _gptq(family: Family, words: int, rows: int, count: int) -> Stored:
    bits = _gptq_bits(family, rows, count)
    columns = words * CODES_IN_WORD[bits]
    groups, has_zero = groups_of(family, columns, count), "qzeros" in family and not _is_symmetric(family, bits)
    if has_zero:
        _check_four_bits(family, bits)
    dtype = _type(bits, groups, has_zero)
    find_order = partial(sorted_columns, family, "g_idx", columns, count)

    def read() -> RawTensor:
        data, order = transposed(family.array("qweight")).view(np.uint8), find_order()
        if order is not None:
            data = with_columns(data, order, bits)
        if bits == 8:
            data = (data ^ 0x80).view(np.int8)
        zero = None
        if has_zero:
            stored = _nibbles(family.array("qzeros")).reshape(count, rows)
            stored = stored if family.hints.zeros_as_they_are else stored + 1 & 15
            zero = groups.spread(stored.T)
        scale = groups.spread(family.floats("scales").T)
        return RawTensor(family.name, dtype, (rows, columns), data, scale, zero, order)

    return Stored(dtype, (rows, columns), read, find_order)


def _gptq_bits(family: Family, rows: int, count: int) -> int:
    """Of a code: as many as of a zero point."""
    if "qzeros" not in family:
        return 4
    shape = family.entry("qzeros").shape
    bits = next((bits for bits in range(2, 9) if shape == (count, rows * bits // 32)), 4)
    if bits not in CODES_IN_WORD:
        raise family.unreadable(f"has {bits}-bit codes")
    family.check("qzeros", ("I32",), (count, rows * bits // 32))
    return bits


def _is_symmetric(family: Family, bits: int) -> bool:
    """All zero points are the middle. Files without any still have the tensor, filled with one word."""
    zeros = family.array("qzeros").view(np.uint8)
    first = int(zeros.flat[0])
    if not (zeros == first).all():
        return False
    middle = {4: 0x88, 8: 0x80}[bits]
    less_one = {4: 0x77, 8: 0x7F}[bits]
    if family.hints.symmetric is False:
        return first == (middle if family.hints.zeros_as_they_are else less_one)
    return first in (middle, less_one)


def _awq(family: Family, columns: int, rows: int, count: int) -> Stored:
    groups = groups_of(family, columns, count)
    has_zero = "qzeros" in family
    if has_zero:
        family.check("qzeros", ("I32",), (count, rows // 8))
        has_zero = not (family.array("qzeros").view(np.uint8) == 0x88).all()
    dtype = _type(4, groups, has_zero)

    def read() -> RawTensor:
        data = _transposed_awq(family.array("qweight"))
        zero = None
        if has_zero:
            words = family.array("qzeros").view(np.uint8).reshape(count, -1, 4)
            each = np.empty((count, rows // 8, 8), np.uint8)
            each[:, :, AWQ_LOW], each[:, :, AWQ_HIGH] = words & 15, words >> 4
            zero = groups.spread(each.reshape(count, rows).T)
        scale = groups.spread(family.floats("scales").T)
        return RawTensor(family.name, dtype, (rows, columns), data, scale, zero)

    return Stored(dtype, (rows, columns), read)


def _transposed_awq(words: np.ndarray) -> np.ndarray:
    """int32 [in, out / 8] -> uint8 [out, in / 2]"""
    columns, num_words = words.shape
    each = words.view(np.uint8).reshape(columns // 2, 2, num_words * 4)
    made = np.empty((num_words, 8, columns // 2), np.uint8)
    for start in range(0, columns // 2, TILE):  # few rows: they stay in a cache
        even, odd = each[start : start + TILE, 0], each[start : start + TILE, 1]
        low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
        made[:, AWQ_LOW, start : start + TILE] = transposed(low).reshape(num_words, 4, -1)
        made[:, AWQ_HIGH, start : start + TILE] = transposed(high).reshape(num_words, 4, -1)
    return made.reshape(num_words * 8, columns // 2)


def int_quantized(family: Family) -> Stored:
    """A byte each, a scale for each row or one in all."""
    *stack, rows, columns = family.matrix("weight", ("I8",))
    if "SCB" in family:
        raise family.unreadable("is stored by bitsandbytes")
    entry = family.entry("weight_scale")
    by_row = (*stack, rows, 1), (*stack, rows)
    family.check("weight_scale", FLOATS, *by_row, (1,), (), (1, 1))
    groups = groups_of(family, columns, 1)
    if "weight_zero_point" in family and family.array("weight_zero_point").any():
        raise family.unreadable("has 8-bit codes with zero points")
    dtype, shape = _type(8, groups, False), (*stack, rows, columns)

    def read() -> RawTensor:
        scale = family.floats("weight_scale")
        scale = scale.reshape(*stack, rows, 1) if entry.shape in by_row else np.full((*stack, rows, 1), scale.ravel())
        return RawTensor(family.name, dtype, shape, family.array("weight"), groups.spread(scale))

    return Stored(dtype, shape, read)


def _check_four_bits(family: Family, bits: int) -> None:
    if bits != 4:
        raise family.unreadable(f"has {bits}-bit codes with zero points")


def _type(bits: int, groups: Groups, has_zero: bool) -> str:
    return f"{TYPE[bits]}_{groups.size}{'_ZERO' if has_zero else ''}"


def _nibbles(words: np.ndarray) -> np.ndarray:
    """Of each word, the low one first. int32 [...] -> uint8 [..., 8]"""
    data = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    each: np.ndarray = np.stack((data & 15, data >> 4), axis=-1)
    return each.reshape(*words.shape, 8)
