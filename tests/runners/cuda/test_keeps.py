"""States kept for other rows: equal to those of a row that stopped there, and taken from committed tokens only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_gdn import device_batch, on, relative_error, weights
from torch import Tensor
from torch.nn.functional import normalize

from slipstream.engine.contract import MAX_KEEPS, Keep
from slipstream.load.spec import GdnSpec
from slipstream.runners.cuda.kernels.recurrent.gdn import gdn_mix
from slipstream.runners.cuda.kernels.recurrent.gdn_chunks import recur_in_chunks
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.caches import CONV_KERNEL, GdnRings, ring_size

DEPTH = 3
SLOTS = 3
UNTOUCHED = 7.0
GDN = GdnSpec(1, 1, 16, 16, 4)


class Layer:
    """One layer and the inputs of one stream, by position. Slots 0 and 1 are rows, from SLOTS on states are kept."""

    def __init__(self, num_tokens: int, device: torch.device, states: torch.dtype = torch.float32) -> None:
        self.device = device
        self.made = weights(GDN, torch.float32)
        self.cache = GdnRings(GDN, 1, SLOTS, 4, DEPTH, device, torch.float32, states)
        self.layer = self.cache.layers[0]
        self.layer.state.fill_(UNTOUCHED)
        self.layer.ring.fill_(UNTOUCHED)
        width = GDN.conv_channels + GDN.num_v_heads * GDN.v_dim + 2 * GDN.num_v_heads
        self.inputs = torch.randn(num_tokens, width)

    def step(self, *spans: RowSpan, wrong_drafts: bool = False) -> Tensor:
        """The outputs of the spans' tokens. ``wrong_drafts``: they will be rejected."""
        mixed = []
        for span in spans:
            fed = self.inputs[span.start : span.start + span.num_fed].clone()
            if wrong_drafts:
                fed[span.num_committed :] += 1.0
            mixed.append(fed)
        has_prompts = any(span.num_fed > 1 + DEPTH for span in spans)
        batch = device_batch(list(spans), 1, self.device, has_prompts)
        caches = (self.layer.state, self.layer.ring)
        return gdn_mix(torch.cat(mixed).to(self.device), *on(self.device, self.made), *caches, batch)

    def untouched(self, slot: int) -> bool:
        return bool((self.layer.state[slot] == UNTOUCHED).all() and (self.layer.ring[slot] == UNTOUCHED).all())

    def check(self, slot: int, position: int) -> None:
        """The slot holds what a row has that stops at the position."""
        self.step(RowSpan(SLOTS - 1, 0, 0, position))
        assert relative_error(self.layer.state[slot], self.layer.state[SLOTS - 1].cpu()) < 1e-6
        window = [p % ring_size(DEPTH) for p in range(position - CONV_KERNEL + 1, position)]
        kept = self.layer.ring[slot, window, : GDN.conv_channels].cpu()
        assert torch.equal(kept, self.inputs[position - CONV_KERNEL + 1 : position, : GDN.conv_channels])


def test_several_in_a_step_of_a_short_row(device: torch.device) -> None:
    layer = Layer(12, device)
    keeps = (Keep(4, SLOTS + 2), Keep(8, SLOTS), Keep(12, SLOTS + 3), Keep(16, SLOTS + 1))
    other = RowSpan(1, 0, 12, 2)
    layer.step(RowSpan(0, 0, 0, 12, keeps=keeps), other)
    assert layer.untouched(SLOTS + 1)  # the row does not come so far
    for keep in keeps[:3]:
        assert keep.state is not None
        layer.check(keep.state, keep.position)


@pytest.mark.parametrize("num_right", [3, 1])
def test_while_decoding_drafts_are_kept_once_they_are_committed(num_right: int, device: torch.device) -> None:
    """The same keep is sent until the host has seen that it is passed, and once more."""
    layer = Layer(14, device)
    keeps = (Keep(8, SLOTS + 1),)
    layer.step(RowSpan(0, 0, 0, 5))
    layer.step(RowSpan(0, 5, 0, 1, 3, keeps=keeps), wrong_drafts=num_right < 3)
    assert layer.untouched(SLOTS + 1)  # position 8 lies among the drafts
    if num_right == 3:
        layer.step(RowSpan(0, 9, 0, 1, 0, num_replay=3, keeps=keeps))
    else:  # all were rejected
        layer.step(RowSpan(0, 6, 0, 1, 1, keeps=keeps))
        assert layer.untouched(SLOTS + 1)
        layer.step(RowSpan(0, 8, 0, 1, 2, num_replay=1, keeps=keeps))
    layer.check(SLOTS + 1, 8)
    start = 10 if num_right == 3 else 11
    layer.step(RowSpan(0, start, 0, 1, 2, num_replay=0 if num_right == 3 else 2, keeps=keeps))
    layer.check(SLOTS + 1, 8)


