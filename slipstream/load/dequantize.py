"""Any RawTensor as float32. GGUF blocks are dequantised by the gguf package, the types of folders from their codes."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks

from slipstream.load.quantized.types import codes_of, is_folder_type
from slipstream.load.tensor import FP8, FP8_GROUP, RawTensor


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
    if raw.dtype == FP8:
        return _fp8_to_f32(raw)
    if is_folder_type(raw.dtype):
        return _folder_type_to_f32(raw)
    # [rows, columns]
    values: np.ndarray = dequantize_blocks(raw.data, GGMLQuantizationType[raw.dtype])
    return values.reshape(raw.shape)


def _fp8_to_f32(raw: RawTensor) -> np.ndarray:
    assert raw.scale is not None, raw.name
    values: np.ndarray = E4M3_VALUES[raw.data]
    values *= np.repeat(raw.scale, FP8_GROUP, axis=-1)[..., : raw.shape[-1]]
    return values


def _folder_type_to_f32(raw: RawTensor) -> np.ndarray:
    """Columns in the order of the matrix, whatever that of the file."""
    weights = codes_of(raw.rows(slice(None))).weights()
    if raw.order is not None:
        stored, weights = weights, np.empty_like(weights)
        weights[:, raw.order] = stored
    return weights.reshape(raw.shape)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
