"""Any RawTensor as float32. The block arithmetic is the gguf package's; this file only feeds it."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks

from slipstream.load.tensor import RawTensor


def dequantize(raw: RawTensor) -> np.ndarray:
    """float32, in the tensor's logical shape; always a fresh array that may be written to."""
    if raw.dtype in ("F32", "F16"):
        return raw.data.astype(np.float32)
    if raw.dtype == "BF16":
        return bf16_to_f32(raw.data)
    # [rows, columns]
    values: np.ndarray = dequantize_blocks(raw.data, GGMLQuantizationType[raw.dtype])
    return values.reshape(raw.shape)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
