"""Experts by the FP8 tensor cores: each pair against PyTorch on the operands as they were rounded."""

from __future__ import annotations

import pytest
import torch
from test_moe import some_padding
from test_products_fp8 import coded_weights, rounded
from torch import Tensor

from slipstream.runners.cuda.kernels.moe.experts_fp8 import fp8_expert_pairs
from slipstream.runners.cuda.kernels.quant.fp8 import BYTES, Fp8Matrix, quantize

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}  # what is between the products may round the other way
# tokens, experts, active, hidden, inner: one token, a block of them, and several blocks of pairs of each size.
SIZES = [(1, 4, 2, 256, 128), (5, 4, 3, 384, 256), (17, 4, 2, 128, 256), (90, 2, 1, 384, 128), (150, 1, 1, 128, 128)]


def stack(count: int, num_rows: int, width: int, device: torch.device) -> Fp8Matrix:
    weights = torch.randn(count * num_rows, width, device=device) / width**0.5
    return quantize([weights], weights.shape, device, BYTES)


def reference(x: Tensor, gate_up: Fp8Matrix, down: Fp8Matrix, expert: Tensor, count: int) -> Tensor:
    """float64 [tokens, active, hidden]"""
    ups, downs = (coded_weights(each).view(count, -1, each.width) for each in (gate_up, down))
    tokens, made = rounded(x), []
    for token, chosen in enumerate(expert.tolist()):
        for each in chosen:
            gate, up = (ups[each] @ tokens[token]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            made.append(downs[each] @ rounded(inner[None].to(x.dtype).to(x.device))[0])
    return torch.stack(made).view(*expert.shape, -1)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active", "hidden", "inner"), SIZES)
def test_equals_pytorch_on_rounded_operands(
    num_tokens: int,
    num_experts: int,
    num_active: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    gate_up, down = stack(num_experts, 2 * inner, hidden, device), stack(num_experts, hidden, inner, device)
    x = torch.randn(num_tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    expert = torch.rand(num_tokens, num_experts).argsort(-1)[:, :num_active].int().contiguous().to(device)
    positions = some_padding(device, num_tokens)
    got = fp8_expert_pairs(x, gate_up, down, expert, positions).cpu().double()
    wanted, real = reference(x, gate_up, down, expert, num_experts), positions.cpu() >= 0
    assert (got[real] - wanted[real]).norm() / wanted[real].norm() < TOLERANCE[dtype]
