"""The routed MLP: router, experts and their sum against plain PyTorch, with padding tokens and idle experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.runners.cuda.kernels.moe.experts import combine, expert_pairs, experts_mlp, route
from slipstream.runners.cuda.kernels.moe.groups import group

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def experts_of(
    device: torch.device, dtype: torch.dtype, num_experts: int, hidden: int, inner: int
) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(num_experts, 2 * inner, hidden, device=device) / hidden**0.5
    down = torch.randn(num_experts, hidden, inner, device=device) / inner**0.5
    return gate_up.to(dtype), down.to(dtype)


def reference_pairs(x: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor) -> Tensor:
    """In float32. [tokens, active, hidden]"""
    chosen = expert.long()
    gate, up = torch.einsum("th,tamh->tam", x.float(), gate_up.float()[chosen]).chunk(2, dim=-1)
    return torch.einsum("tai,tahi->tah", torch.nn.functional.silu(gate) * up, down.float()[chosen])


def some_padding(device: torch.device, num_tokens: int) -> Tensor:
    positions = torch.arange(num_tokens, dtype=torch.int32)
    positions[1::4] = -1
    return positions.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active"), [(1, 4, 2), (5, 7, 3), (3, 256, 8), (9, 6, 6)])
def test_route(device: torch.device, dtype: torch.dtype, num_tokens: int, num_experts: int, num_active: int) -> None:
    scores = 2 * torch.randn(num_tokens, num_experts + 1, device=device)
    ranks = torch.rand_like(scores).argsort(-1)  # distinct in bfloat16 too
    scores = (scores.sort(-1).values.gather(-1, ranks) + ranks / 8).to(dtype)[:, :num_experts]
    expert, share = route(scores, num_active)
    # Of equals the lowest first, which a sort on a GPU does not promise.
    order = scores.float().cpu().argsort(dim=-1, descending=True, stable=True)[:, :num_active]
    want_share = scores.float().softmax(-1).cpu().gather(-1, order)
    assert expert.tolist() == order.tolist()
    torch.testing.assert_close(share.cpu(), want_share / want_share.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)


def test_route_prefers_the_lowest_of_equals(device: torch.device) -> None:
    expert, share = route(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]], device=device), 3)
    assert expert.tolist() == [[1, 3, 0]]
    assert share.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active", "block_size"), [(23, 5, 2, 16), (700, 7, 2, 32)])
def test_groups_hold_every_real_pair_once(
    device: torch.device, num_tokens: int, num_experts: int, num_active: int, block_size: int
) -> None:
    scores = torch.rand(num_tokens, num_experts)
    scores[:, 3] = -1.0  # an expert nobody asks for
    expert = scores.argsort(-1, descending=True)[:, :num_active].int().to(device)
    positions = some_padding(device, num_tokens)
    groups = group(expert.contiguous(), positions, num_experts, block_size)
    rows = groups.pairs.view(groups.num_blocks, block_size).tolist()
    seen = []
    for own, row in zip(groups.experts.tolist(), rows, strict=True):
        pairs = [pair for pair in row if pair >= 0] if own >= 0 else []
        assert pairs == sorted(pairs)
        assert all(expert.view(-1)[pair] == own for pair in pairs)
        assert own < 0 or pairs
        seen += pairs
    real = (positions >= 0).repeat_interleave(num_active).nonzero()[:, 0]
    assert sorted(seen) == real.tolist()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_active", "hidden", "inner"),
    [(1, 4, 2, 32, 16), (5, 8, 2, 32, 48), (16, 8, 2, 100, 40), (17, 8, 2, 32, 16), (45, 4, 2, 136, 72)],
)
def test_experts_mlp(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    num_experts: int,
    num_active: int,
    hidden: int,
    inner: int,
) -> None:
    gate_up, down = experts_of(device, dtype, num_experts, hidden, inner)
    x = torch.randn(num_tokens, hidden + 3, device=device).to(dtype)[:, 3:]
    positions = some_padding(device, num_tokens)
    expert, share = route(torch.randn(num_tokens, num_experts, device=device), num_active)
    got = experts_mlp(x, gate_up, down, expert, share, positions)
    want = (reference_pairs(x, gate_up, down, expert) * share[..., None]).sum(1)
    want[positions < 0] = 0.0
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_tokens", [30, 100])
def test_many_pairs_an_expert(device: torch.device, num_tokens: int) -> None:
    """The tiles of long prompts."""
    gate_up, down = experts_of(device, torch.bfloat16, 2, 32, 24)
    x = torch.randn(num_tokens, 32, device=device).bfloat16()
    expert, share = route(torch.randn(num_tokens, 2, device=device), 2)
    positions = some_padding(device, num_tokens)
    got = experts_mlp(x, gate_up, down, expert, share, positions)
    want = (reference_pairs(x, gate_up, down, expert) * share[..., None]).sum(1)
    want[positions < 0] = 0.0
    torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("num_tokens", [7, 40])
def test_padding_reads_no_weights(device: torch.device, num_tokens: int) -> None:
    """Only padding asks for expert 2, whose matrices are poisoned; its own inputs are, too."""
    gate_up, down = experts_of(device, torch.float32, 4, 32, 16)
    gate_up[2], down[2] = float("nan"), float("nan")
    positions = some_padding(device, num_tokens)
    expert = torch.tensor([[0, 3]], dtype=torch.int32, device=device).repeat(num_tokens, 1)
    expert[positions < 0] = 2
    x = torch.randn(num_tokens, 32, device=device)
    x[positions < 0] = float("nan")
    share = torch.full((num_tokens, 2), 0.5, device=device)
    got = experts_mlp(x, gate_up, down, expert, share, positions)
    assert got.isfinite().all()
    assert (got[positions < 0] == 0.0).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(3, 300), (20, 77)])
def test_combine(device: torch.device, dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    pairs = torch.randn(num_tokens, 3, hidden, device=device).to(dtype)
    share = torch.rand(num_tokens, 3, device=device)
    gate = torch.randn(num_tokens, 9, device=device).to(dtype)[:, 8:]
    shared_out, add = torch.randn(2, num_tokens, hidden + 1, device=device).to(dtype)[..., 1:]
    positions = some_padding(device, num_tokens)
    pairs[positions < 0] = float("nan")
    got = combine(pairs, share, positions, shared_out, gate, add)
    want = add.float() + gate.float().sigmoid() * shared_out.float() + (pairs.float() * share[..., None]).sum(1)
    want[positions < 0] = 0.0
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_tokens", [6, 20])
def test_a_token_is_the_same_in_any_batch_of_its_kind(device: torch.device, num_tokens: int) -> None:
    gate_up, down = experts_of(device, torch.float32, 5, 32, 16)
    x = torch.randn(num_tokens, 32, device=device)
    expert, _ = route(torch.randn(num_tokens, 5, device=device), 2)
    positions = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    order = torch.randperm(num_tokens, device=device)
    together = expert_pairs(x, gate_up, down, expert, positions)
    shuffled = expert_pairs(x[order], gate_up, down, expert[order].contiguous(), positions)
    if device.type == "cuda":
        assert torch.equal(shuffled, together[order])
    else:  # the interpreter multiplies with a library that may add a row's terms in another order at another place
        rounding = (32 + 16) * torch.finfo(torch.float32).eps  # of as many terms, of numbers around one
        torch.testing.assert_close(shuffled, together[order], rtol=0, atol=rounding)