def test_a_row_goes_on_from_a_kept_state(device: torch.device) -> None:
    layer = Layer(12, device)
    wanted = layer.step(RowSpan(0, 0, 0, 12, keeps=(Keep(8, SLOTS),)))
    layer.cache.copy(SLOTS, 1)
    got = torch.cat([layer.step(RowSpan(1, 8, 0, 1, 2)), layer.step(RowSpan(1, 10, 0, 2, num_replay=1))])
    assert relative_error(got[[0, 1, 3, 4]], wanted[8:].cpu()) < 1e-6


# From here on the chunked recurrence by itself: without conv and norm, of as many tokens as it takes.


class Chunks:
    """The chunked recurrence over some tokens' inputs, in one slot; others are there to keep its states."""

    def __init__(self, num_tokens: int, device: torch.device, states: torch.dtype = torch.float32) -> None:
        self.device = device
        q, k = normalize(torch.randn(2, num_tokens, GDN.k_dim), dim=-1)
        self.inputs = torch.cat([q, k, torch.randn(num_tokens, GDN.v_dim)], dim=1)
        self.gates = torch.stack([-torch.rand(num_tokens, 1) * 0.1, torch.rand(num_tokens, 1)], dim=1)
        self.state = torch.full((5, 1, GDN.k_dim, GDN.v_dim), UNTOUCHED, device=device, dtype=states)

    def feed(self, start: int, end: int, keeps: tuple[Keep, ...] = (), num_replay: int = 0) -> None:
        fed, depth = end - start, max(1, num_replay)
        order = [*range(start, end), *range(start - num_replay, start), *[start] * (depth - num_replay)]
        padded = [*keeps, *[Keep(-1, 0)] * MAX_KEEPS][:MAX_KEEPS]
        rows = {
            "row_slots": [0],
            "row_offsets": [0],
            "row_starts": [start],
            "row_fed": [fed],
            "row_committed": [fed],
            "row_replay": [num_replay],
            "keep_positions": [keep.position for keep in padded],
            "keep_states": [keep.state for keep in padded],
        }
        batch = {name: torch.tensor(row, dtype=torch.int32, device=self.device) for name, row in rows.items()}
        inputs, gates = self.inputs[order].to(self.device), self.gates[order].to(self.device)
        out = torch.empty(fed, GDN.v_dim, device=self.device)
        shape = SimpleNamespace(num_rows=1, max_keeps=MAX_KEEPS, **batch)
        recur_in_chunks(inputs, gates, out, self.state, GDN, shape, depth)  # type: ignore[arg-type]

    def stepped(self, num_tokens: int) -> Tensor:
        """The state after so many tokens, one after the other, in float64."""
        state = torch.zeros(GDN.k_dim, GDN.v_dim, dtype=torch.float64)
        for inputs, (decay, beta) in zip(self.inputs[:num_tokens].double(), self.gates.double(), strict=False):
            _, k, v = inputs.split([GDN.k_dim, GDN.k_dim, GDN.v_dim])
            state = state * decay.exp()
            state = state + k[:, None] * ((v - k @ state) * beta)
        return state


def test_chunks_end_where_states_are_kept(device: torch.device) -> None:
    """A row that begins off the grid, passes the first position while it replays, and ends off the grid."""
    chunks = Chunks(140, device)
    chunks.feed(0, 62)
    keeps = (Keep(64, 2), Keep(128, 4), Keep(160, 1))
    chunks.feed(65, 140, keeps, num_replay=3)
    for position, slot in ((64, 2), (128, 4), (140, 0)):
        assert relative_error(chunks.state[slot, 0], chunks.stepped(position)) < 1e-4, position
    assert (chunks.state[[1, 3]] == UNTOUCHED).all()


def test_a_kept_state_is_that_of_a_row_that_stops(device: torch.device) -> None:
    chunks = Chunks(120, device)
    chunks.feed(0, 120, (Keep(64, 2), Keep(96, 3)))
    for position, slot in ((64, 2), (96, 3)):
        chunks.feed(0, position)
        assert torch.equal(chunks.state[0], chunks.state[slot])


def test_prompts_in_pieces(device: torch.device) -> None:
    """Pieces that end on the grid give the same bits, others the same state but for its last bits."""
    chunks = Chunks(160, device)
    chunks.feed(0, 160)
    whole = chunks.state[0].clone()
    for start, end in ((0, 64), (64, 160)):
        chunks.feed(start, end)
    assert torch.equal(chunks.state[0], whole)
    for start, end in ((0, 50), (50, 101), (101, 160)):
        chunks.feed(start, end)
    assert relative_error(chunks.state[0], whole.cpu()) < 1e-5
