"""Folders that other tools quantised, as MLX parameters: the same codes and scales in MLX's own layouts.

AWQ, GPTQ and compressed-tensors' integers are affine, as MLX's quantisation is. MXFP4 is a layout of MLX's own. Other
types are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import mlx.core as mx
import numpy as np

from slipstream.errors import UnknownModel
from slipstream.load import Checkpoint, dequantize
from slipstream.load.quantized.types import container_of, is_folder_type
from slipstream.load.tensor import FP8, RawTensor

FOLDER_GROUPS = (32, 64, 128)
ONLY_TORCH = "which is not read on MLX: use --runner torch, or the model in BF16 or converted to MLX"


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
