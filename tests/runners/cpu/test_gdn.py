"""Gated DeltaNet in C: right by the float64 reference, and the same bits however a row is divided into steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.engine.contract import Keep
from slipstream.load.spec import GdnSpec
from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.gdn import MAX_DIM, fits
from slipstream.runners.cpu.ops import CpuOps
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.batch import make_batch
from slipstream.runners.torch.caches import GdnCache, GdnLayerCache
from slipstream.runners.torch.ops import GdnWeights, Ops, TorchOps

CPU = torch.device("cpu")
SLOTS, DEPTH = 3, 4
# One value head a key head, several, head sizes that no vector divides, and GGUF's order of value heads.
SHAPES = [
    GdnSpec(2, 4, 16, 16, 4),
    GdnSpec(2, 2, 128, 128, 4),
    GdnSpec(1, 3, 24, 40, 3),
    GdnSpec(2, 6, 16, 16, 4, tiled=True),
]
NAMES = ["grouped", "one-to-one", "odd", "tiled"]


def make_weights(gdn: GdnSpec) -> GdnWeights:
    decay, bias = -torch.rand(gdn.num_v_heads) * 8, torch.randn(gdn.num_v_heads)
    norm = torch.rand(gdn.v_dim) + 0.5
    return GdnWeights(torch.randn(gdn.conv_kernel, gdn.conv_channels), decay, bias, norm, 1e-6, gdn)


def wide_weights(weights: GdnWeights) -> GdnWeights:
    parts = {name: getattr(weights, name).double() for name in ("conv", "decay_scale", "dt_bias", "norm")}
    return replace(weights, **parts)


def make_cache(gdn: GdnSpec, dtype: torch.dtype = torch.float32) -> GdnLayerCache:
    return GdnCache(gdn, 1, SLOTS, 2, DEPTH, CPU, dtype).layers[0]


def inputs(gdn: GdnSpec, num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, gdn.conv_channels + gdn.num_v_heads * (gdn.v_dim + 2))


class Row:
    """One stream's raw inputs, fed piece by piece: drafts whose inputs are true are accepted, others replaced."""

    def __init__(self, slot: int, x: Tensor, keeps: tuple[Keep, ...] = ()) -> None:
        self.slot, self.x, self.cursor, self.replay, self.keeps = slot, x, 0, 0, keeps
        self.outputs: dict[int, Tensor] = {}

    def feed(self, committed: int, drafts: int, accepted: int, offset: int) -> tuple[RowSpan, Tensor]:
        committed = min(committed, len(self.x) - self.cursor)
        drafts = min(drafts, len(self.x) - self.cursor - committed)
        self._accepted = min(accepted, drafts)
        fed = self.x[self.cursor : self.cursor + committed + drafts].clone()
        fed[committed + self._accepted :] += 1.0  # wrong drafts
        before, after = self.cursor - self.replay, self.cursor + committed
        keeps = tuple(keep for keep in self.keeps if before < keep.position <= after)
        self._span = RowSpan(self.slot, self.cursor, offset, committed, drafts, self.replay, keeps)
        return self._span, fed

    def take(self, out: Tensor) -> None:
        kept = self._span.num_committed + self._accepted
        for i in range(kept):
            self.outputs[self.cursor + i] = out[self._span.offset + i].clone()
        self.cursor, self.replay = self.cursor + kept, self._accepted

    @property
    def done(self) -> bool:
        return self.cursor == len(self.x)


def run(ops: Ops, weights: GdnWeights, cache: GdnLayerCache, rows: list[Row], rng: random.Random) -> None:
    """Pieces of any size; each row's last token is fed alone, so that all of it is in the committed state."""
    table = torch.zeros(SLOTS, 1, dtype=torch.int32)
    while waiting := [row for row in rows if not row.done]:
        spans, fed, offset = [], [], 0
        for row in rng.sample(waiting, rng.randint(1, len(waiting))):
            limit = max(1, len(row.x) - 1 - row.cursor)
            committed = min(limit, rng.choice([1, 1, 3, 17, 64, 90]))
            drafts = rng.randint(0, min(DEPTH, limit - committed)) if committed < limit else 0
            span, x = row.feed(committed, drafts, rng.randint(0, drafts), offset)
            spans.append((row, span))
            fed.append(x)
            offset += len(x)
        batch = make_batch([span for _, span in spans], table)
        out = ops.gdn(torch.cat(fed).to(ops.dtype), weights, cache, batch)
        for row, _ in spans:
            row.take(out)


def outputs(row: Row) -> Tensor:
    return torch.stack([row.outputs[i] for i in range(len(row.x))])


