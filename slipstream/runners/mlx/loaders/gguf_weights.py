"""GGUF tensors as MLX parameters: packed where MLX has a layout for their type, else unpacked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from slipstream.errors import UnknownModel
from slipstream.load import Checkpoint, dequantize
from slipstream.load.quantized.types import codes_of, container_of
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import RawTensor
from slipstream.runners.mlx.loaders.layouts import Arrays, Layout, are_powers_of_two, layout_of, packed
from slipstream.runners.mlx.loaders.parameters import Rules, is_matrix

EXACT = ("A_log", "dt_bias")  # stay float32


def gguf_rules(checkpoint: Checkpoint, dtype: mx.Dtype) -> Rules:
    """``dtype``: of what is not packed, scales included."""

    def become(raw: RawTensor) -> Arrays:
        layout = _layout(raw.name, raw.dtype, raw.shape)
        if layout is None:
            return {"weight": mx.array(_as_module_has_it(raw, checkpoint.spec)).astype(_float_type(raw.name, dtype))}
        codes = codes_of(raw)
        if layout.is_mxfp4 and not are_powers_of_two(codes.scale()):
            raise UnknownModel(
                f"{checkpoint.path}: {raw.name} is {raw.dtype} with scales that are no powers of two, which is not "
                "read on MLX: use --runner torch."
            )
        return packed(codes, layout, dtype)

    def like(name: str, stored: str, shape: tuple[int, ...]) -> Arrays:
        layout = _layout(name, stored, shape)
        if layout is None:
            shape = shape if not name.endswith("conv1d.weight") else (shape[0], shape[2], shape[1])
            return {"weight": mx.zeros(shape, _float_type(name, dtype))}
        return layout.like(shape, dtype)

    return Rules(become, like)


def unpacked_weights(checkpoint: Checkpoint, names: Iterable[str]) -> Counter[str]:
    """How many weights become floats though the file has them in codes, by type."""
    found: Counter[str] = Counter()
    for name in names:
        stored, shape = checkpoint.dtype(name), checkpoint.shape(name)
        if container_of(stored) is not None and _layout(name, stored, shape) is None:
            found[stored] += math.prod(shape)
    return found


def _layout(name: str, stored: str, shape: tuple[int, ...]) -> Layout | None:
    return layout_of(stored) if is_matrix(name, shape) else None


def _float_type(name: str, dtype: mx.Dtype) -> mx.Dtype:
    return mx.float32 if name.endswith(EXACT) else dtype


def _as_module_has_it(raw: RawTensor, spec: ModelSpec) -> np.ndarray:
    """float32. mlx-lm's norms have the 1 of ``1 + w`` in them, and a conv its channels last."""
    values = dequantize(raw)
    if raw.name.endswith("conv1d.weight"):
        return np.ascontiguousarray(np.moveaxis(values, 2, 1))
    is_norm = values.ndim == 1 and "norm" in raw.name and not raw.name.endswith("linear_attn.norm.weight")
    return values + np.float32(1) if is_norm and spec.norm_plus_one else values
