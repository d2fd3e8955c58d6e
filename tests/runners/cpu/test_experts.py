"""Routed experts in C: right by the reference, and the same bits for a token whatever tokens share its batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.experts import PackedExperts
from slipstream.runners.cpu.formats import PackedLinear
from slipstream.runners.cpu.ops import CpuOps
from slipstream.runners.torch.experts import Addends, ExpertList

EXPERTS, ACTIVE, INNER = 12, 3, 64


def packed(kernels: Kernels, form: str, rows: int, cols: int) -> list[PackedLinear]:
    pack = kernels.quantize_w8 if form == "w8" else kernels.pack_float
    return [PackedLinear(kernels, pack(torch.randn(rows, cols) / cols**0.5)) for _ in range(EXPERTS)]


def addends(num_tokens: int, hidden: int) -> Addends:
    return Addends(torch.randn(num_tokens, hidden), torch.randn(num_tokens, hidden), torch.randn(num_tokens, 1))


def row(given: Addends, i: int) -> Addends:
    return Addends(given.residual[i : i + 1], given.shared[i : i + 1], given.shared_gate[i : i + 1])


@pytest.mark.parametrize(("form", "hidden"), [("w8", 96), ("f32", 100)])
def test_they_equal_the_reference(any_kernels: Kernels, form: str, hidden: int) -> None:
    up, down = (packed(any_kernels, form, *shape) for shape in ((2 * INNER, hidden), (hidden, INNER)))
    experts = PackedExperts(any_kernels, [each.weight for each in up], [each.weight for each in down])
    x, scores, given = torch.randn(40, hidden), torch.randn(40, EXPERTS), addends(40, hidden)
    wanted = ExpertList(up, down, CpuOps(any_kernels))(x, scores, ACTIVE, given, None)
    torch.testing.assert_close(experts(x, scores, ACTIVE, given, None), wanted, atol=1e-5, rtol=1e-5)


def test_a_token_has_the_same_bits_in_any_batch(any_kernels: Kernels) -> None:
    hidden = 96
    up, down = (packed(any_kernels, "w8", *shape) for shape in ((2 * INNER, hidden), (hidden, INNER)))
    experts = PackedExperts(any_kernels, [each.weight for each in up], [each.weight for each in down])
    x, scores, given = torch.randn(70, hidden), torch.randn(70, EXPERTS), addends(70, hidden)
    scores[:, 0] = 3.0  # one expert that every token wants
    whole = experts(x, scores, ACTIVE, given, None)
    for i in range(0, 70, 7):
        alone = experts(x[i : i + 1], scores[i : i + 1], ACTIVE, row(given, i), None)
        assert torch.equal(alone[0], whole[i])


def chosen(kernels: Kernels, scores: Tensor, num_active: int) -> Tensor:
    """Which expert a token took: expert e answers e + 1 everywhere. [tokens]"""
    up = [kernels.pack_float(torch.ones(2, 4)) for _ in range(scores.shape[1])]
    down = [kernels.pack_float(torch.full((4, 1), float(e + 1))) for e in range(scores.shape[1])]
    x = torch.ones(scores.shape[0], 4)
    nothing = Addends(torch.zeros_like(x), torch.zeros_like(x), torch.zeros(scores.shape[0], 1))
    silu = 4.0 * torch.sigmoid(torch.tensor(4.0)) * 4.0
    return PackedExperts(kernels, up, down)(x, scores, num_active, nothing, None)[:, 0] / silu


def test_of_equal_scores_the_lower_expert_is_taken(kernels: Kernels) -> None:
    scores = torch.tensor([[1.0, 5.0, 5.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(chosen(kernels, scores, 1), torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(chosen(kernels, scores, 2), torch.tensor([2.5, 1.5]))
