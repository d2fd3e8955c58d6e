"""Float matrices quantized to GGUF's blocks of 32 columns: for weights that no file holds in so few bits."""

from __future__ import annotations

import torch
from torch import Tensor


def q8_0_blocks(matrix: Tensor) -> Tensor:
    """8 bits with a half-precision scale. uint8 [rows, columns / 32 * 34]"""
    blocks = _blocks(matrix)
    scale = (blocks.abs().amax(2, keepdim=True) / 127).half()  # [rows, blocks, 1]
    codes = _codes(blocks, scale).clamp(-127, 127).to(torch.int8)
    return _concatenated(scale.view(torch.uint8), codes.view(torch.uint8))


def q4_1_blocks(matrix: Tensor) -> Tensor:
    """4 bits with a scale and a minimum; low nibbles hold the first 16 columns. uint8 [rows, columns / 32 * 20]"""
    blocks = _blocks(matrix)
    minimum, maximum = blocks.aminmax(dim=2, keepdim=True)
    scale, minimum = ((maximum - minimum) / 15).half(), minimum.half()  # [rows, blocks, 1]
    codes = _codes(blocks - minimum.float(), scale).clamp(0, 15).byte()
    return _concatenated(scale.view(torch.uint8), minimum.view(torch.uint8), codes[..., :16] | codes[..., 16:] << 4)


def _blocks(matrix: Tensor) -> Tensor:
    rows, cols = matrix.shape
    assert cols % 32 == 0
    return matrix.float().reshape(rows, cols // 32, 32)


def _codes(values: Tensor, scale: Tensor) -> Tensor:
    wide = scale.float()
    return torch.where(wide > 0, values / wide.clamp(min=1e-30), 0).round()


def _concatenated(*parts: Tensor) -> Tensor:
    return torch.cat(parts, 2).flatten(1).contiguous()
