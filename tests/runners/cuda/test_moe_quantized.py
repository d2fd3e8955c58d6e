"""Experts in few bits: each pair against PyTorch on the weights that the bits stand for."""

from __future__ import annotations

import pytest
import torch
from test_fused_layers import stands_for
from test_linear_fp8 import raw, values
from test_moe import reference_pairs, some_padding
from torch import Tensor

from slipstream.load.tensor import FP8_WIDE
from slipstream.runners.cuda.kernels.moe.experts_quantized import quantized_expert_pairs
from slipstream.runners.cuda.model.ops import CudaOps
from slipstream.runners.cuda.model.quantized import CudaStoredFormat, QuantizedExperts, quantized_format

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
# tokens, experts, active, hidden, inner: widths that fill no tile evenly, a block of tokens, and several of pairs.
SIZES = [(1, 4, 2, 256, 128), (5, 4, 3, 328, 136), (17, 4, 2, 128, 256), (90, 2, 1, 264, 72), (150, 1, 1, 128, 128)]


def made(kind: str, dtype: torch.dtype, device: torch.device, count: int, hidden: int, inner: int) -> QuantizedExperts:
    form = quantized_format(CudaOps(device, dtype), kind)
    gate_up = torch.randn(count, 2 * inner, hidden, device=device) / hidden**0.5
    experts = form.dense_experts(gate_up, torch.randn(count, hidden, inner, device=device) / inner**0.5)
    assert isinstance(experts, QuantizedExperts)
    assert experts.gate_up.kind == experts.down.kind == kind
    return experts


def stacks(experts: QuantizedExperts, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up, down = (stands_for(matrix, dtype).float() for matrix in (experts.gate_up, experts.down))
    return gate_up.view(count, -1, gate_up.shape[1]), down.view(count, -1, down.shape[1])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active", "hidden", "inner"), SIZES)
def test_equals_pytorch(
    kind: str,
    dtype: torch.dtype,
    num_tokens: int,
    num_experts: int,
    num_active: int,
    hidden: int,
    inner: int,
    device: torch.device,
) -> None:
    if kind == "fp8":
        hidden, inner = -(-hidden // 128) * 128, -(-inner // 128) * 128
    experts = made(kind, dtype, device, num_experts, hidden, inner)
    x = torch.randn(num_tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    expert = torch.rand(num_tokens, num_experts).argsort(-1)[:, :num_active].int().contiguous().to(device)
    positions = some_padding(device, num_tokens)
    got = quantized_expert_pairs(x, experts.gate_up, experts.down, expert, positions)
    wanted = reference_pairs(x, *stacks(experts, num_experts, dtype), expert)
    real = positions >= 0
    off = (got[real].float() - wanted[real]).norm() / wanted[real].norm()
    assert off < TOLERANCE[dtype]


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_scales_in_float32(num_tokens: int, device: torch.device) -> None:
    form = CudaStoredFormat(CudaOps(device, torch.bfloat16))
    parts = [[raw(2 * 128, 256, FP8_WIDE)] for _ in range(3)], [[raw(256, 128, FP8_WIDE)] for _ in range(3)]
    experts = form.experts(*parts)
    assert isinstance(experts, QuantizedExperts)
    x, expert = torch.randn(num_tokens, 256, device=device).bfloat16(), torch.rand(num_tokens, 3).argsort(-1)[:, :2]
    positions = some_padding(device, num_tokens)
    got = experts.pairs(x, expert.int().contiguous().to(device), positions)
    floats = [torch.stack([values(part).float() for [part] in matrices]).to(device) for matrices in parts]
    wanted = reference_pairs(x, *floats, expert.to(device))
    real = positions >= 0
    assert (got[real].float() - wanted[real]).norm() / wanted[real].norm() < TOLERANCE[torch.bfloat16]


def test_matrices_that_do_not_fit_stay_as_they_are(device: torch.device) -> None:
    form = quantized_format(CudaOps(device, torch.float32), "fp8")
    stays = form.dense_experts(torch.randn(2, 80, 128), torch.randn(2, 128, 40))
    assert not isinstance(stays, QuantizedExperts)
