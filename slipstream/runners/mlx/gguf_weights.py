"""GGUF tensors, and those of folders that other tools quantised, as MLX parameters, bit for bit where they are affine.

Q4_0, Q4_1 and Q8_0 store scale * q (+ minimum); MLX's affine quantisation stores the same three numbers in another
order. So do AWQ, GPTQ and compressed-tensors' integers. MXFP4 is a layout of MLX's own. Other types of a GGUF are
dequantised; other types of a folder are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import mlx.core as mx
import numpy as np

from slipstream.errors import UnknownModel
from slipstream.load import Checkpoint, dequantize
from slipstream.load.quantized.types import container_of, is_folder_type
from slipstream.load.tensor import FP8, RawTensor

GROUP = 32
FOLDER_GROUPS = (32, 64, 128)
ONLY_TORCH = "which is not read on MLX: use --runner torch, or the model in BF16 or converted to MLX"
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


def is_packed(checkpoint: Checkpoint, names: Iterable[str]) -> bool:
    """Whether another tool than MLX quantised some of these tensors of a folder, in whole numbers or in FP4."""
    return any(is_folder_type(checkpoint.dtype(name)) for name in names)


def folder_parameters(checkpoint: Checkpoint, names: Iterable[str], dtype: mx.Dtype) -> Iterator[tuple[str, mx.array]]:
    """Under the names of the folder; stacks of experts under those of mlx-lm's layers."""
    for name in names:
        raw = checkpoint.get(name)
        if raw.order is not None or raw.dtype == FP8:
            how = "in FP8" if raw.dtype == FP8 else "in act-order"
            raise UnknownModel(f"{checkpoint.path}: {name} is stored {how}, {ONLY_TORCH}.")
        if not is_folder_type(raw.dtype):
            yield name, mx.array(dequantize(raw)).astype(dtype)
            continue
        arrays = _folder_arrays(checkpoint.path, raw, dtype)
        stem = name.removesuffix(".weight")
        for suffix, array in arrays.items():
            if len(raw.shape) == 2:
                yield f"{stem}.{suffix}", array
            else:
                yield from _of_stack(stem, suffix, array)


def folder_bytes(checkpoint: Checkpoint, names: Iterable[str], dtype: mx.Dtype) -> dict[str, int]:
    """What each of these tensors becomes. Reads none of them."""
    return {name: _folder_size(checkpoint.dtype(name), checkpoint.shape(name), dtype) for name in names}


def _folder_size(stored: str, shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    container, size = container_of(stored), math.prod(shape)
    if container is None:
        return size * dtype.size
    if container.kind == "table4":
        return size // 2 + size // container.group
    return size // (1 if container.kind == "int8" else 2) + 2 * dtype.size * (size // container.group)


def _folder_arrays(where: str, raw: RawTensor, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Codes of a row lie in the order in which MLX's words have them."""
    container, scale = container_of(raw.dtype), raw.scale
    assert container is not None
    assert scale is not None
    data = np.ascontiguousarray(raw.data).view(np.uint8)
    words = mx.array((data ^ 128 if container.kind == "int8" else data).view(np.uint32))
    if container.kind == "table4":
        mantissa, exponent = np.frexp(scale)
        if container.group != 32 or not (mantissa == 0.5).all():
            raise UnknownModel(f"{where}: {raw.name} is stored in NVFP4, {ONLY_TORCH}.")
        return {"weight": words, "scales": mx.array((exponent + 126).astype(np.uint8))}
    if container.group not in FOLDER_GROUPS:
        raise UnknownModel(f"{where}: {raw.name} has groups of {container.group} columns, {ONLY_TORCH}.")
    zero = raw.zero if raw.zero is not None else 128 if container.kind == "int8" else 8
    biases = -(scale * zero)
    return {"weight": words, "scales": mx.array(scale).astype(dtype), "biases": mx.array(biases).astype(dtype)}


def _of_stack(stem: str, suffix: str, array: mx.array) -> Iterator[tuple[str, mx.array]]:
    mlp, _, part = stem.partition(".experts.")
    parts = mx.split(array, 2, axis=1) if part == "gate_up_proj" else [array]
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    for name, each in zip(names, parts, strict=True):
        yield f"{mlp}.switch_mlp.{name}.{suffix}", each


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
