"""GGUF's types whose blocks have 256 columns in groups: a step of the block, a small factor of each group."""

from __future__ import annotations

import numpy as np

from slipstream.load.quantized.bits import by_rows, fields, halves, join_high, nibbles, words
from slipstream.load.quantized.codes import Codes, Container
from slipstream.load.quantized.gguf_plain import IQ4_NL

SPAN = 256

Q2_K = Container("affine4", 16, SPAN, has_minimum=True, minimum_has_factor=True)
Q3_K = Container("affine4", 16, SPAN, offset=4)
Q4_K = Container("affine4", 32, SPAN, has_minimum=True, minimum_has_factor=True)
Q5_K = Container("int8", 32, SPAN, has_minimum=True, minimum_has_factor=True)
Q6_K = Container("int8", 16, SPAN)
IQ4_XS = Container("table4", 32, SPAN, table=IQ4_NL.table)


def _pieces(blocks: np.ndarray, at: int, count: int, size: int) -> np.ndarray:
    """Bytes of each block in several pieces. [rows, blocks, count, size]"""
    return blocks[:, :, at : at + count * size].reshape(*blocks.shape[:2], count, size)


def _six_bits(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q4_K's and Q5_K's factors of scales and minimums, from 12 bytes: the low 6 bits of the first 8 bytes are those of
    groups 0 to 3, the others are in the nibbles of the last 4 bytes and the high bits of the first 8."""
    scales, minimums, both = (blocks[:, :, at : at + 4] for at in (4, 8, 12))
    late_scales = (both & 15) | (scales >> 6 << 4)
    late_minimums = (both >> 4) | (minimums >> 6 << 4)
    factor = np.concatenate((scales & 63, late_scales), axis=2)
    return by_rows(factor).view(np.int8), by_rows(np.concatenate((minimums & 63, late_minimums), axis=2))


def _with_minimums(container: Container, codes: np.ndarray, blocks: np.ndarray) -> Codes:
    factor, minimum_factor = _six_bits(blocks)
    return Codes(container, codes, halves(blocks, 0), factor, -halves(blocks, 2), minimum_factor)


def q2_k(blocks: np.ndarray) -> Codes:
    codes = by_rows(fields(_pieces(blocks, 16, 2, 32), 2))
    factor = by_rows(blocks[:, :, :16] & 15).view(np.int8)
    return Codes(Q2_K, codes, halves(blocks, 80), factor, -halves(blocks, 82), by_rows(blocks[:, :, :16] >> 4))


def q3_k(blocks: np.ndarray) -> Codes:
    codes = by_rows(fields(_pieces(blocks, 32, 2, 32), 2))
    codes = join_high(codes, by_rows(fields(blocks[:, :, :32], 1)), 2)
    low_bits = fields(blocks[:, :, 96:104], 4).reshape(*blocks.shape[:2], 16)
    high_bits = fields(blocks[:, :, 104:108], 2).reshape(*blocks.shape[:2], 16)
    factor = by_rows(low_bits | high_bits << 4).view(np.int8) - np.int8(32)
    return Codes(Q3_K, codes, halves(blocks, 108), factor)


def q4_k(blocks: np.ndarray) -> Codes:
    return _with_minimums(Q4_K, by_rows(fields(_pieces(blocks, 16, 4, 32), 4)), blocks)


def q5_k(blocks: np.ndarray) -> Codes:
    codes = by_rows(fields(_pieces(blocks, 48, 4, 32), 4))
    codes = join_high(codes, by_rows(fields(blocks[:, :, 16:48], 1)), 4)
    return _with_minimums(Q5_K, codes.view(np.int8), blocks)


def q6_k(blocks: np.ndarray) -> Codes:
    codes = by_rows(fields(_pieces(blocks, 0, 2, 64), 4))
    signed = join_high(codes, by_rows(fields(_pieces(blocks, 128, 2, 32), 2)), 4).view(np.int8)
    signed -= 32
    factor = by_rows(np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8))
    return Codes(Q6_K, signed, halves(blocks, 208), factor)


def iq4_xs(blocks: np.ndarray) -> Codes:
    codes = by_rows(fields(_pieces(blocks, 8, 8, 16), 4))
    high = words(blocks, 2, 1, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    factor = nibbles(blocks[:, :, 4:8]) | high.astype(np.uint8) << 4
    return Codes(IQ4_XS, codes, halves(blocks, 0), by_rows(factor).view(np.int8) - np.int8(32))
