"""Choosing tokens: the kernels against the reference operations, token for token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.runners.cuda.kernels.sampling import sample
from slipstream.runners.cuda.kernels.sampling.sample import choose, choose_sure
from slipstream.runners.torch.ops import TorchOps
from slipstream.runners.torch.sampling.noise import signed64

NUM_SLOTS = 7
SIZES = [(1, 1), (5, 77), (3, 1024), (9, 5003), (2, 20001)]


def sampling_of(device: torch.device, num_positions: int) -> dict[str, Tensor]:
    seeds = torch.tensor([signed64(7919**i) for i in range(1, 4 * NUM_SLOTS, 4)])
    return {
        "slots": torch.randint(NUM_SLOTS, (num_positions,), dtype=torch.int32).to(device),
        "index": torch.randint(1 << 18, (num_positions,), dtype=torch.int32).to(device),
        "inv_temperature": torch.linspace(0.2, 1.5, NUM_SLOTS).to(device),
        "seeds": seeds.to(device),
        "greedy": (torch.arange(NUM_SLOTS) % 3 == 0).to(device),
    }


def reference(logits: Tensor, sampling: dict[str, Tensor]) -> Tensor:
    ops, slots = TorchOps(logits.device, logits.dtype), sampling["slots"].long()
    sampled = ops.gumbel_argmax(logits, sampling["inv_temperature"][slots], sampling["seeds"][slots], sampling["index"])
    return torch.where(sampling["greedy"][slots].bool(), ops.argmax(logits), sampled).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_positions", "vocab_size"), SIZES)
def test_tokens_equal_the_reference(
    device: torch.device, dtype: torch.dtype, num_positions: int, vocab_size: int
) -> None:
    logits = torch.randn(num_positions, vocab_size + 3, device=device, dtype=dtype)[:, 3:]
    sampling = sampling_of(device, num_positions)
    want = reference(logits, sampling)
    assert choose(logits, **sampling).tolist() == want.tolist()
    tokens, sure = choose_sure(logits, **sampling)
    assert tokens.tolist() == want.tolist()
    torch.testing.assert_close(sure, TorchOps(device, dtype).confidence(logits), rtol=3e-5, atol=1e-7)


@pytest.mark.parametrize("num_programs", [1, 6, 100])
def test_any_number_of_programs_draws_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_programs: int
) -> None:
    """How much a program reads depends on how many positions there are: the sampled token must not."""
    monkeypatch.setattr(sample, "_PROGRAMS", num_programs)
    logits, sampling = torch.randn(5, 5003, device=device), sampling_of(device, 5)
    assert choose(logits, **sampling).tolist() == reference(logits, sampling).tolist()


@pytest.mark.parametrize("num_programs", [1, 512])
@pytest.mark.parametrize("vocab_size", [50, 2049, 9000])
def test_of_equals_the_lowest_id(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, vocab_size: int, num_programs: int
) -> None:
    monkeypatch.setattr(sample, "_PROGRAMS", num_programs)
    logits, sampling = torch.zeros(2, vocab_size, device=device), sampling_of(device, 2)
    sampling["greedy"] = torch.ones_like(sampling["greedy"])
    logits[1, [vocab_size - 1, vocab_size // 2, 17]] = 1.0
    assert choose(logits, **sampling).tolist() == [0, 17]


def test_padding_is_token_zero(device: torch.device) -> None:
    logits, sampling = torch.randn(3, 1500, device=device), sampling_of(device, 3)
    want = reference(logits, sampling).tolist()
    sampling["slots"][1] = -1
    tokens, sure = choose_sure(logits, **sampling)
    assert tokens.tolist() == [want[0], 0, want[2]]
    assert sure[1] == 0.0


def test_masked_logits_are_never_chosen(device: torch.device) -> None:
    logits, sampling = torch.full((4, 3000), float("-inf"), device=device), sampling_of(device, 4)
    logits[:, 2500] = -5.0
    tokens, sure = choose_sure(logits, **sampling)
    assert tokens.tolist() == [2500] * 4
    torch.testing.assert_close(sure, torch.ones_like(sure))
    nothing = torch.full((2, 3000), float("-inf"), device=device)
    assert choose(nothing, **sampling_of(device, 2)).tolist() == [0, 0]


def test_a_row_of_nan_gives_a_token(device: torch.device) -> None:
    tokens = choose(torch.full((2, 1100), float("nan"), device=device), **sampling_of(device, 2))
    assert all(0 <= token < 1100 for token in tokens.tolist())
