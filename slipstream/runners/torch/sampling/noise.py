"""Randomness of the next token: a function of (seed, position, token id) and nothing else.

So a sample does not depend on the batch, on speculation, or on how often the stream was preempted. Integer mixing, the
same on every device and without a host sync; the C kernels implement the same formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = (1 << 32) - 1


def signed64(value: int) -> int:
    """The int64 with the same bits as ``value`` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = signed64(0x9E3779B97F4A7C15)
_MIX_A = signed64(0xBF58476D1CE4E5B9)
_MIX_B = signed64(0x94D049BB133111EB)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """64 bits for each (seed, position): splitmix64. int64 [rows]"""
    z = (seeds ^ (positions.long() * _GOLDEN)) + _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_A
    z = (z ^ _shift(z, 27)) * _MIX_B
    return z ^ _shift(z, 31)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise per row and token, float32 [rows, vocab]. seeds: int64 [rows], as signed64."""
    keys = noise_keys(seeds, positions)[:, None]
    low, high = keys & _MASK32, _shift(keys, 32)
    x = (torch.arange(vocab_size, device=seeds.device) * 0x9E3779B1 + low) & _MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = x ^ (x >> 13) ^ high
    x = (x * 0xC2B2AE35) & _MASK32
    x = x ^ (x >> 16)
    # 23 bits and a half: never 0 or 1 in float32.
    uniform = ((x >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