@pytest.mark.parametrize("gdn", SHAPES, ids=NAMES)
def test_it_equals_the_reference_in_float64(any_kernels: Kernels, gdn: GdnSpec) -> None:
    weights, x = make_weights(gdn), [inputs(gdn, n) for n in (150, 70, 9)]
    results = []
    for ops, own in ((CpuOps(any_kernels), weights), (TorchOps(CPU, torch.float64), wide_weights(weights))):
        cache, rows = make_cache(gdn, ops.dtype), [Row(i, each.to(ops.dtype)) for i, each in enumerate(x)]
        run(ops, own, cache, rows, random.Random(0))
        results.append((*(outputs(row).double() for row in rows), cache.state.double(), cache.window.double()))
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_tokens", [9, 90])
def test_tiled_heads_are_the_same_heads_in_another_order(any_kernels: Kernels, num_tokens: int) -> None:
    grouped, num_k = GdnSpec(3, 6, 16, 8, 4), 3
    weights, x = make_weights(grouped), inputs(grouped, num_tokens)
    order = torch.tensor([(t % num_k) * 2 + t // num_k for t in range(6)])  # the fact that a GGUF's writer follows
    rows = (order[:, None] * 8 + torch.arange(8)).flatten()
    keys = 2 * num_k * 16
    channels = torch.cat([torch.arange(keys), keys + rows])
    first_z, first_b = grouped.conv_channels, grouped.conv_channels + 6 * 8
    columns = torch.cat([channels, first_z + rows, first_b + order, first_b + 6 + order])
    tiled = replace(
        weights,
        conv=weights.conv[:, channels].contiguous(),
        decay_scale=weights.decay_scale[order],
        dt_bias=weights.dt_bias[order],
        spec=replace(grouped, tiled=True),
    )
    batch = make_batch([RowSpan(0, 0, 0, num_tokens)], torch.zeros(SLOTS, 1, dtype=torch.int32))
    for ops in (CpuOps(any_kernels), TorchOps(CPU, torch.float32)):
        wanted = ops.gdn(x, weights, make_cache(grouped), batch)[:, rows]
        torch.testing.assert_close(ops.gdn(x[:, columns], tiled, make_cache(tiled.spec), batch), wanted)


@pytest.mark.parametrize("gdn", SHAPES, ids=NAMES)
def test_pieces_company_drafts_and_threads_change_no_bit(any_kernels: Kernels, gdn: GdnSpec) -> None:
    weights, x, ops = make_weights(gdn), [inputs(gdn, n) for n in (150, 70, 9)], CpuOps(any_kernels)
    alone = []
    for i, each in enumerate(x):
        cache, row = make_cache(gdn), Row(i, each)
        table = torch.zeros(SLOTS, 1, dtype=torch.int32)
        for committed in (len(each) - 1, 1):
            span, fed = row.feed(committed, 0, 0, 0)
            row.take(ops.gdn(fed, weights, cache, make_batch((span,), table)))
        alone.append((outputs(row), cache.state[i].clone(), cache.window[i].clone()))
    for seed in range(8):
        any_kernels.set_threads(1 + seed % 3)
        cache, rows = make_cache(gdn), [Row(i, each) for i, each in enumerate(x)]
        run(ops, weights, cache, rows, random.Random(seed))
        for i, (out, state, window) in enumerate(alone):
            assert torch.equal(outputs(rows[i]), out)
            assert torch.equal(cache.state[i], state)
            assert torch.equal(cache.window[i], window)
    any_kernels.set_threads(2)


@pytest.mark.parametrize("is_reference", [False, True], ids=["kernel", "reference"])
@pytest.mark.parametrize("gdn", SHAPES, ids=NAMES)
def test_a_kept_state_is_that_of_a_row_that_ended_there(kernels: Kernels, gdn: GdnSpec, is_reference: bool) -> None:
    """Whatever it is fed with, and wherever the position lies: in a prompt, or among drafts that are replayed."""
    ops: Ops = TorchOps(CPU, torch.float64) if is_reference else CpuOps(kernels)
    weights, x = make_weights(gdn), inputs(gdn, 150).to(ops.dtype)
    own = wide_weights(weights) if is_reference else weights
    table, positions = torch.zeros(SLOTS, 1, dtype=torch.int32), (2, 37, 64, 149)
    wanted = []
    for position in positions:
        cache, span = make_cache(gdn, ops.dtype), RowSpan(0, 0, 0, position)
        ops.gdn(x[:position], own, cache, make_batch((span,), table))
        wanted.append((cache.state[0].clone(), cache.window[0].clone()))
    for seed in range(6):
        for pair in (0, 2):
            keeps = tuple(Keep(positions[pair + i], SLOTS + i) for i in range(2))
            cache, rows = make_cache(gdn, ops.dtype), [Row(1, x, keeps), Row(0, inputs(gdn, 50).to(ops.dtype))]
            run(ops, own, cache, rows, random.Random(seed))
            for i in range(2):
                for mine, right in zip((cache.state[SLOTS + i], cache.window[SLOTS + i]), wanted[pair + i]):
                    close = torch.allclose(mine, right, atol=1e-9) if is_reference else torch.equal(mine, right)
                    assert close, (seed, positions[pair + i])


def test_heads_too_wide_for_the_kernel_take_the_reference(kernels: Kernels) -> None:
    gdn = GdnSpec(1, 1, 16, MAX_DIM + 8, 4)
    assert not fits(gdn)
    weights, x = make_weights(gdn), inputs(gdn, 5)
    table = torch.zeros(SLOTS, 1, dtype=torch.int32)
    batch = make_batch((RowSpan(0, 0, 0, 5),), table)
    mine, wanted = (
        ops.gdn(x, weights, make_cache(gdn), batch) for ops in (CpuOps(kernels), TorchOps(CPU, torch.float32))
    )
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-4)
