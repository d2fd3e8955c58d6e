"""Folders that other tools quantised, as MLX parameters: the same codes and scales in MLX's own layouts.

AWQ, GPTQ and compressed-tensors' integers are affine, as MLX's quantisation is. MXFP4 is a layout of MLX's own. Other
types are refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from slipstream.errors import LoadError, UnknownModel
from slipstream.load import Checkpoint, RawTensor, dequantize
from slipstream.load.quantized.types import container_of, is_folder_type
from slipstream.load.tensor import FP8_TYPES
from slipstream.runners.mlx.loaders.layouts import Arrays, Layout, are_powers_of_two, exponents, layout_of
from slipstream.runners.mlx.loaders.parameters import Rules

ONLY_TORCH = "which is not read on MLX: use --runner torch, or the model in BF16 or converted to MLX"
OWN_TYPES = ("F32", "F16", "BF16", "U32")  # that mlx-lm reads: floats, and its own words of codes


def is_packed(checkpoint: Checkpoint, names: Iterable[str]) -> bool:
    """Whether another tool than MLX quantised some of these tensors of a folder, in whole numbers or in FP4."""
    return any(is_folder_type(checkpoint.dtype(name)) for name in names)


def check_types(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Refuses what only other runners read. From headers alone."""
    for name in names:
        stored = checkpoint.dtype(name)
        if stored in OWN_TYPES or (stored in FP8_TYPES and not _is_read(checkpoint, name)):
            continue
        container = container_of(stored)
        if stored in FP8_TYPES:
            raise _refused(checkpoint.path, name, "is stored in FP8")
        if container is not None and layout_of(stored) is None:
            how = "is stored in NVFP4" if container.table else f"has groups of {container.group} columns"
            raise _refused(checkpoint.path, name, how)


def check_readable(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Refuses, in the words of our own readers, what none of them reads: where mlx-lm does not read it either."""
    for name in names:
        if checkpoint.dtype(name) not in OWN_TYPES:
            checkpoint.shape(name)


def _is_read(checkpoint: Checkpoint, name: str) -> bool:
    """By other runners."""
    try:
        checkpoint.shape(name)
    except LoadError:
        return False
    return True


def folder_rules(checkpoint: Checkpoint, dtype: mx.Dtype) -> Rules:
    """``dtype``: of what is not packed, scales included."""

    def become(raw: RawTensor) -> Arrays:
        if raw.order is not None:
            raise _refused(checkpoint.path, raw.name, "is stored in act-order")
        layout = layout_of(raw.dtype)
        if layout is None:
            return {"weight": mx.array(dequantize(raw)).astype(dtype)}
        return _packed(checkpoint.path, raw, layout, dtype)

    def like(name: str, stored: str, shape: tuple[int, ...]) -> Arrays:
        layout = layout_of(stored)
        return {"weight": mx.zeros(shape, dtype)} if layout is None else layout.like(shape, dtype)

    return Rules(become, like)


def _packed(where: str, raw: RawTensor, layout: Layout, dtype: mx.Dtype) -> Arrays:
    """Codes of a row lie in the order in which MLX's words have them."""
    scale = raw.scale
    assert scale is not None
    data = np.ascontiguousarray(raw.data).view(np.uint8)
    words = mx.array((data ^ layout.shift if layout.shift else data).view(np.uint32))
    if layout.is_mxfp4:
        if not are_powers_of_two(scale):
            raise _refused(where, raw.name, "is stored in FP4 with scales that are no powers of two")
        return {"weight": words, "scales": mx.array(exponents(scale))}
    biases = layout.least * scale if raw.zero is None else -(scale * raw.zero)
    return {"weight": words, "scales": mx.array(scale).astype(dtype), "biases": mx.array(biases).astype(dtype)}


def _refused(where: str, name: str, how: str) -> UnknownModel:
    return UnknownModel(f"{where}: {name} {how}, {ONLY_TORCH}.")
