"""States that rows without drafts store every few steps only: the bits of states that are stored in every step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from harness import Ask, Traffic, alone, open_resident, open_runner
from test_gdn import DEPTH, device_batch, on, weights
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.engine.contract import Keep
from slipstream.load.spec import GdnSpec
from slipstream.runners.cuda import buffers
from slipstream.runners.cuda.kernels.recurrent.gdn import DEFERRING_ROWS, gdn_mix, max_deferred
from slipstream.runners.cuda.layout import Layout
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.caches import DEFERRED, GdnRings, max_replay
from slipstream.sampling import SamplingParams

GDN = GdnSpec(1, 2, 16, 16, 4)
SLOT, SLOTS, STATES = 1, 2, 3
NOBODY_STORED = 7.0


class Layer:
    """A row that is fed by and by, as the step's bookkeeping would: it is due at every fourth position."""

    def __init__(self, device: torch.device, dtype: torch.dtype, states: torch.dtype, defers: bool) -> None:
        torch.manual_seed(1)
        self.made, self.device, self.defers = weights(GDN, dtype), device, defers
        width = GDN.conv_channels + GDN.num_v_heads * GDN.v_dim + 2 * GDN.num_v_heads
        self.mixed = torch.randn(64, width).to(dtype)
        self.rings = GdnRings(GDN, 1, SLOTS, STATES, DEPTH, device, dtype, states)
        self.cursor = self.lacking = self.num_stored = 0
        self.state.fill_(NOBODY_STORED)

    @property
    def state(self) -> Tensor:
        return self.rings.layers[0].state

    def step(self, num_known: int, num_drafts: int, accepted: int = 0, keeps: tuple[Keep, ...] = ()) -> Tensor:
        """The outputs."""
        span = RowSpan(SLOT, self.cursor, 0, num_known, num_drafts, self.lacking, keeps)
        deferred = self.defers and span.num_fed == 1 and self.lacking < DEFERRED and (self.cursor + SLOT) % 4 != 0
        batch = device_batch([span], 1, self.device, num_known > 1 + DEPTH)
        stores = torch.tensor([not deferred, 1], dtype=torch.int32, device=self.device)
        batch = replace(batch, row_stores=stores, max_replay=max_replay(DEPTH))
        mixed = self.mixed[self.cursor : self.cursor + span.num_fed].to(self.device)
        layer = self.rings.layers[0]
        out = gdn_mix(mixed, *on(self.device, self.made), layer.state, layer.ring, batch)  # type: ignore[arg-type]
        self.cursor += num_known + accepted
        self.lacking = self.lacking + 1 if deferred else accepted
        self.num_stored += not deferred
        return out


# Known tokens, drafts, accepted ones; where the state is kept, and in which state slot.
STEPS = [
    (6, 0, 0, ()),
    *[(1, 0, 0, ())] * 2,
    (1, 0, 0, (Keep(9, 2),)),  # reached by the token of this step
    *[(1, 0, 0, ())] * 2,
    (1, 3, 2, ()),  # it drafts, while its state lacks tokens
    (1, 0, 0, (Keep(14, 3),)),  # reached by a replayed draft
    (1, 0, 0, ()),
    (1, 1, 0, ()),
    *[(1, 0, 0, ())] * 5,
]
DUE = {7, 15, 19, 23}  # cursors before plain steps that store


@pytest.mark.parametrize(
    ("dtype", "states"),
    [(torch.float32, torch.float32), pytest.param(torch.bfloat16, torch.float16, marks=pytest.mark.exhaustive)],
)
def test_the_same_bits(dtype: torch.dtype, states: torch.dtype, device: torch.device) -> None:
    always, deferring = (Layer(device, dtype, states, defers) for defers in (False, True))
    num_due = 0
    for known, drafts, accepted, keeps in STEPS:
        num_due += known + drafts > 1 or always.cursor in DUE
        wanted, got = (each.step(known, drafts, accepted, keeps) for each in (always, deferring))
        assert torch.equal(got, wanted), always.cursor
    assert always.num_stored == len(STEPS)
    assert deferring.num_stored == num_due == 6  # a prompt, two steps with drafts, and three that were due
    assert torch.equal(deferring.state[SLOTS:], always.state[SLOTS:])
    assert (always.state[2:4] != NOBODY_STORED).all()
    assert (always.state[4] == NOBODY_STORED).all()
    # A step with drafts stores both: they differ by nothing that was deferred.
    for each in (always, deferring):
        each.step(1, 1)
    assert torch.equal(deferring.state, always.state)


