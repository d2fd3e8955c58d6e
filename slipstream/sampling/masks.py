"""Masks over a vocabulary: bytes, one bit a token, the lowest bit of the first byte being token 0."""

from __future__ import annotations

from collections.abc import Iterable


def num_bytes(vocab_size: int) -> int:
    return (vocab_size + 7) // 8


def only(tokens: Iterable[int], vocab_size: int) -> bytes:
    """Allows these and nothing else; tokens that the vocabulary does not have are left out."""
    bits = bytearray(num_bytes(vocab_size))
    for token in tokens:
        if 0 <= token < vocab_size:
            bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


def all_but(tokens: Iterable[int], vocab_size: int) -> bytes:
    bits = int.from_bytes(only(tokens, vocab_size), "little") ^ ((1 << vocab_size) - 1)
    return bits.to_bytes(num_bytes(vocab_size), "little")


def allows(mask: bytes | None, token: int) -> bool:
    return mask is None or bool(mask[token >> 3] >> (token & 7) & 1)


def both(one: bytes | None, other: bytes | None) -> bytes | None:
    """Tokens that both allow."""
    if one is None or other is None:
        return other if one is None else one
    bits = int.from_bytes(one, "little") & int.from_bytes(other, "little")
    return bits.to_bytes(len(one), "little")


def is_empty(mask: bytes | None) -> bool:
    return mask is not None and not mask.strip(b"\0")  # without a loop in Python
