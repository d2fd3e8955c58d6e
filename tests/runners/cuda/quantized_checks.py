"""Checks that every quantised format has to pass: rows, slabs, products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from some_gpus import HOPPER
from torch import Tensor

from slipstream.runners.cuda.kernels.matmul.linear import Scratch, TileConfig, fitted
from slipstream.runners.cuda.kernels.matmul.linear_quantized import (
    LIBRARY_TOKENS,
    SCRATCH_FLOATS,
    SPLIT_K_COUNTERS,
    quantized_linear,
    tile_config,
    tokens_of_a_block,
)
from slipstream.runners.cuda.kernels.quant.quantize import QuantizedMatrix
from slipstream.runners.cuda.model.quantized import WEIGHT_BYTES, CudaQuantizedLinear


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


def check_split(matrix: QuantizedMatrix, num_tokens: int, num_counters: int) -> None:
    """A product of that many tokens finds room for the parts of its sums, and each part has 512 columns or more."""
    config, block = tile_config(matrix, num_tokens), tokens_of_a_block(matrix.bits, num_tokens)
    if config is None:
        assert num_tokens > LIBRARY_TOKENS[matrix.bits]
        return
    assert fitted(config, block, 2, HOPPER, weight_bytes=WEIGHT_BYTES[matrix.bits]) == config
    if config.split > 1:
        programs = -(-matrix.num_rows // config.rows) * -(-num_tokens // block)
        assert programs <= num_counters
        assert programs * config.split * config.rows * block <= SCRATCH_FLOATS
        assert matrix.num_tiles // config.split * matrix.tile >= 512


def check_first_rows(whole: CudaQuantizedLinear) -> None:
    """Of 70: those that drafts read, where they are."""
    x = torch.randn(3, whole.matrix.width, device=whole.matrix.words.device)
    first = whole.for_drafts(40)
    assert first.matrix.words.data_ptr() == whole.matrix.words.data_ptr()
    assert first.num_out == 40
    assert torch.allclose(first(x), whole(x)[:, :40], rtol=1e-5, atol=1e-5)
    ids = torch.tensor([39, 1], device=x.device)
    assert torch.equal(first.rows(ids), whole.rows(ids))


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
