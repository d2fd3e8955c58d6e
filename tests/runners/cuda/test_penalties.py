"""Penalties and bias: the kernels against the processors, position by position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.runners.cuda.kernels.sampling.penalties import add_bias, penalise
from slipstream.runners.torch.sampling.processors import CountPenalty, History, LogitBias, RepetitionPenalty

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2}
MAX_TOKENS = 1500

# repetition, presence, frequency; per slot
PENALTIES = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.7, 0.3), (0.8, 0.0, -0.2), (1.2, 1.5, 0.1)]


def histories(device: torch.device, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Few distinct tokens, so that they repeat; after a history there are no tokens. int32"""
    tokens = torch.randint(vocab_size, (len(PENALTIES), 60), dtype=torch.int32)
    tokens = tokens.gather(1, torch.randint(60, (len(PENALTIES), MAX_TOKENS)))
    num_prompt = torch.tensor([5, 0, 1100, 40, 1400], dtype=torch.int32)
    return tokens.to(device), num_prompt.to(device)


def reference(logits: Tensor, slot: int, history: History) -> Tensor:
    repetition, presence, frequency = PENALTIES[slot]
    want = logits.clone()
    RepetitionPenalty(repetition)(want, history)
    CountPenalty(presence, frequency)(want, history)
    return want


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("vocab_size", [77, 5003, 17000])
def test_penalise_equals_the_processors(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    tokens, num_prompt = histories(device, vocab_size)
    slots = torch.tensor([4, 1, -1, 0, 4, 2, 3, 2, 4], dtype=torch.int32)
    ends = torch.tensor([1450, 1499, 3, 9, 1400, 1101, 700, 900, 20], dtype=torch.int32)
    logits = 4 * torch.randn(len(slots), vocab_size + 2, device=device).to(dtype)[:, 2:]
    before = logits.clone()
    repetition, presence, frequency = torch.tensor(PENALTIES, device=device).t().contiguous()
    penalise(logits, slots.to(device), ends.to(device), tokens, num_prompt, repetition, presence, frequency)
    for i, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist(), strict=True)):
        want = before[i]
        if slot >= 0:
            want = reference(before[i], slot, History(tokens[slot, :end].long(), int(num_prompt[slot])))
        torch.testing.assert_close(logits[i], want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(logits[2:4], before[2:4])  # padding, and a slot that asks for nothing
    assert not torch.equal(logits[5], before[5])


def test_each_draft_sees_the_drafts_before_it(device: torch.device) -> None:
    tokens = torch.tensor([[3, 5, 5, 9]], dtype=torch.int32, device=device)
    off, frequency = torch.ones(1, device=device), torch.full((1,), 0.25, device=device)
    logits = torch.zeros(4, 12, device=device)
    ends = torch.arange(1, 5, dtype=torch.int32, device=device)
    slots = torch.zeros(4, dtype=torch.int32, device=device)
    penalise(logits, slots, ends, tokens, slots[:1] + 1, off, torch.zeros_like(off), frequency)
    assert logits[:, [3, 5, 9]].tolist() == [[0, 0, 0], [0, -0.25, 0], [0, -0.5, 0], [0, -0.5, -0.25]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_add_bias(device: torch.device, dtype: torch.dtype) -> None:
    vocab_size, max_bias = 900, 300
    bias_tokens = torch.stack([torch.randperm(vocab_size)[:max_bias] for _ in range(3)]).int().to(device)
    bias_values = 5 * torch.randn(3, max_bias, device=device)
    num_bias = torch.tensor([0, 3, max_bias], dtype=torch.int32, device=device)
    logits = torch.randn(5, vocab_size, device=device).to(dtype)
    want, slots = logits.clone(), [2, -1, 1, 0, 2]
    for row, slot in zip(want, slots, strict=True):
        if slot >= 0:
            n = int(num_bias[slot])
            LogitBias(bias_tokens[slot, :n].long(), bias_values[slot, :n])(row, History(row[:0].long(), 0))
    add_bias(logits, torch.tensor(slots, dtype=torch.int32, device=device), bias_tokens, bias_values, num_bias)
    tolerance = 0.0 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logits, want, rtol=tolerance, atol=tolerance)
