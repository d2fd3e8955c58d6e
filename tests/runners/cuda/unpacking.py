"""Checks of every quantized format: rows, all and some, dequantized."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.runners.cuda.kernels.quant.quantize import QuantizedMatrix


def check_rows(matrix: QuantizedMatrix, wanted: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """``matrix``: of 37 rows. ``wanted``: float32, on the CPU"""
    ids = torch.tensor([36, 0, 5, 5], dtype=torch.int32, device=device)
    whole, some = matrix.weights(dtype).cpu(), matrix.weights(dtype, ids).cpu()
    # The interpreter truncates where a GPU rounds to bfloat16.
    tolerance = 2**-7 if dtype == torch.bfloat16 and device.type == "cpu" else 0.0
    assert torch.allclose(whole, wanted.to(dtype), rtol=tolerance, atol=0.0)
    assert torch.equal(some, whole[ids.tolist()])


def check_reordered(matrix: QuantizedMatrix, device: torch.device) -> None:
    before, order = matrix.weights(torch.float32), torch.randperm(matrix.num_rows).to(device)
    matrix.reorder(order)
    assert torch.equal(matrix.weights(torch.float32), before[order])
