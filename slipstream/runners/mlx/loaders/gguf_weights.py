"""GGUF tensors as MLX parameters: types that are affine in groups of 32 columns or more are repacked.

MLX's affine quantisation stores codes, a scale and a bias of each group, as those types have them in another order: in
float32 nothing is rounded, in float16 the scales of K-quants are. Other types are dequantised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import mlx.core as mx
import numpy as np

from slipstream.load import Checkpoint, dequantize
from slipstream.load.quantized.codes import Codes, Container
from slipstream.load.quantized.types import codes_of, container_of
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import RawTensor

GROUPS = (32, 64, 128)  # that MLX packs
BITS = {"affine4": 4, "int8": 8}
SLAB = 1 << 20  # elements repacked at once
EXACT = ("A_log", "dt_bias")  # stay float32
Packed = tuple[np.ndarray, np.ndarray, np.ndarray]  # uint32 words, float32 scales, float32 biases, all [rows, n]


def parameters(checkpoint: Checkpoint, dtype: mx.Dtype, names: Iterable[str]) -> Iterator[tuple[str, mx.array]]:
    """Of those tensors, under the names of mlx-lm's modules without their outermost one."""
    for name in names:
        for raw in _split(checkpoint.get(name)):
            yield from _parameter(raw, dtype, checkpoint.spec)


def parameter_bytes(checkpoint: Checkpoint, dtype: mx.Dtype, names: Iterable[str]) -> dict[str, int]:
    """What each tensor of the file becomes, its scales and biases counted with it. Reads none of them."""
    return {
        module_name(name): _num_bytes(checkpoint.dtype(name), checkpoint.shape(name), dtype, name) for name in names
    }


def module_name(name: str) -> str:
    """mlx-lm's experts are one module with a matrix of each kind."""
    stem, _, part = name.partition(".experts.")
    return f"{stem}.switch_mlp.{part}.weight" if part else name


def _split(raw: RawTensor) -> Iterator[RawTensor]:
    """Gate and up of stacked experts apart."""
    if not raw.name.endswith(".gate_up_proj"):
        yield raw
        return
    count, num_rows, columns = raw.shape
    rows = np.arange(count * num_rows).reshape(count, 2, -1)
    for i, part in enumerate(("gate_proj", "up_proj")):
        half = raw.rows(rows[:, i].ravel())
        data = half.data if container_of(raw.dtype) else half.data.reshape(count, -1, columns)
        name = raw.name.replace("gate_up_proj", part)
        yield RawTensor(name, raw.dtype, (count, num_rows // 2, columns), data, half.scale)


def _parameter(raw: RawTensor, dtype: mx.Dtype, spec: ModelSpec) -> Iterator[tuple[str, mx.array]]:
    name = module_name(raw.name)
    container = container_of(raw.dtype)
    if container is None or not _fits(container, raw.shape):
        kept = mx.float32 if name.endswith(EXACT) else dtype
        yield name, mx.array(_as_module_has_it(raw, spec)).astype(kept)
        return
    words, scales, biases = (each.reshape(*raw.shape[:-1], -1) for each in _packed(raw))
    stem = name.removesuffix(".weight")
    yield name, mx.array(words)
    yield f"{stem}.scales", mx.array(scales).astype(dtype)
    yield f"{stem}.biases", mx.array(biases).astype(dtype)


def _as_module_has_it(raw: RawTensor, spec: ModelSpec) -> np.ndarray:
    """float32. mlx-lm's norms have the 1 of ``1 + w`` in them, and a conv its channels last."""
    values = dequantize(raw)
    if raw.name.endswith("conv1d.weight"):
        return np.ascontiguousarray(np.moveaxis(values, 2, 1))
    is_norm = values.ndim == 1 and "norm" in raw.name and not raw.name.endswith("linear_attn.norm.weight")
    return values + np.float32(1) if is_norm and spec.norm_plus_one else values


def _fits(container: Container, shape: tuple[int, ...]) -> bool:
    return container.kind in BITS and container.group in GROUPS and len(shape) > 1


def _num_bytes(stored: str, shape: tuple[int, ...], dtype: mx.Dtype, name: str) -> int:
    size, container = math.prod(shape), container_of(stored)
    if container is None or not _fits(container, shape):
        return size * (4 if name.endswith(EXACT) else dtype.size)
    return size * BITS[container.kind] // 8 + 2 * dtype.size * (size // container.group)


def _packed(raw: RawTensor) -> Packed:
    """Slab by slab: codes take several times the memory of what they become."""
    num_rows, columns = math.prod(raw.shape[:-1]), raw.shape[-1]
    step = max(1, SLAB // columns)
    slabs = [_repacked(codes_of(raw.rows(slice(at, at + step)))) for at in range(0, num_rows, step)]
    words, scales, biases = (np.concatenate(parts) for parts in zip(*slabs, strict=True))
    return words, scales, biases


def _repacked(codes: Codes) -> Packed:
    """A weight is scale * code + bias, the code without a sign."""
    kind, scales, minimum = codes.container.kind, codes.scale(), codes.minimum()
    numbers, offset = codes.codes, codes.container.offset
    if kind == "int8":
        numbers = numbers.view(np.uint8)
        if minimum is None:  # signed bytes, moved up by 128
            numbers, offset = numbers ^ 128, 128
    return _words(numbers, BITS[kind]), scales, minimum if minimum is not None else np.float32(-offset) * scales


def _words(values: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [rows, n]: the first value in the lowest bits. values: uint8 [rows, columns]"""
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    return np.ascontiguousarray(values).view("<u4")
