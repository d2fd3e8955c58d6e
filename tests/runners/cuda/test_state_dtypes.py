"""Recurrent states that are stored in 16 bits: rounded after every token, or after every chunk of a prompt."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from rounded_states import as_stored, rounding_steps
from test_gdn import Both, relative_error, weights
from test_keeps import SLOTS, Chunks, Layer
from torch import Tensor

from slipstream.engine.contract import Keep
from slipstream.load.spec import GdnSpec
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch import gdn as reference

HALVES = [torch.float16, torch.bfloat16]
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("dtype", HALVES)
def test_rounded_after_every_token(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, drafts, rejections and replays. A sum in another order may be rounded to a neighbour, now and then."""
    monkeypatch.setattr(reference, "_steps", rounding_steps(lambda state: as_stored(state, dtype)))
    chance = random.Random(1)
    both = Both(weights(GdnSpec(1, 2, 16, 16, 4), torch.float32), torch.float32, device, dtype)
    for step in range(9):
        prompt = step < 2
        rows = [(s, chance.choice([1, 5, 13]) if prompt else 1, 0 if prompt else step % 4) for s in (0, 2)]
        spans = both.spans(rows)
        error, _ = both.step(spans, step % 2)
        slots = [span.slot for span in spans]
        stored = both.rings.state[slots]
        assert stored.dtype == dtype
        assert error < EPS[dtype] / 2, step
        assert (stored.cpu().float() == both.reference.state[slots]).float().mean() > 0.97, step
        for span in spans:
            both.accept(span, chance.randrange(span.num_drafts + 1))


# Of (start, committed tokens, drafts, replays): twelve tokens one by one, and with drafts of which some are right.
PLAIN = [(n, 1, 0, 0) for n in range(12)]
DRAFTED = [(0, 1, 3, 0), (3, 1, 2, 2), (6, 1, 3, 2), (10, 1, 1, 3), (11, 1, 0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_drafts_change_no_bit(dtype: torch.dtype, device: torch.device) -> None:
    layer = Layer(14, device, dtype)
    outputs = {}
    for slot, steps in ((0, PLAIN), (1, DRAFTED)):
        found: dict[int, Tensor] = {}
        for start, committed, drafts, replay in steps:
            keeps = (Keep(8, SLOTS + slot),)
            out = layer.step(RowSpan(slot, start, 0, committed, drafts, replay, keeps=keeps))
            found |= {start + i: row for i, row in enumerate(out)}
        outputs[slot] = torch.stack([found[position] for position in range(12)])
    assert torch.equal(outputs[0], outputs[1])
    for first, second in ((0, 1), (SLOTS, SLOTS + 1)):  # at the end, and those that were kept on the way
        assert torch.equal(layer.layer.state[first], layer.layer.state[second])
    assert layer.layer.state[0].abs().max() > 0


@pytest.mark.parametrize("dtype", HALVES)
def test_a_prompt_is_rounded_after_each_chunk(dtype: torch.dtype, device: torch.device) -> None:
    """So pieces that end where chunks do, a kept state among them, give the same bits as the whole."""
    chunks = Chunks(170, device, dtype)
    chunks.feed(0, 170, (Keep(64, 2), Keep(128, 3)))
    whole = chunks.state.clone()
    assert relative_error(whole[0, 0], chunks.stepped(170)) < 4 * EPS[dtype]
    for start, end, slot in ((0, 64, 2), (64, 128, 3), (128, 170, 0)):
        chunks.feed(start, end)
        assert torch.equal(chunks.state[0], whole[slot])


def test_float16_has_no_infinity(device: torch.device) -> None:
    """A state beyond its range, token by token and in chunks, and what another stream left there."""
    for num_tokens in (3, 40):
        layer = Layer(num_tokens + 1, device, torch.float16)
        layer.made = replace(layer.made, conv=torch.ones_like(layer.made.conv))
        gdn = layer.made.spec
        values = layer.inputs[:, 2 * gdn.num_k_heads * gdn.k_dim : gdn.conv_channels]
        values.copy_(values.abs() * 1e7)
        layer.step(RowSpan(0, 0, 0, num_tokens))
        assert layer.layer.state[0].abs().max() == 65504
        assert layer.step(RowSpan(0, num_tokens, 0, 1)).isfinite().all()
        assert layer.layer.state[0].isfinite().all()
