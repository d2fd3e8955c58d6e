"""Experts by the FP8 tensor cores: each product of a pair against PyTorch on the operands as they were rounded."""

from __future__ import annotations

import pytest
import torch
from test_moe import some_padding
from test_products_fp8 import coded_weights, rounded
from torch import Tensor

from slipstream.runners.cuda.kernels.moe import experts_fp8
from slipstream.runners.cuda.kernels.moe.experts_fp8 import fp8_expert_pairs
from slipstream.runners.cuda.kernels.quant.activations import Fp8Activations, quantized_activations
from slipstream.runners.cuda.kernels.quant.fp8 import BYTES, Fp8Matrix, quantize

# Of a product's length, as in test_products_fp8.py; of what is between the products, the gate's error adds to it.
TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 8e-3}
# tokens, experts, active, hidden, inner: one token, a block of them, and several blocks of pairs of each size.
SIZES = [(1, 4, 2, 256, 128), (5, 4, 3, 384, 256), (17, 4, 2, 128, 256), (90, 2, 1, 384, 128), (150, 1, 1, 128, 128)]


def stack(count: int, num_rows: int, width: int, device: torch.device) -> Fp8Matrix:
    weights = torch.randn(count * num_rows, width, device=device) / width**0.5
    return quantize([weights], weights.shape, device, BYTES)


def products(matrix: Fp8Matrix, values: Tensor, expert: Tensor, count: int) -> Tensor:
    """Of each pair's values and its expert's rows. float64 [pairs, rows of an expert]"""
    weights = coded_weights(matrix).view(count, -1, matrix.width)
    return (weights[expert] @ values[..., None])[..., 0]


def off(got: Tensor, wanted: Tensor) -> float:
    return float((got.cpu().double() - wanted).norm() / wanted.norm())


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second product of what the first one made: where that differs a little, it may round to the code beside."""
    rounds: list[Tensor] = []

    def round_and_keep(x: Tensor) -> Fp8Activations:
        rounds.append(x)
        return quantized_activations(x)

    monkeypatch.setattr(experts_fp8, "quantized_activations", round_and_keep)
    gate_up, down = stack(num_experts, 2 * inner, hidden, device), stack(num_experts, hidden, inner, device)
    x = torch.randn(num_tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    expert = torch.rand(num_tokens, num_experts).argsort(-1)[:, :num_active].int().contiguous().to(device)
    positions = some_padding(device, num_tokens)
    made = fp8_expert_pairs(x, gate_up, down, expert, positions)
    [_, between], real = rounds, positions >= 0
    own = expert[real].flatten().cpu()
    activated, got = (each.view(*expert.shape, -1)[real].flatten(0, 1) for each in (between, made))
    gate, up = products(gate_up, rounded(x[real]).repeat_interleave(num_active, 0), own, num_experts).chunk(2, dim=1)
    assert off(activated, torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]
    assert off(got, products(down, rounded(activated), own, num_experts)) < TOLERANCE[dtype]
