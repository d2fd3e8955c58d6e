"""GGUF blocks and FP8 dequantized on the device that uses them: milliseconds on a GPU, a second on a host.

The GGUF types are those of small models; load/dequantize.py knows all, and is the reference: the same floats, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slipstream.load.tensor import FP8_GROUP, FP8_TYPES, RawTensor


def _halves(blocks: Tensor) -> Tensor:
    """float32 [blocks, 1], from two bytes each."""
    return blocks.contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor) -> Tensor:
    """The low ones of all bytes, then the high ones. float32 [blocks, 2 * bytes]"""
    return torch.cat((blocks & 15, blocks >> 4), dim=1).float()


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _halves(blocks[:, :2])


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]) - 8) * _halves(blocks[:, :2])


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]) * _halves(blocks[:, :2]) + _halves(blocks[:, 2:4])


_BLOCKS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {  # bytes of a block, and their floats
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
}


def can_unpack(raw: RawTensor) -> bool:
    return raw.dtype in _BLOCKS or raw.dtype in FP8_TYPES


def unpacked(raw: RawTensor, device: torch.device) -> Tensor:
    """float32, in the tensor's logical shape."""
    data = torch.from_numpy(np.array(raw.data, copy=True)).to(device)  # off the memory map, writable, contiguous
    if raw.dtype in FP8_TYPES:
        return _scaled(data.view(torch.float8_e4m3fn).float(), raw)
    size, floats = _BLOCKS[raw.dtype]
    return floats(data.view(-1, size)).view(raw.shape)


def _scaled(values: Tensor, raw: RawTensor) -> Tensor:
    """In place, group by group of columns: no second array of the matrix's size."""
    assert raw.scale is not None, raw.name
    # [*rows, groups]
    scale = torch.from_numpy(np.array(raw.scale)).to(values.device)
    for group, part in enumerate(values.split(FP8_GROUP, dim=-1)):
        part.mul_(scale[..., group, None])
    return values
