"""GGUF's types without super-blocks: a block has one scale, or NVFP4's four."""

from __future__ import annotations

import numpy as np

from slipstream.load.quantized.bits import by_rows, fields, halves, join_high
from slipstream.load.quantized.codes import E2M1, Codes, Container

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Q4_0 = Container("affine4", 32, 32, offset=8)
Q4_1 = Container("affine4", 32, 32, has_minimum=True)
Q5_0 = Container("int8", 32, 32)
Q5_1 = Container("int8", 32, 32, has_minimum=True)
Q8_0 = Container("int8", 32, 32)
IQ4_NL = Container("table4", 32, 32, table=tuple(map(float, IQ4_VALUES)))
MXFP4 = Container("table4", 32, 32, table=E2M1)
NVFP4 = Container("table4", 16, 16, table=E2M1)
TERNARY = Container("affine4", 128, 128, offset=1)  # its blocks have 256 columns: each scale is there twice
Q1_0 = Container("affine4", 128, 128, offset=1)
Q2_0 = Container("affine4", 64, 64, offset=1)


def _powers_of_two() -> np.ndarray:
    """The value of a byte that is an exponent alone; the last one would be beyond float32. [256]"""
    powers: np.ndarray = np.ldexp(1.0, np.minimum(np.arange(256), 254) - 127)
    return powers.astype(np.float32)


def _unsigned_e4m3() -> np.ndarray:
    """The value of a byte with 4 bits of exponent and 3 of mantissa; the one that is no number counts as 0. [256]"""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    values: np.ndarray = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    values[127] = 0.0
    return values.astype(np.float32)


_E8M0, _UE4M3 = _powers_of_two(), _unsigned_e4m3()


def q4_0(blocks: np.ndarray) -> Codes:
    return Codes(Q4_0, by_rows(fields(blocks[:, :, 2:], 4)), halves(blocks, 0))


def q4_1(blocks: np.ndarray) -> Codes:
    return Codes(Q4_1, by_rows(fields(blocks[:, :, 4:], 4)), halves(blocks, 0), minimum_step=halves(blocks, 2))


def _five_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """uint8 [rows, columns], from the fifth bits of all columns, then the others."""
    low = by_rows(fields(blocks[:, :, at + 4 :], 4))
    return join_high(low, by_rows(np.unpackbits(blocks[:, :, at : at + 4], axis=2, bitorder="little")), 4)


def q5_0(blocks: np.ndarray) -> Codes:
    codes = _five_bits(blocks, 2).view(np.int8)
    codes -= 16
    return Codes(Q5_0, codes, halves(blocks, 0))


def q5_1(blocks: np.ndarray) -> Codes:
    return Codes(Q5_1, _five_bits(blocks, 4).view(np.int8), halves(blocks, 0), minimum_step=halves(blocks, 2))


def q8_0(blocks: np.ndarray) -> Codes:
    return Codes(Q8_0, by_rows(np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)), halves(blocks, 0))


def iq4_nl(blocks: np.ndarray) -> Codes:
    return Codes(IQ4_NL, by_rows(fields(blocks[:, :, 2:], 4)), halves(blocks, 0))


def mxfp4(blocks: np.ndarray) -> Codes:
    return Codes(MXFP4, by_rows(fields(blocks[:, :, 1:], 4)), _E8M0[blocks[:, :, 0]])


def nvfp4(blocks: np.ndarray) -> Codes:
    # [rows, blocks, groups, bytes of a group]
    packed = blocks[:, :, 4:].reshape(*blocks.shape[:2], 4, 8)
    return Codes(NVFP4, by_rows(fields(packed, 4)), by_rows(_UE4M3[blocks[:, :, :4]]))


def tq1_0(blocks: np.ndarray) -> Codes:
    """Five digits to the base of 3 in a byte, as a fraction: times 3 they come out of it one by one."""
    parts = (blocks[:, :, :32], 5), (blocks[:, :, 32:48], 5), (blocks[:, :, 48:52], 4)
    digits = [_digits(part, count) for part, count in parts]
    return Codes(TERNARY, by_rows(np.concatenate(digits, axis=2)), np.repeat(halves(blocks, 52), 2, axis=1))


def _digits(packed: np.ndarray, count: int) -> np.ndarray:
    """uint8 [rows, blocks, n] -> [rows, blocks, count * n]"""
    fraction, found = packed, []
    for _ in range(count):
        product = fraction.astype(np.uint16) * 3
        found.append((product >> 8).astype(np.uint8))
        fraction = (product & 255).astype(np.uint8)
    return np.concatenate(found, axis=2)


def tq2_0(blocks: np.ndarray) -> Codes:
    packed = blocks[:, :, :64].reshape(*blocks.shape[:2], 2, 32)
    return Codes(TERNARY, by_rows(fields(packed, 2)), np.repeat(halves(blocks, 64), 2, axis=1))


def q1_0(blocks: np.ndarray) -> Codes:
    signs = by_rows(np.unpackbits(blocks[:, :, 2:], axis=2, bitorder="little"))
    signs *= 2
    return Codes(Q1_0, signs, halves(blocks, 0))


def q2_0(blocks: np.ndarray) -> Codes:
    """Four codes a byte, one after the other."""
    codes = fields(blocks[:, :, 2:], 2).swapaxes(2, 3)
    return Codes(Q2_0, by_rows(codes), halves(blocks, 0))
