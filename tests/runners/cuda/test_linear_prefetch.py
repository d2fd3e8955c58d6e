"""The product that prefetches its first weights: as the one of linear.py, with all fused operations.

On a CPU its code runs on made-up parts of Gluon (gluon_on_cpu.py), which also watch what it reads before its wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gluon_on_cpu import Pdl, Pointer, Tiles, run
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from slipstream.runners.cuda.kernels.matmul import linear_prefetch
from slipstream.runners.cuda.kernels.matmul.linear import (
    Scratch,
    TileConfig,
    interleaved_rows,
    skinny_gated,
    skinny_linear,
    skinny_normed,
)
from slipstream.runners.cuda.model.linear import make_linear
from slipstream.runners.torch.ops import TorchOps

CONFIGS = [
    TileConfig(64, 128, 3, prefetch=True),
    TileConfig(64, 128, 2, split=3, prefetch=True),
    TileConfig(64, 128, 6, prefetch=True),
]


class OnCpu:
    """Stands in for a kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.names = kernel, list(inspect.signature(kernel.fn).parameters)
        self.num_launches = 0

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*given: Any, num_warps: int, **constants: Any) -> None:
            pdl = Pdl()
            arguments = {
                name: stand_in(value, pdl, constant=name in ("weight", "norm"))
                for name, value in zip(self.names, given, strict=False)
            }
            run(self.kernel, grid, arguments | constants | {"PDL": True}, pdl)
            self.num_launches += 1

        return launch


def stand_in(value: Any, pdl: Pdl, constant: bool) -> Any:
    if isinstance(value, Tensor):
        return Pointer(value.view(-1), pdl, constant)
    if hasattr(value, "block_shape"):
        return Tiles(value.base, value.block_shape, pdl, constant)
    return value


@pytest.fixture(autouse=True)
def _anywhere(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(linear_prefetch, "skinny_prefetch", OnCpu(linear_prefetch.skinny_prefetch))
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("made for compute capability 9")


def random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape).to(device, torch.bfloat16)


def close(got: Tensor, wanted: Tensor, tolerance: float = 6e-3) -> None:
    assert got.shape == wanted.shape
    assert (got.double() - wanted).norm() / wanted.norm() < tolerance


@pytest.mark.parametrize("num_tokens", [1, 5, 16])
@pytest.mark.parametrize("config", CONFIGS)
def test_equals_pytorch(num_tokens: int, config: TileConfig, device: torch.device) -> None:
    """Five steps of columns: fewer than a program has in flight, and more."""
    x, weight, add = random(device, num_tokens, 640), random(device, 97, 640), random(device, num_tokens, 97)
    scratch = Scratch(device)
    wanted = x.double() @ weight.double().T
    for _ in range(2):
        close(skinny_linear(x, weight, config, scratch), wanted)
        close(skinny_linear(x, weight, config, scratch, add), wanted + add.double())
    assert not scratch.arrived.any()


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_between_two_products(num_tokens: int, config: TileConfig, gated: bool, device: torch.device) -> None:
    ops, scratch = TorchOps(device, torch.float64), Scratch(device)
    x, add = random(device, num_tokens, 512), 3 * random(device, num_tokens, 640)
    norm = 1 + torch.randn(640).to(device)
    first, second = random(device, 640, 512) / 22, random(device, 208, 640) / 25
    total, normed = skinny_normed(x, first, config, scratch, add, norm, 1e-3)
    wanted = x.double() @ first.double().T + add
    close(total, wanted)
    product = ops.rms_norm(wanted, norm, 1e-3) @ second.double().T
    if gated:
        close(skinny_gated(normed, second[interleaved_rows(208, device)], config, scratch), ops.silu_mul(product), 0.02)
    else:
        close(skinny_linear(normed, second, config, scratch), product, 0.01)
    assert not scratch.arrived.any()


def test_only_where_it_runs(device: torch.device) -> None:
    """Not on a CPU, and not for other types; everywhere else the same tile config."""
    here = device.type == "cuda"
    for dtype, prefetch in ((torch.bfloat16, here), (torch.float16, False)):
        made = make_linear(torch.zeros(2560, 4096, device=device, dtype=dtype), None, Scratch(device))
        assert made.few is not None
        assert made.few == TileConfig(64, 128, 6, split=3, prefetch=prefetch)
