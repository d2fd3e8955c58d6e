"""The product for few tokens against PyTorch, split and not, with odd numbers of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from some_gpus import ADA, HOPPER

from slipstream.runners.cuda.kernels.matmul.linear import (
    Scratch,
    TileConfig,
    fitted,
    interleaved_rows,
    skinny_gated,
    skinny_linear,
    skinny_normed,
    tile_config,
)
from slipstream.runners.torch.ops import TorchOps


@pytest.mark.each_value
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17, 33, 64])
@pytest.mark.parametrize(
    "config", [TileConfig(64, 64, 3), TileConfig(64, 128, 3, split=3), TileConfig(128, 128, 2, split=2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_pytorch(num_tokens: int, config: TileConfig, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(num_tokens, 512, device=device).to(dtype)
    weight = torch.randn(97, 512, device=device).to(dtype)
    add = torch.randn(num_tokens, 97, device=device).to(dtype)
    scratch = Scratch(device)
    wanted = x.double() @ weight.double().T
    for _ in range(2):  # the second time finds the counters as the first left them
        for extra, total in ((None, wanted), (add, wanted + add.double())):
            got = skinny_linear(x, weight, config, scratch, extra)
            assert (got.double() - total).norm() / total.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
    assert not scratch.arrived.any()


@pytest.mark.each_value
@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize("config", [TileConfig(64, 64, 3), TileConfig(64, 128, 3, split=3), TileConfig(128, 128, 2)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_between_two_products(num_tokens: int, config: TileConfig, gated: bool, device: torch.device) -> None:
    """Half of it in the first one, half in the second; their widths fill no tile evenly."""
    ops, scratch = TorchOps(device, torch.float64), Scratch(device)
    x = torch.randn(num_tokens, 512, device=device)
    add, norm = 3 * torch.randn(num_tokens, 640, device=device), 1 + torch.randn(640, device=device)
    first, second = (torch.randn(n, k, device=device) / k**0.5 for n, k in ((640, 512), (208, 640)))
    total, normed = skinny_normed(x, first, config, scratch, add, norm, 1e-3)
    wanted = x.double() @ first.double().T + add
    close(total, wanted)
    product = ops.rms_norm(wanted, norm, 1e-3) @ second.double().T
    if gated:
        close(skinny_gated(normed, second[interleaved_rows(208, device)], config, scratch), ops.silu_mul(product))
    else:
        close(skinny_linear(normed, second, config, scratch), product)
    assert not scratch.arrived.any()


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    assert (got.double() - wanted).norm() / wanted.norm() < 1e-5


def test_stripes() -> None:
    rows = interleaved_rows(64, torch.device("cpu")).tolist()
    assert rows[:24] == [*range(8), *range(32, 40), *range(8, 16)]
    assert sorted(rows) == list(range(64))


def test_the_same_bits_in_any_company(device: torch.device) -> None:
    x = torch.randn(16, 1024, device=device)
    weight, scratch = torch.randn(64, 1024, device=device), Scratch(device)
    together = skinny_linear(x, weight, TileConfig(64, 128, 3, split=3), scratch)
    alone = torch.cat([skinny_linear(row[None], weight, TileConfig(64, 128, 3, split=3), scratch) for row in x])
    assert torch.equal(together, alone)


def test_real_matrices_are_cut_to_fill_the_machine() -> None:
    assert tile_config(5120, 6144, 16) == TileConfig(64, 128, 6, prefetch=True)
    assert tile_config(16480, 5120, 16) == TileConfig(64, 128, 4, prefetch=True)
    assert tile_config(5120, 17408, 16) == TileConfig(64, 128, 6)  # long: nothing is gained by prefetching
    assert tile_config(16480, 5120, 64) == TileConfig(128, 128, 4)
    assert tile_config(2560, 4096, 64) is None  # narrow: the library
    assert tile_config(5120, 6144, 65) is None
    assert tile_config(100, 300, 1) is None
    for num_out in (576, 2048, 2560, 5120, 9216, 34816, 248320):
        config = tile_config(num_out, 2560, 16)
        assert config is not None
        assert config.split == 1 or -(-num_out // config.rows) * config.split <= 132


def test_a_smaller_gpu_has_fewer_steps_in_flight() -> None:
    config = TileConfig(64, 256, 5)
    assert fitted(config, 16, 2, HOPPER) == config
    assert fitted(config, 16, 2, replace(HOPPER, shared_bytes=99 << 10)) == TileConfig(64, 256, 2)
    assert fitted(config, 16, 2, ADA) == TileConfig(64, 256, 3)  # one of them is in registers
    assert fitted(config, 64, 2, replace(HOPPER, shared_bytes=64 << 10)) is None
