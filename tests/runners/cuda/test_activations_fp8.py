"""Activations in FP8: every code and scale against numpy, and values that are zero, tiny, huge or no numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.runners.cuda.kernels.quant.activations import Fp8Activations, padded_tokens, quantized_activations
from slipstream.runners.cuda.kernels.quant.fp8 import TILE

CODES = np.arange(127, dtype=np.uint8)  # 0 and up, in order of their values
VALUES = torch.from_numpy(CODES).view(torch.float8_e4m3fn).double().numpy()


def in_order(activations: Fp8Activations) -> np.ndarray:
    """Codes in the order of columns. uint8 [tokens, tiles, TILE]"""
    codes = activations.codes.view(torch.uint8).cpu().numpy()
    pairs = codes.reshape(codes.shape[0], -1, TILE // 2, 2)
    return np.concatenate((pairs[..., 0], pairs[..., 1]), axis=2)


def nearest(size: np.ndarray) -> np.ndarray:
    """The code with the nearest value, of two the even one; what exceeds the largest is the largest. -> uint8"""
    size = np.minimum(size.astype(np.float64), VALUES[-1])
    above = np.searchsorted(VALUES, size).clip(1, len(VALUES) - 1)
    low, high = VALUES[above - 1], VALUES[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.where(up, above, above - 1).astype(np.uint8)


def reference(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales [tokens, tiles], in float32 as the kernel computes them."""
    tiles = x.float().cpu().numpy().reshape(x.shape[0], -1, TILE)
    largest = np.maximum(np.abs(tiles).max(axis=2), np.float32(2.0**-100))
    steps = np.abs(tiles) * (np.float32(448.0) / largest)[..., None]
    return nearest(steps) | np.signbit(tiles).astype(np.uint8) << 7, largest / np.float32(448.0)


def check(x: Tensor) -> None:
    got, (codes, scales) = quantized_activations(x), reference(x)
    assert np.array_equal(in_order(got), codes)
    assert np.array_equal(got.scales[:, : x.shape[0]].T.cpu().numpy(), scales)
    assert got.scales.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 17, 70])
def test_equals_numpy(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(num_tokens, 3 * TILE, device=device) * torch.logspace(-6, 4, 3 * TILE, device=device)
    check(x.to(dtype))
    wide = torch.randn(num_tokens, 5 * TILE, device=device).to(dtype)
    check(wide[:, TILE : 3 * TILE])


def test_every_code_and_all_that_lies_between(device: torch.device) -> None:
    """With 448 in each tile the scale is 1: codes come back as they are, halves go to the even one."""
    halves = (VALUES[1:] + VALUES[:-1]) / 2
    beside = [np.nextafter(halves.astype(np.float32), np.float32(side)) for side in (0.0, 1000.0)]
    every = torch.from_numpy(np.concatenate([VALUES, halves, *beside]).astype(np.float32))
    both = torch.cat((every, -every))
    x = torch.full((-(-len(both) // (TILE - 1)), TILE), 448.0)
    for row, part in zip(x, both.split(TILE - 1), strict=True):
        row[1 : 1 + len(part)] = part
    check(x.to(device))
    assert (quantized_activations(x.to(device)).scales[:, : len(x)] == 1.0).all()


def test_zero_tiny_and_huge(device: torch.device) -> None:
    x = torch.zeros(5, 2 * TILE)
    x[1, 3] = 1e-45  # a denormal
    x[2, :TILE] = 2.0**-120
    x[3, 5], x[3, 6] = torch.finfo(torch.float32).max, -1.0
    x[4, TILE:] = -1e-30
    check(x.to(device))
    got = quantized_activations(x.to(device))
    assert not in_order(got)[0].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_with_its_token(bad: float, device: torch.device) -> None:
    x = torch.randn(3, 2 * TILE)
    fine = quantized_activations(x.to(device))
    x[1, 7] = bad
    got = quantized_activations(x.to(device))
    assert got.scales[0, 1].isnan()
    for token in (0, 2):
        assert np.array_equal(in_order(got)[token], in_order(fine)[token])
        assert torch.equal(got.scales[:, token], fine.scales[:, token])
    assert ((in_order(got) & 127) != 127).all()  # no code stands for what is no number


@pytest.mark.parametrize(("num_tokens", "padded"), [(1, 16), (17, 32), (129, 256), (257, 512), (2048, 2048)])
def test_scales_fill_whole_blocks(num_tokens: int, padded: int) -> None:
    assert padded_tokens(num_tokens) == padded
