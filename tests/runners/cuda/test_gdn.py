"""The fused recurrence against the reference, over steps with prompts, drafts, rejections and replays."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from slipstream.engine.contract import MAX_KEEPS, Keep
from slipstream.load.spec import GdnSpec
from slipstream.runners.cuda.batch import DeviceBatch
from slipstream.runners.cuda.kernels.recurrent import gdn as kernels
from slipstream.runners.cuda.kernels.recurrent.gdn import gdn_mix
from slipstream.runners.cuda.kernels.recurrent.gdn_chunks import max_chunks
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.batch import make_batch
from slipstream.runners.torch.caches import GdnCache, GdnRings
from slipstream.runners.torch.ops import GdnWeights, TorchOps, gated_delta_net

DEPTH = 3
CPU = torch.device("cpu")


def weights(gdn: GdnSpec, dtype: torch.dtype) -> GdnWeights:
    return GdnWeights(
        conv=torch.randn(gdn.conv_kernel, gdn.conv_channels).to(dtype),
        decay_scale=-torch.rand(gdn.num_v_heads) * 4,
        dt_bias=torch.randn(gdn.num_v_heads),
        norm=torch.rand(gdn.v_dim) + 0.5,
        eps=1e-6,
        spec=gdn,
    )


def on(device: torch.device, made: GdnWeights) -> tuple[object, ...]:
    tensors = (made.conv, made.decay_scale, made.dt_bias, made.norm)
    return (*(t.to(device) for t in tensors), made.eps, made.spec)


def device_batch(spans: list[RowSpan], padding: int, device: torch.device, has_prompts: bool) -> DeviceBatch:
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    pad = [0] * padding
    keeps = [[*s.keeps, *[Keep(-1, 0)] * MAX_KEEPS][:MAX_KEEPS] for s in spans]
    keeps += [[Keep(-1, 0)] * MAX_KEEPS] * padding
    nothing = ints([])
    positions = ints([s.start + j for s in spans for j in range(s.num_fed)])
    return DeviceBatch(
        num_rows=len(spans) + padding,
        num_tokens=sum(s.num_fed for s in spans),
        tokens=nothing,
        positions=positions,
        rope_positions=positions,
        token_slots=nothing,
        token_rows=ints([i for i, s in enumerate(spans) for _ in range(s.num_fed)]),
        row_slots=ints([s.slot for s in spans] + pad),
        row_offsets=ints([s.offset for s in spans] + pad),
        row_starts=ints([s.start for s in spans] + pad),
        row_fed=ints([s.num_fed for s in spans] + pad),
        row_committed=ints([s.num_committed for s in spans] + pad),
        row_replay=ints([s.num_replay for s in spans] + pad),
        max_replay=DEPTH,
        row_stores=ints([1] * (len(spans) + padding)),
        max_deferred=0,
        keep_positions=ints([keep.position for row in keeps for keep in row]),
        keep_states=ints([keep.state or 0 for row in keeps for keep in row]),
        max_keeps=MAX_KEEPS if any(s.keeps for s in spans) else 0,
        tile_rows=nothing,
        tile_firsts=nothing,
        tile_size=1,
        block_table=nothing,
        context_hint=512,
        has_prompts=has_prompts,
    )


class Both:
    """The kernels and the reference, fed the same steps."""

    def __init__(
        self, made: GdnWeights, dtype: torch.dtype, device: torch.device, states: torch.dtype = torch.float32
    ) -> None:
        self.made, self.dtype, self.device = made, dtype, device
        self.ops = TorchOps(CPU, torch.float32)
        self.reference = GdnCache(made.spec, 1, 4, 2, DEPTH, CPU, torch.float32).layers[0]
        self.rings = GdnRings(made.spec, 1, 4, 2, DEPTH, device, dtype, states).layers[0]
        self.cursors, self.replays = [0] * 4, [0] * 4

    def spans(self, rows: list[tuple[int, int, int]]) -> list[RowSpan]:
        """Of (slot, committed tokens, drafts)."""
        offsets = accumulate([committed + drafts for _, committed, drafts in rows], initial=0)
        return [
            RowSpan(slot, self.cursors[slot], offset, committed, drafts, self.replays[slot])
            for (slot, committed, drafts), offset in zip(rows, offsets, strict=False)
        ]

    def take(self, slot: int) -> None:
        """Another stream gets the slot."""
        self.cursors[slot] = self.replays[slot] = 0
        self.reference.state[slot].zero_()
        self.reference.window[slot].zero_()

    def accept(self, span: RowSpan, num_drafts: int) -> None:
        self.replays[span.slot] = num_drafts
        self.cursors[span.slot] = span.start + span.num_committed + num_drafts

    def step(self, spans: list[RowSpan], padding: int) -> tuple[float, float]:
        """Relative errors of the outputs and of the rows' states."""
        made, gdn = self.made, self.made.spec
        num_tokens = sum(span.num_fed for span in spans)
        width = gdn.conv_channels + gdn.num_v_heads * gdn.v_dim + 2 * gdn.num_v_heads
        mixed = torch.randn(num_tokens, width).to(self.dtype)
        wanted = gated_delta_net(
            self.ops,
            mixed.float(),
            GdnWeights(made.conv.float(), made.decay_scale, made.dt_bias, made.norm, made.eps, gdn),
            self.reference,
            make_batch(spans, torch.zeros(4, 1, dtype=torch.int32)),
        )
        long = any(span.num_fed > 1 + DEPTH for span in spans)
        batch = device_batch(spans, padding, self.device, long)
        got = gdn_mix(mixed.to(self.device), *on(self.device, made), self.rings.state, self.rings.ring, batch)
        slots = [span.slot for span in spans]
        return relative_error(got, wanted), relative_error(self.rings.state[slots], self.reference.state[slots])


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu().to(wanted.dtype) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("gdn", "dtype", "tolerance"),
    [
        pytest.param(GdnSpec(2, 4, 16, 16, 4), torch.float32, 2e-5, marks=pytest.mark.exhaustive),
        pytest.param(GdnSpec(1, 3, 16, 32, 4), torch.float32, 2e-5, marks=pytest.mark.exhaustive),
        (GdnSpec(2, 2, 32, 16, 4), torch.bfloat16, 3e-2),
        (GdnSpec(2, 4, 16, 16, 4, tiled=True), torch.float32, 2e-5),
    ],
)
def test_steps_equal_the_reference(gdn: GdnSpec, dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    chance = random.Random(1)
    both = Both(weights(gdn, dtype), dtype, device)
    for step in range(9):
        rows = []
        for slot in (0, 2, 3):
            prompt = step < 2 or (slot == 3 and step == 5)
            committed = chance.choice([1, 5, 21]) if prompt else 1
            rows.append((slot, committed, 0 if prompt else chance.randrange(DEPTH + 1)))
        if step == 4:
            both.take(2)
        spans = both.spans(rows)
        error, _ = both.step(spans, step % 2)
        assert error < tolerance, step
        for span in spans:
            both.accept(span, chance.randrange(span.num_drafts + 1))


# Of (slot, committed tokens, drafts, drafts accepted), step by step.
LONG_ROWS = [
    [(0, 33, 0, 0), (1, 1, 0, 0), (2, 64, 0, 0), (3, 130, 0, 0)],
    [(3, 65, 0, 0), (0, 1, 3, 2), (1, 200, 0, 0), (2, 1, 3, 3)],  # 3 goes on with its prompt
    [(0, 62, 0, 0), (2, 62, 0, 0), (3, 1, 1, 1), (1, 36, 2, 1)],  # 0 and 2 replay drafts first: 64 and 65 tokens
    [(1, 1, 2, 2), (3, 32, 0, 0), (2, 1, 3, 0), (0, 1, 0, 0)],
    [(0, 1, 3, 1), (1, 1, 0, 0), (2, 1, 2, 2), (3, 1, 3, 0)],
]


@pytest.mark.parametrize(
    ("gdn", "dtype", "tolerance"),
    [
        pytest.param(GdnSpec(1, 2, 32, 16, 4), torch.float32, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(GdnSpec(1, 1, 20, 40, 4), torch.float32, 1e-4, marks=pytest.mark.exhaustive),
        (GdnSpec(2, 4, 16, 16, 4, tiled=True), torch.float32, 1e-4),
        pytest.param(GdnSpec(2, 2, 16, 16, 4), torch.bfloat16, 1e-2, marks=pytest.mark.exhaustive),
    ],
)
def test_long_rows_equal_the_reference(
    gdn: GdnSpec, dtype: torch.dtype, tolerance: float, device: torch.device
) -> None:
    made = replace(weights(gdn, dtype), decay_scale=-torch.exp(torch.randn(gdn.num_v_heads) - 2))
    both = Both(made, dtype, device)
    both.rings.state.fill_(7.0)  # an earlier stream's
    for step, rows in enumerate(LONG_ROWS):
        spans = both.spans([row[:3] for row in rows])
        error, state_error = both.step(spans, step % 2)
        assert error < tolerance, step
        assert state_error < 1e-4, step
        for span, row in zip(spans, rows, strict=True):
            both.accept(span, row[3])


def test_another_stream_starts_with_a_long_row(device: torch.device) -> None:
    both = Both(weights(GdnSpec(1, 1, 16, 16, 4), torch.float32), torch.float32, device)
    for _ in range(2):
        both.take(1)
        spans = both.spans([(1, 70, 0)])
        assert max(both.step(spans, 0)) < 1e-4
        both.accept(spans[0], 0)


def test_no_chunks_without_prompts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels, "recur_in_chunks")
    both = Both(weights(GdnSpec(1, 1, 16, 16, 4), torch.float32), torch.float32, device)
    both.step(both.spans([(0, 1, 0), (1, 1, 3)]), 1)


def test_no_step_has_more_chunks_than_expected() -> None:
    chance = random.Random(2)
    for _ in range(500):
        fed = [chance.choice([1, 32, 33, 57, 64, 65, 200]) for _ in range(chance.randrange(1, 9))]
        needed = sum(-(-(chance.randrange(32) + n + DEPTH) // 32) for n in fed if n > 32)
        assert needed <= max_chunks(len(fed), sum(fed), DEPTH)
