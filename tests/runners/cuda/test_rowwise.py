"""Norms and the gated activation against plain PyTorch, at odd sizes and strides."""

from __future__ import annotations

import pytest
import torch

from slipstream.runners.cuda.kernels.elementwise import silu_mul
from slipstream.runners.cuda.kernels.gather import gather_rows
from slipstream.runners.cuda.kernels.norm import concat_norm, rms_norm
from slipstream.runners.torch.ops import TorchOps

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
EPS = 1e-5


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float32, so that nothing but the kernel's own rounding differs."""
    return TorchOps(x.device, torch.float32).rms_norm(x.float(), weight, EPS)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (3, 5120), (17, 77), (2, 3, 128), (2, 2, 3, 40)], ids=str)
def test_rms_norm(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, device=device, dtype=dtype), torch.randn(shape[-1], device=device)
    got = rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    assert got.is_contiguous()
    close(got, norm(x, weight))


def test_rms_norm_where_it_is_wanted(device: torch.device) -> None:
    x, weight, buffer = (
        torch.randn(3, 77, device=device),
        torch.randn(77, device=device),
        torch.zeros(4, 77, device=device),
    )
    rms_norm(x, weight, EPS, out=buffer[:3])
    close(buffer[:3], norm(x, weight))
    assert not buffer[3].any()


@pytest.mark.parametrize("width", [64, 80])
def test_rms_norm_of_a_slice(device: torch.device, width: int) -> None:
    wide, weight = torch.randn(5, 3 * width + 7, device=device), torch.randn(width, device=device)
    close(rms_norm(wide[:, 7 : 7 + width], weight, EPS), norm(wide[:, 7 : 7 + width], weight))
    heads = wide[:, 7 : 7 + 2 * width].view(5, 2, width)
    close(rms_norm(heads, weight, EPS), norm(heads, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 576), (3, 77), (17, 130)])
def test_concat_norm(device: torch.device, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    a = torch.randn(num_tokens, width + 3, device=device, dtype=dtype)[:, 3:]
    b = torch.randn(num_tokens, 2 * width, device=device, dtype=dtype)[:, width:]
    weight_a, weight_b = torch.randn(2, width, device=device)
    got = concat_norm(a, weight_a, b, weight_b, EPS)
    assert got.dtype == dtype
    close(got, torch.cat([norm(a, weight_a), norm(b, weight_b)], dim=-1))


@pytest.mark.parametrize("ids_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("num_ids", "width"), [(1, 576), (3, 77), (17, 1100)])
def test_gather_rows(device: torch.device, ids_type: torch.dtype, num_ids: int, width: int) -> None:
    table = torch.randn(11, width + 5, device=device).bfloat16()[:, 5:]
    ids = torch.randint(11, (num_ids,), device=device, dtype=ids_type)
    assert torch.equal(gather_rows(table, ids), table[ids.long()])
    out = torch.zeros(num_ids + 1, width, device=device).bfloat16()
    gather_rows(table, ids, out=out[:num_ids])
    assert torch.equal(out[:num_ids], table[ids.long()])
    assert not out[num_ids].any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1536), (3, 77), (17, 1100)])
def test_silu_mul(device: torch.device, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    gate_up = 3 * torch.randn(num_tokens, 2 * width + 5, device=device, dtype=dtype)[:, 5:]
    got = silu_mul(gate_up)
    assert got.dtype == dtype
    assert got.shape == (num_tokens, width)
    close(got, TorchOps(device, torch.float32).silu_mul(gate_up.float()))


def test_silu_mul_of_stripes(device: torch.device) -> None:
    gate, up = torch.randn(2, 3, 24, device=device)
    interleaved = torch.stack([gate.view(3, 3, 8), up.view(3, 3, 8)], dim=2).view(3, 48)
    assert torch.equal(silu_mul(interleaved, 8), silu_mul(torch.cat([gate, up], dim=1)))


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # numpy warns in the interpreter; inf is right
def test_silu_mul_of_huge_gates(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 2.0, 3.0]], device=device)
    assert silu_mul(gate_up).tolist() == [[0.0, 600.0]]
