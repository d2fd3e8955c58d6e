"""GGUF tensors as MLX parameters: block types that are affine in groups of 32 are repacked, bit for bit.

Q4_0, Q4_1 and Q8_0 store scale * q (+ minimum); MLX's affine quantisation stores the same three numbers in another
order. Other types are dequantised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from slipstream.load import Checkpoint, dequantize
from slipstream.load.tensor import RawTensor

GROUP = 32
Packed = tuple[np.ndarray, np.ndarray, np.ndarray]  # uint32 words, float32 scales, float32 biases, all [rows, n]


def parameters(checkpoint: Checkpoint, dtype: mx.Dtype) -> Iterator[tuple[str, mx.array]]:
    """Of the whole target model, under mlx-lm's names."""
    for name in checkpoint.names():
        yield from _parameter(checkpoint.get(name), dtype)


def _parameter(raw: RawTensor, dtype: mx.Dtype) -> Iterator[tuple[str, mx.array]]:
    pack = _PACKERS.get(raw.dtype)
    if pack is None or len(raw.shape) != 2:
        yield raw.name, mx.array(dequantize(raw)).astype(dtype)
        return
    stem = raw.name.removesuffix(".weight")
    words, scales, biases = pack(raw.data.reshape(raw.shape[0], raw.shape[1] // GROUP, -1))
    yield raw.name, mx.array(words)
    yield f"{stem}.scales", mx.array(scales).astype(dtype)
    yield f"{stem}.biases", mx.array(biases).astype(dtype)


def parameter_bytes(checkpoint: Checkpoint, dtype: mx.Dtype) -> dict[str, int]:
    """What each tensor of the file becomes, its scales and biases counted with it. Reads none of them."""
    return {name: _num_bytes(checkpoint.dtype(name), checkpoint.shape(name), dtype) for name in checkpoint.names()}


def _num_bytes(stored: str, shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    size = math.prod(shape)
    if stored not in _PACKERS or len(shape) != 2:
        return size * dtype.size
    return size * _BITS[stored] // 8 + 2 * dtype.size * (size // GROUP)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block. float32 [rows, groups]"""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _words(values: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [rows, n]: the first value in the lowest bits. values: uint8 [rows, groups, 32]"""
    rows, per_word = values.shape[0], 32 // bits
    lanes = values.reshape(rows, -1, per_word).astype(np.uint32) << (np.arange(per_word, dtype=np.uint32) * bits)
    words: np.ndarray = np.bitwise_or.reduce(lanes, axis=-1)
    return words


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """A block's 16 bytes hold values 0 to 15 in their lower halves and 16 to 31 in their upper ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: np.ndarray) -> Packed:
    scales = _half(blocks, 0)
    return _words(_nibbles(blocks[..., 2:]), 4), scales, -8.0 * scales


def _q4_1(blocks: np.ndarray) -> Packed:
    return _words(_nibbles(blocks[..., 4:]), 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Packed:
    scales = _half(blocks, 0)
    return _words(blocks[..., 2:] ^ 128, 8), scales, -128.0 * scales  # signed bytes, moved up by 128


_PACKERS: dict[str, Callable[[np.ndarray], Packed]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
