"""Checks that every quantised format has to pass: rows, slabs, products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.runners.cuda.kernels.matmul.linear import Scratch, TileConfig
from slipstream.runners.cuda.kernels.matmul.linear_quantized import SCRATCH_FLOATS, SPLIT_K_COUNTERS, quantized_linear
from slipstream.runners.cuda.kernels.quant.quantize import QuantizedMatrix


def check_rows(matrix: QuantizedMatrix, wanted: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """``matrix``: of 37 rows. ``wanted``: float32, on the CPU"""
    ids = torch.tensor([36, 0, 5, 5], dtype=torch.int32, device=device)
    whole, some = matrix.weights(dtype).cpu(), matrix.weights(dtype, ids).cpu()
    assert torch.equal(whole, wanted.to(dtype))
    assert torch.equal(some, whole[ids.tolist()])


def check_reordered(matrix: QuantizedMatrix, device: torch.device) -> None:
    before, order = matrix.weights(torch.float32), torch.randperm(matrix.num_rows).to(device)
    matrix.reorder(order)
    assert torch.equal(matrix.weights(torch.float32), before[order])


def check_slabs(
    quantize: Callable[..., QuantizedMatrix], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large matrix is rounded slab by slab: to what it is at once."""
    whole = torch.randn(50, 256, device=device)
    at_once = quantize([whole], whole.shape, device)
    monkeypatch.setattr("slipstream.runners.cuda.kernels.quant.quantize.SLAB", 7 * 256)
    in_slabs = quantize([whole[:9], whole[9:]], whole.shape, device)
    assert torch.equal(at_once.words, in_slabs.words)
    assert torch.equal(at_once.weights(torch.float32), in_slabs.weights(torch.float32))


def check_sums(
    multiply: Callable[..., Tensor], x: Tensor, wanted: Tensor, off: Callable[[Tensor, Tensor], float], tolerance: float
) -> None:
    """A product by itself, with a residual, and with a bias as well. ``multiply(x, scratch, bias, add)``"""
    scratch = Scratch(x.device, SCRATCH_FLOATS, SPLIT_K_COUNTERS)
    add, bias = (torch.randn(size, device=x.device).to(x.dtype) for size in (wanted.shape, wanted.shape[1:]))
    # The second finds the counters as the first left them.
    for extra, more in (((), 0.0), ((None, add), add), ((bias, add), add.double() + bias)):
        total = wanted + torch.as_tensor(more).cpu().double()
        assert off(multiply(x, scratch, *extra), total) < tolerance
    assert not scratch.arrived.any()


def check_columns(matrix: QuantizedMatrix, wanted: Tensor, config: TileConfig, dtype: torch.dtype) -> None:
    """Tokens pick the columns of a matrix of whole numbers one by one."""
    width, device = matrix.width, matrix.words.device
    scratch = Scratch(device)
    for columns in range(0, width, 64):
        x = torch.eye(width, dtype=dtype, device=device)[columns : columns + 64].contiguous()
        got = quantized_linear(x, matrix, config, scratch)
        assert torch.equal(got.cpu().long().T, wanted[:, columns : columns + 64])


def check_company(x: Tensor, matrix: QuantizedMatrix, config: TileConfig) -> None:
    """A token's product has the same bits in any company."""
    scratch = Scratch(x.device)
    together = quantized_linear(x, matrix, config, scratch)
    alone = torch.cat([quantized_linear(row[None], matrix, config, scratch) for row in x])
    assert torch.equal(together, alone)
