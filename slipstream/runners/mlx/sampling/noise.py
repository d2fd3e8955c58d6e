"""Randomness of the next token: a function of (seed, position, token id) and nothing else, as on every runner.

The 64-bit key of a (seed, position) is mixed on the host (runners/noise.py); the device sees its two halves and needs
32-bit integers only.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx


def key_halves(keys: Iterable[int]) -> mx.array:
    """uint32 [keys, 2]: the lower and the upper half of each."""
    return mx.array([[key & 0xFFFFFFFF, key >> 32] for key in keys], dtype=mx.uint32).reshape(-1, 2)


def gumbel_noise(halves: mx.array, vocab_size: int) -> mx.array:
    """Standard Gumbel noise per row and token, float32 [rows, vocab]. halves: uint32 [rows, 2]."""
    low, high = halves[:, :1], halves[:, 1:]
    x = mx.arange(vocab_size, dtype=mx.uint32) * mx.array(0x9E3779B1, mx.uint32) + low
    x = (x ^ (x >> 16)) * mx.array(0x85EBCA6B, mx.uint32)
    x = (x ^ (x >> 13) ^ high) * mx.array(0xC2B2AE35, mx.uint32)
    x = x ^ (x >> 16)
    # 23 bits and a half: never 0 or 1 in float32.
    uniform = ((x >> 9).astype(mx.float32) + 0.5) * 2.0**-23
    return -mx.log(-mx.log(uniform))
