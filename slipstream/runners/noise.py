"""The 64-bit key of a (seed, position), as on every runner: splitmix64. Plain Python integers."""

from __future__ import annotations

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def noise_key(seed: int, position: int) -> int:
    z = ((seed & _MASK64) ^ (position * _GOLDEN & _MASK64)) + _GOLDEN & _MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
    return z ^ z >> 31
