"""The product for few tokens against PyTorch, split and not, with odd numbers of rows."""

from __future__ import annotations

import pytest
import torch

from slipstream.runners.torch.cuda.kernels.linear import Scratch, Tiling, fitted, skinny_linear, tiling


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17, 33, 64])
@pytest.mark.parametrize("cut", [Tiling(64, 64, 3), Tiling(64, 128, 3, split=3), Tiling(128, 128, 2, split=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_pytorch(num_tokens: int, cut: Tiling, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(num_tokens, 512, device=device).to(dtype)
    weight = torch.randn(97, 512, device=device).to(dtype)
    add = torch.randn(num_tokens, 97, device=device).to(dtype)
    scratch = Scratch(device)
    wanted = x.double() @ weight.double().T
    for _ in range(2):  # the second time finds the counters as the first left them
        for beside, total in ((None, wanted), (add, wanted + add.double())):
            got = skinny_linear(x, weight, cut, scratch, beside)
            assert (got.double() - total).norm() / total.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
    assert not scratch.arrived.any()


def test_the_same_bits_in_any_company(device: torch.device) -> None:
    x = torch.randn(16, 1024, device=device)
    weight, scratch = torch.randn(64, 1024, device=device), Scratch(device)
    together = skinny_linear(x, weight, Tiling(64, 128, 3, split=3), scratch)
    alone = torch.cat([skinny_linear(row[None], weight, Tiling(64, 128, 3, split=3), scratch) for row in x])
    assert torch.equal(together, alone)


def test_real_matrices_are_cut_to_fill_the_machine() -> None:
    assert tiling(5120, 6144, 16) == Tiling(64, 128, 6)
    assert tiling(16480, 5120, 16) == Tiling(64, 128, 4)
    assert tiling(16480, 5120, 64) == Tiling(128, 128, 4)
    assert tiling(2560, 4096, 64) is None  # narrow: the library
    assert tiling(5120, 6144, 65) is None
    assert tiling(100, 300, 1) is None
    for num_out in (576, 2048, 2560, 5120, 9216, 34816, 248320):
        cut = tiling(num_out, 2560, 16)
        assert cut is not None
        assert cut.split == 1 or -(-num_out // cut.rows) * cut.split <= 132


def test_a_smaller_gpu_has_fewer_steps_in_flight() -> None:
    cut = Tiling(64, 256, 5)
    assert fitted(cut, 16, 2, 227 * 1024) == cut
    assert fitted(cut, 16, 2, 99 * 1024) == Tiling(64, 256, 2)
    assert fitted(cut, 64, 2, 64 * 1024) is None
