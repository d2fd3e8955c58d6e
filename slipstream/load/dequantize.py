"""Any RawTensor as float32."""

from __future__ import annotations

import math

import numpy as np

from slipstream.load.quantized.types import codes_of
from slipstream.load.tensor import FP8_GROUP, FP8_TYPES, RawTensor

SLAB = 1 << 20  # elements dequantised at once


def _e4m3_values() -> np.ndarray:
    """The value of each byte: a sign, 4 bits of exponent, 3 of mantissa; no infinities. float32 [256]"""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    size[codes & 127 == 127] = np.nan
    values: np.ndarray = np.where(codes < 128, size, -size)
    return values.astype(np.float32)


E4M3_VALUES = _e4m3_values()


def dequantize(raw: RawTensor) -> np.ndarray:
    """float32, in the tensor's logical shape; always a fresh array that may be written to."""
    if raw.dtype in ("F32", "F16"):
        return raw.data.astype(np.float32)
    if raw.dtype == "BF16":
        return bf16_to_f32(raw.data)
    if raw.dtype in FP8_TYPES:
        return _fp8_to_f32(raw)
    return _codes_to_f32(raw)


def _codes_to_f32(raw: RawTensor) -> np.ndarray:
    """Slab by slab: codes and scales take more memory than what they become. Columns in the order of the matrix."""
    num_rows, columns = math.prod(raw.shape[:-1]), raw.shape[-1]
    values = np.empty((num_rows, columns), np.float32)
    order = slice(None) if raw.order is None else raw.order
    step = max(1, SLAB // columns)
    with np.errstate(all="ignore"):  # a damaged file may hold any scale
        for at in range(0, num_rows, step):
            values[at : at + step, order] = codes_of(raw.rows(slice(at, at + step))).weights()
    return values.reshape(raw.shape)


def _fp8_to_f32(raw: RawTensor) -> np.ndarray:
    assert raw.scale is not None, raw.name
    values: np.ndarray = E4M3_VALUES[raw.data]
    values *= np.repeat(raw.scale, FP8_GROUP, axis=-1)[..., : raw.shape[-1]]
    return values


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
