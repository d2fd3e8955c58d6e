"""Numbers of a few bits out of the bytes of GGUF blocks. Arrays are [rows, blocks, ...]."""

from __future__ import annotations

import numpy as np


def halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The half-precision number at a byte of each block. float32 [rows, blocks]"""
    return words(blocks, at, 1, "<f2")[:, :, 0].astype(np.float32)


def words(blocks: np.ndarray, at: int, count: int, dtype: str) -> np.ndarray:
    """Numbers of several bytes, from a byte of each block on. [rows, blocks, count]"""
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(blocks[:, :, at : at + count * size]).view(dtype)


def fields(packed: np.ndarray, bits: int) -> np.ndarray:
    """Of each byte its lowest bits, then those of all bytes that follow, ... uint8 [..., n] -> [..., 8 / bits, n]"""
    packed = np.ascontiguousarray(packed)
    found = np.empty((*packed.shape[:-1], 8 // bits, packed.shape[-1]), np.uint8)
    for i in range(8 // bits):
        np.right_shift(packed, i * bits, out=found[..., i, :])
    if bits < 8:
        found &= (1 << bits) - 1
    return found


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Of each byte the low half, then the high one. uint8 [..., n] -> [..., 2 n]"""
    found = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=found[..., 0])
    np.right_shift(packed, 4, out=found[..., 1])
    return found.reshape(*packed.shape[:-1], -1)


def join_high(low: np.ndarray, high: np.ndarray, bits: int) -> np.ndarray:
    """Numbers from their low bits, so many, and those above, in `low`. By a product: numpy's shifts are slower."""
    high *= 1 << bits
    low |= high
    return low


def by_rows(each: np.ndarray) -> np.ndarray:
    """[rows, ...] -> [rows, n]"""
    return each.reshape(len(each), -1)
