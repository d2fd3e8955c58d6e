"""GGUF's types of 1 to 3 bits: blocks of 256 columns, whose weights come by 8 or 4 from a list of patterns.

The lists are the gguf package's. A pattern is a whole number here, a code in each of its bytes: so looking one up and
giving it signs are two operations for all its weights.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from gguf import quants

from slipstream.load.quantized.bits import by_rows, halves, nibbles, words
from slipstream.load.quantized.codes import Codes, Container

SPAN = 256
MINUS = 8  # added to the code of a magnitude
NO_VALUE = (0.0,)


def _signed(magnitudes: tuple[int, ...]) -> tuple[float, ...]:
    """A table with the magnitudes from 0 on, and their negatives from MINUS on."""
    plus = [float(each) for each in magnitudes] + [0.0] * (MINUS - len(magnitudes))
    return (*plus, *(-each for each in plus))


# IQ1: -1, 0 or 1, and an eighth more or less, in eighths.
DELTAS = (-7.0, 1.0, 9.0, -9.0, -1.0, 7.0)
LESS = 3  # added to the code of one that is an eighth less

IQ1_S = Container("table4", 32, SPAN, table=DELTAS + NO_VALUE * 10)
IQ1_M = Container("table4", 16, SPAN, table=DELTAS + NO_VALUE * 10)
IQ2_XXS = Container("table4", 32, SPAN, table=_signed(quants.IQ2_XXS.grid_map))
IQ2_XS = Container("table4", 16, SPAN, table=_signed(quants.IQ2_XS.grid_map))
IQ2_S = Container("table4", 16, SPAN, table=_signed(quants.IQ2_S.grid_map))
IQ3_XXS = Container("table4", 32, SPAN, table=_signed(quants.IQ3_XXS.grid_map))
IQ3_S = Container("table4", 32, SPAN, table=_signed(quants.IQ3_S.grid_map))


@cache
def _patterns(name: str) -> np.ndarray:
    """Of a type: uint64 [patterns] of 8 codes, or uint32 of 4."""
    kind = getattr(quants, name)
    kind.init_grid()
    codes: np.ndarray = np.searchsorted(np.array(kind.grid_map), kind.grid[0, 0]).astype(np.uint8)
    return codes.view(f"<u{codes.shape[1]}")[:, 0]


def _spread(bits: np.ndarray, code: int) -> np.ndarray:
    """That code in each byte whose bit is set. uint8 [n] -> uint64 [n]"""
    each = np.unpackbits(bits[:, None], axis=1, bitorder="little") * np.uint8(code)
    return each.view("<u8")[:, 0]


_SIGNS = _spread(np.arange(256, dtype=np.uint8), MINUS)  # by 8 bits, one a weight
_EVEN_SIGNS = _SIGNS[np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)]  # by the first 7: the eighth makes them even
_ALL_LESS = _spread(np.array([255], np.uint8), LESS)[0]
_SEVEN_BITS = np.arange(0, 28, 7, dtype=np.uint32)


def _codes(patterns: np.ndarray) -> np.ndarray:
    return by_rows(np.ascontiguousarray(patterns).view(np.uint8))


def _odd(count: np.ndarray) -> np.ndarray:
    """2 n + 1 as a factor. int8 [rows, groups]"""
    return by_rows(count.astype(np.int8) * np.int8(2) + np.int8(1))


def _high_bits(packed: np.ndarray, shifts: list[int], mask: int) -> np.ndarray:
    """The bits of an index above its lowest 8. uint16 [rows, blocks, n] -> [rows, blocks, n * shifts]"""
    found = packed.astype(np.uint16)[..., None] >> np.array(shifts, np.uint16) & np.uint16(mask)
    return found.reshape(*packed.shape[:2], -1) << np.uint16(8)


def iq1_s(blocks: np.ndarray) -> Codes:
    high = words(blocks, 34, 8, "<u2")
    patterns = _patterns("IQ1_S")[blocks[:, :, 2:34] | _high_bits(high, [0, 3, 6, 9], 7)]
    patterns += np.where(np.repeat(high >> 15, 4, axis=2), _ALL_LESS, np.uint64(0))
    return Codes(IQ1_S, _codes(patterns), halves(blocks, 0) * np.float32(0.125), _odd(high >> 12 & 7))


def iq1_m(blocks: np.ndarray) -> Codes:
    """The block's step is in the highest 4 bits of its 4 words of scales."""
    high, scales = blocks[:, :, 32:48], words(blocks, 48, 4, "<u2")
    patterns = _patterns("IQ1_M")[blocks[:, :, :32] | _high_bits(high, [0, 4], 7)]
    patterns += np.where(nibbles(high) >> 3, _ALL_LESS, np.uint64(0))
    bits = np.bitwise_or.reduce(scales >> 12 << np.array([0, 4, 8, 12], np.uint16), axis=2)
    step = bits.astype("<u2").view("<f2").astype(np.float32) * np.float32(0.125)
    factor = _odd(scales[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7)
    return Codes(IQ1_M, _codes(patterns), step, factor)


def iq2_xxs(blocks: np.ndarray) -> Codes:
    # [rows, blocks, groups, indices or signs and scale]
    pairs = words(blocks, 2, 16, "<u4").reshape(*blocks.shape[:2], 8, 2)
    index = np.ascontiguousarray(pairs[..., 0]).view(np.uint8)
    signs = pairs[..., 1, None] >> _SEVEN_BITS & 127
    patterns = _patterns("IQ2_XXS")[index] | _EVEN_SIGNS[signs].reshape(index.shape)
    return Codes(IQ2_XXS, _codes(patterns), halves(blocks, 0) * np.float32(0.125), _odd(pairs[..., 1] >> 28))


def iq2_xs(blocks: np.ndarray) -> Codes:
    index = words(blocks, 2, 32, "<u2")
    patterns = _patterns("IQ2_XS")[index & 511] | _EVEN_SIGNS[index >> 9]
    return Codes(IQ2_XS, _codes(patterns), halves(blocks, 0) * np.float32(0.125), _odd(nibbles(blocks[:, :, 66:74])))


def iq2_s(blocks: np.ndarray) -> Codes:
    index = blocks[:, :, 2:34] | _high_bits(blocks[:, :, 66:74], [0, 2, 4, 6], 3)
    patterns = _patterns("IQ2_S")[index] | _SIGNS[blocks[:, :, 34:66]]
    return Codes(IQ2_S, _codes(patterns), halves(blocks, 0) * np.float32(0.125), _odd(nibbles(blocks[:, :, 74:82])))


def iq3_xxs(blocks: np.ndarray) -> Codes:
    scales = words(blocks, 66, 8, "<u4")
    patterns = _patterns("IQ3_XXS")[blocks[:, :, 2:66]].view("<u8")  # two patterns of 4 share a byte of signs
    signs = _EVEN_SIGNS[scales[..., None] >> _SEVEN_BITS & 127]
    patterns |= signs.reshape(patterns.shape)
    return Codes(IQ3_XXS, _codes(patterns), halves(blocks, 0) * np.float32(0.25), _odd(scales >> 28))


def iq3_s(blocks: np.ndarray) -> Codes:
    index = blocks[:, :, 2:66] | _high_bits(blocks[:, :, 66:74], list(range(8)), 1)
    patterns = _patterns("IQ3_S")[index].view("<u8") | _SIGNS[blocks[:, :, 74:106]]
    return Codes(IQ3_S, _codes(patterns), halves(blocks, 0), _odd(nibbles(blocks[:, :, 106:110])))