def test_what_is_deferred_is_not_stored(device: torch.device) -> None:
    layer = Layer(device, torch.float32, torch.float32, True)
    layer.step(8, 0)
    before = layer.state.clone()
    for _ in range(DEFERRED):
        layer.step(1, 0)
        assert torch.equal(layer.state, before)
    layer.step(1, 0)
    assert not torch.equal(layer.state[SLOT], before[SLOT])


def test_small_steps_store_every_time() -> None:
    assert max_deferred(DEFERRING_ROWS - 1) == 0
    assert max_deferred(DEFERRING_ROWS) == DEFERRED == max_replay(0)


@pytest.mark.parametrize(
    ("deferring", "prefix_cache"),
    [(2, False), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in [(1, False), (1, True), (2, True)])],
)
def test_streams_have_the_tokens_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deferring: int, prefix_cache: bool
) -> None:
    """Plain ones, and one that drafts at some depths; with the cache some begin with the states of others.

    ``deferring``: rows of a step whose states are stored late. Streams come and go, so the last steps have one row.
    """
    monkeypatch.setattr(buffers, "max_deferred", lambda num_rows: DEFERRED if num_rows >= deferring else 0)
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path, head=True)
    dice = random.Random(3)
    first = tuple(dice.randrange(tiny.VOCAB) for _ in range(18))
    prompts = [first, (*first[:9], 5, 6), (3, 1, 4)]
    plain = SamplingParams(temperature=0.0, max_tokens=8, draft=0, seed=1)
    asks = [Ask(prompt, replace(plain, draft=2 * (i == 2)), 3 * i) for i, prompt in enumerate(prompts)]
    cpu = open_runner(folder, head=True)
    wanted = [alone(cpu, ask) for ask in asks]
    runner = open_resident(folder)
    config = EngineConfig(max_streams=4, max_step_tokens=24, min_chunk=4, block_size=8, prefix_cache=prefix_cache)
    run = Traffic(runner, config)
    program, launch = runner.program, runner.launcher.run
    steps: list[tuple[int, bool]] = []  # rows, and whether one of them stored nothing
    seen: list[tuple[int, int, int, int]] = []  # of rows that feed one token: slot, position, lacking before, stores

    def launched(layout: Layout, *arguments: object) -> object:
        result = launch(layout, *arguments)  # type: ignore[arg-type]
        by_row, slots = program.buffers.by_row, program.buffers.inputs(layout.shape).row_slots
        rows = zip(*(part.tolist() for part in (slots, by_row.starts, by_row.replay, by_row.stores, by_row.fed)))
        fed_one = [(slot, start, lacking, stores) for slot, start, lacking, stores, fed in rows if fed == 1]
        steps.append((layout.shape.num_rows, any(not stores for *_, stores in fed_one)))
        seen.extend(fed_one)
        return result

    runner.launcher.run = launched  # type: ignore[method-assign, assignment]
    for _ in range(2):  # in slots whose last stream left while its state lacked tokens
        assert run.run(asks) == wanted
    assert max(lacking for _, _, lacking, _ in seen) == DEFERRED
    deferred = {(start + slot) % 4 for slot, start, _, stores in seen if not stores}
    assert deferred == {1, 2, 3}  # rows in neighbouring slots store in different steps
    assert all(stores for slot, start, _, stores in seen if (start + slot) % 4 == 0)
    assert {num_rows for num_rows, late in steps if late} <= {n for n in range(5) if n >= deferring}
    assert deferring == 1 or any(num_rows == 1 for num_rows, _ in steps)
