"""Codes and scales of a stored matrix as tensors of a device: GGUF's common blocks are taken apart there.

load/quantized is the reference, and takes those apart that are not here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.load.quantized.codes import Codes
from slipstream.load.quantized.types import codes_of
from slipstream.load.tensor import RawTensor

SPAN = 256  # columns of a super-block


@dataclass(frozen=True, slots=True)
class DeviceCodes:
    """As load/quantized/codes.py has them."""

    codes: Tensor  # uint8 [rows, columns], int8 where values are signed
    step: Tensor  # float32 [rows, columns / span]
    factor: Tensor | None = None  # int8 [rows, columns / group]
    minimum_step: Tensor | None = None  # float32 [rows, columns / span]
    minimum_factor: Tensor | None = None  # uint8 [rows, columns / group]


def device_codes(raw: RawTensor, device: torch.device) -> DeviceCodes:
    """Of a matrix whose type has a container."""
    if raw.dtype in _BLOCKS:
        size, read = _BLOCKS[raw.dtype]
        return read(_on_device(raw.data, device).view(raw.shape[0], -1, size))
    return from_host(codes_of(raw), device)


def from_host(codes: Codes, device: torch.device) -> DeviceCodes:
    arrays = (codes.codes, codes.step, codes.factor, codes.minimum_step, codes.minimum_factor)
    made = [None if each is None else _on_device(each, device) for each in arrays]
    return DeviceCodes(*made)  # type: ignore[arg-type]


def _on_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(array, copy=True)).to(device)  # off the memory map, writable, contiguous


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The half-precision number at a byte of each block. float32 [rows, blocks]"""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0].float()


def _low_then_high(packed: Tensor, chunk: int) -> Tensor:
    """Of every ``chunk`` bytes the low nibbles, then the high ones. uint8 [rows, blocks, n] -> [rows, blocks * 2 n]"""
    chunks = packed.unflatten(2, (-1, chunk))
    return torch.stack((chunks & 15, chunks >> 4), dim=3).flatten(1)


def _q8_0(blocks: Tensor) -> DeviceCodes:
    return DeviceCodes(blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks, 0))


def _q4_0(blocks: Tensor) -> DeviceCodes:
    return DeviceCodes(_low_then_high(blocks[:, :, 2:], 16), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> DeviceCodes:
    return DeviceCodes(_low_then_high(blocks[:, :, 4:], 16), _halves(blocks, 0), minimum_step=_halves(blocks, 2))


def _six_bit_factors(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Of scales and of minimums: 8 each in 12 bytes. uint8 [rows, blocks, 12] -> [rows, blocks * 8] each"""
    first, second, third = packed.split(4, dim=2)
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=2)
    minimum = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=2)
    return scale.flatten(1), minimum.flatten(1)


def _q4_k(blocks: Tensor) -> DeviceCodes:
    return _with_minimum(blocks, _low_then_high(blocks[:, :, 16:], 32))


def _q5_k(blocks: Tensor) -> DeviceCodes:
    shift = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = blocks[:, :, None, 16:48] >> shift & 1  # a bit of each byte for every 32 columns
    return _with_minimum(blocks, _low_then_high(blocks[:, :, 48:], 32) | fifth.flatten(1) << 4)


def _with_minimum(blocks: Tensor, codes: Tensor) -> DeviceCodes:
    scale, minimum = _six_bit_factors(blocks[:, :, 4:16])
    return DeviceCodes(codes, _halves(blocks, 0), scale.view(torch.int8), -_halves(blocks, 2), minimum)


def _q6_k(blocks: Tensor) -> DeviceCodes:
    low = blocks[:, :, :128].unflatten(2, (2, 1, 64))  # two halves of 128 columns
    low = torch.cat((low & 15, low >> 4), dim=3).unflatten(4, (2, 32)).flatten(3, 4)
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, :, 128:192].unflatten(2, (2, 1, 32)) >> shift & 3  # [rows, blocks, 2, 4, 32]
    codes = (low | high << 4).flatten(1).view(torch.int8) - 32
    return DeviceCodes(codes, _halves(blocks, 208), blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1))


def _iq4_xs(blocks: Tensor) -> DeviceCodes:
    high = blocks[:, :, 2:4].unsqueeze(3) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device) & 3
    low = torch.stack((blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4), dim=3)
    factor = (low.flatten(1) | high.flatten(1) << 4).view(torch.int8) - 32
    return DeviceCodes(_low_then_high(blocks[:, :, 8:], 16), _halves(blocks, 0), factor)


_BLOCKS: dict[str, tuple[int, Callable[[Tensor], DeviceCodes]]] = {  # bytes of a block, and what they hold
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_XS": (136, _iq4_xs),
}
