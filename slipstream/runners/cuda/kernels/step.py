"""The bookkeeping of a step on the device: tokens fed, tokens accepted, the input of the head.

Rows live in ``tokens`` [slots, positions]: the known tokens of a slot and, right after them, its drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.batch import DeviceBatch
from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options
from slipstream.runners.cuda.report import StepReport

BLOCK = 128


@dataclass(frozen=True, slots=True)
class RowState:
    """The device's knowledge of each slot. int32 [slots] unless it says otherwise."""

    tokens: Tensor  # int32 [slots, positions]
    known: Tensor  # committed tokens
    cursor: Tensor  # of those, how many are computed
    num_drafts: Tensor  # drafts held after the known tokens
    replay: Tensor  # of the computed tokens, how many the recurrent states do not have yet
    p_min: Tensor  # float32
    seeds: Tensor  # int64


@triton.jit
def _feed(slot, feed, known, cursor, num_drafts):
    """The rule of a step: position of the first fed token, known tokens to compute, tokens fed."""
    start = tl.load(cursor + slot)
    num_known = tl.load(known + slot) - start
    return start, num_known, tl.minimum(feed, num_known + tl.load(num_drafts + slot))


@triton.jit
def _locate(flat, num_tokens, token_rows, row_slots, row_offsets, row_feed, known, cursor, num_drafts):
    """Position (-1: it does not count), slot and row of a flat token."""
    inside = (flat >= 0) & (flat < num_tokens)
    row = tl.load(token_rows + flat, mask=inside, other=-1)
    real = row >= 0
    slot = tl.load(row_slots + row, mask=real, other=0)
    start, _, fed = _feed(slot, tl.load(row_feed + row, mask=real, other=0), known, cursor, num_drafts)
    j = flat - tl.load(row_offsets + row, mask=real, other=0)
    return tl.where(real & (j < fed), start + j, -1), slot, row


@triton.jit(do_not_specialize=["max_deferred", "num_rows", "num_tokens", "num_samples"])
def _begin(
    slot_tokens, known, cursor, num_drafts, replay,
    row_slots, row_offsets, row_feed, token_rows, sample_flat,
    tokens, positions, token_slots, clean_rows, row_starts, row_fed, row_committed, row_replay, row_stores,
    sample_slots, sample_index, max_deferred,
    num_rows, num_tokens, num_samples, stride, B: tl.constexpr,
):  # fmt: skip
    launch_dependents_and_wait()
    at = tl.program_id(0) * B + tl.arange(0, B)
    # Rows.
    is_row = at < num_rows
    slot = tl.load(row_slots + at, mask=is_row, other=0)
    feed = tl.load(row_feed + at, mask=is_row, other=0)
    start, num_known, fed = _feed(slot, feed, known, cursor, num_drafts)
    tl.store(row_starts + at, start, mask=is_row)
    tl.store(row_fed + at, fed, mask=is_row)
    tl.store(row_committed + at, tl.minimum(fed, num_known), mask=is_row)
    lacking = tl.load(replay + slot)
    tl.store(row_replay + at, lacking, mask=is_row)
    # A row of one token without drafts may leave its states for a later step to store, other rows for another one.
    is_due = (start + slot) % (max_deferred + 1) == 0
    deferred = (fed == 1) & (num_known == 1) & (lacking < max_deferred) & ~is_due
    tl.store(row_stores + at, tl.where(deferred, 0, 1), mask=is_row)
    # Tokens.
    position, slot, row = _locate(
        at, num_tokens, token_rows, row_slots, row_offsets, row_feed, known, cursor, num_drafts
    )
    token = tl.load(slot_tokens + slot.to(tl.int64) * stride + position, mask=position >= 0, other=0)
    is_token = at < num_tokens
    tl.store(tokens + at, token, mask=is_token)
    tl.store(positions + at, position, mask=is_token)
    tl.store(token_slots + at, slot, mask=is_token)
    tl.store(clean_rows + at, tl.maximum(row, 0), mask=is_token)
    # Samples: for which slot, and the index of the token that is sampled.
    is_sample = at < num_samples
    flat = tl.load(sample_flat + at, mask=is_sample, other=-1)
    position, slot, row = _locate(
        flat, num_tokens, token_rows, row_slots, row_offsets, row_feed, known, cursor, num_drafts
    )
    tl.store(sample_slots + at, tl.where(position >= 0, slot, -1), mask=is_sample)
    tl.store(sample_index + at, position + 1, mask=is_sample)


@triton.jit(do_not_specialize=["num_tokens"])
def _next_tokens(slot_tokens, token_slots, positions, next_tokens, num_tokens, stride, B: tl.constexpr):
    """The token after each fed one, once the step is committed; after a rejected draft it may be anything."""
    launch_dependents_and_wait()
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < num_tokens
    position = tl.load(positions + at, mask=inside, other=-1)
    slot = tl.load(token_slots + at, mask=inside, other=0)
    token = tl.load(slot_tokens + slot.to(tl.int64) * stride + position + 1, mask=position >= 0, other=0)
    tl.store(next_tokens + at, token, mask=inside)


@triton.jit
def unit_noise(seed, position):
    """A number in [0, 1) of (seed, position): splitmix64, as in noise.py."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    z = (seed.to(tl.uint64, bitcast=True) ^ (position.to(tl.uint64) * golden)) + golden
    z = (z ^ (z >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    z = z ^ (z >> 31)
    return (z >> 40).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _commit(
    slot_tokens, known, cursor, num_drafts, replay, seeds,
    samples, row_slots, row_offsets, row_starts, row_fed, row_committed, row_replay, row_stores, row_samples, row_last,
    report_fed, report_num_tokens, report_tokens, simulated, max_accepted,
    stride, width, DEPTH: tl.constexpr, SIMULATE: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Accept drafts while they equal the samples, commit them and the row's own sample, report to the host."""
    launch_dependents_and_wait()
    row = tl.program_id(0)
    fed = tl.load(row_fed + row)
    tl.store(report_fed + row * width, fed)
    tl.store(report_num_tokens + row * width, 0)
    tl.store(row_last + row, 0)
    if fed > 0:
        slot = tl.load(row_slots + row)
        start = tl.load(row_starts + row)
        num_known = tl.load(row_committed + row)
        first_sample = tl.load(row_samples + row)
        accepted = 0
        if first_sample >= 0:
            end = start + num_known
            own = slot_tokens + slot.to(tl.int64) * stride
            committed = report_tokens + row * width
            going = fed > 0
            for i in tl.static_range(DEPTH):
                offered = going & (i < fed - num_known)
                if LIMITED:
                    offered = offered & (i < tl.load(max_accepted + row))
                draft = tl.load(own + end + i, mask=offered, other=-1)
                if SIMULATE:
                    seed = tl.load(seeds + slot)
                    chance = tl.load(simulated + i)
                    going = offered & (unit_noise(seed, (end + i).to(tl.int64)) < chance)
                else:
                    going = offered & (draft == tl.load(samples + first_sample + i, mask=offered, other=-2))
                tl.store(committed + i, draft, mask=going)
                accepted += going.to(tl.int32)
            sampled = tl.load(samples + first_sample + accepted)
            tl.store(report_num_tokens + row * width, accepted + 1)
            tl.store(committed + accepted, sampled)
            tl.store(own + end + accepted, sampled)
            tl.store(known + slot, end + accepted + 1)
        tl.store(cursor + slot, start + num_known + accepted)
        tl.store(replay + slot, tl.where(tl.load(row_stores + row) != 0, accepted, tl.load(row_replay + row) + 1))
        tl.store(num_drafts + slot, 0)
        tl.store(row_last + row, tl.load(row_offsets + row) + num_known - 1 + accepted)


@triton.jit(do_not_specialize=["num_rows"])
def _draft_begin(
    slot_tokens, known, draft_rows, row_slots,
    tokens, positions, token_slots, token_rows, offsets, starts, fed, num_known, replay, tile_rows, tile_firsts,
    sample_slots, sample_index, sources, stride, num_rows, padding_row, AHEAD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The batch of one draft pass: each of its rows feeds its newest draft, AHEAD - 1 positions after its tokens."""
    launch_dependents_and_wait()
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < num_rows
    row = tl.load(draft_rows + at, mask=inside, other=-1)
    active = row >= 0
    slot = tl.load(row_slots + row, mask=active, other=0)
    count = tl.load(known + slot)
    position = tl.where(active, count + AHEAD - 2, -1)
    token = tl.zeros_like(row)
    if AHEAD > 0:
        token = tl.load(slot_tokens + slot.to(tl.int64) * stride + position + 1, mask=active, other=0)
    one = active.to(tl.int32)
    tl.store(tokens + at, token, mask=inside)
    tl.store(positions + at, position, mask=inside)
    tl.store(token_slots + at, slot, mask=inside)
    tl.store(token_rows + at, at, mask=inside)
    tl.store(offsets + at, at, mask=inside)
    tl.store(starts + at, position, mask=inside)
    tl.store(fed + at, one, mask=inside)
    tl.store(num_known + at, one, mask=inside)
    tl.store(replay + at, 0, mask=inside)
    tl.store(tile_rows + at, tl.where(active, at, -1), mask=inside)
    tl.store(tile_firsts + at, 0, mask=inside)
    tl.store(sample_slots + at, tl.where(active, slot, -1), mask=inside)
    tl.store(sample_index + at, count + AHEAD, mask=inside)
    tl.store(sources + at, tl.where(active, row, padding_row), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _draft_commit(
    slot_tokens, known, num_drafts, p_min, draft_rows, thresholds, continue_thresholds,
    sample_slots, samples, confidence, simulated, report_confidences, stride, width, num_rows,
    AHEAD: tl.constexpr, SIMULATE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write the drafts after the known tokens; those of a row count up to the first of which the head is not sure."""
    launch_dependents_and_wait()
    at = tl.program_id(0) * B + tl.arange(0, B)
    slot = tl.load(sample_slots + at, mask=at < num_rows, other=-1)
    active = slot >= 0
    count = tl.load(known + slot, mask=active, other=0)
    token = tl.load(samples + at, mask=active, other=0)
    tl.store(slot_tokens + slot.to(tl.int64) * stride + count + AHEAD, token, mask=active)
    # The chain is the product of the confidences before, in their order: they lie in the report.
    row = tl.load(draft_rows + at, mask=active, other=0)
    own = report_confidences + row * width
    chain = tl.full([B], 1.0, tl.float32)
    for i in tl.static_range(AHEAD):
        chain *= tl.load(own + i, mask=active, other=0.0)
    going = active & (tl.load(num_drafts + slot, mask=active, other=-1) == AHEAD)
    if AHEAD > 0:
        going &= chain >= tl.load(continue_thresholds + row, mask=active, other=0.0)
    value = tl.load(confidence + at, mask=active, other=0.0)
    if SIMULATE:
        value = tl.zeros_like(value) + tl.load(simulated + AHEAD)
    tl.store(own + AHEAD, value, mask=active)
    going &= value >= tl.load(p_min + slot, mask=active, other=0.0)
    going &= chain * value >= tl.load(thresholds + row, mask=active, other=0.0)
    tl.store(num_drafts + slot, AHEAD + 1, mask=going)


@triton.jit
def _report_drafts(
    slot_tokens, known, num_drafts, row_slots, row_fed, report_num_drafts, report_drafts, stride, width,
    DEPTH: tl.constexpr,
):  # fmt: skip
    launch_dependents_and_wait()
    row = tl.program_id(0)
    if tl.load(row_fed + row) > 0:
        slot = tl.load(row_slots + row)
        count = tl.load(num_drafts + slot)
        end = tl.load(known + slot)
        tl.store(report_num_drafts + row * width, count)
        for i in tl.static_range(DEPTH):
            draft = tl.load(slot_tokens + slot.to(tl.int64) * stride + end + i, mask=i < count, other=-1)
            tl.store(report_drafts + row * width + i, draft)


def begin(
    state: RowState, batch: DeviceBatch, row_feed: Tensor, token_rows: Tensor, sample_flat: Tensor,
    sample_slots: Tensor, sample_index: Tensor,
) -> None:  # fmt: skip
    """Fill the batch from the rows' state. ``token_rows`` and ``row_feed`` are the layout: -1 and 0 are padding."""
    num_samples = sample_flat.shape[0]
    size = max(batch.num_rows, batch.num_tokens, num_samples)
    _begin[(triton.cdiv(size, BLOCK),)](
        state.tokens, state.known, state.cursor, state.num_drafts, state.replay,
        batch.row_slots, batch.row_offsets, row_feed, token_rows, sample_flat,
        batch.tokens, batch.positions, batch.token_slots, batch.token_rows,
        batch.row_starts, batch.row_fed, batch.row_committed, batch.row_replay, batch.row_stores,
        sample_slots, sample_index, batch.max_deferred,
        batch.num_rows, batch.num_tokens, num_samples, state.tokens.stride(0), B=BLOCK, num_warps=4,
        **pdl_options(state.tokens.device),
    )  # fmt: skip


def next_tokens(state: RowState, batch: DeviceBatch, out: Tensor) -> None:
    _next_tokens[(triton.cdiv(batch.num_tokens, BLOCK),)](
        state.tokens, batch.token_slots, batch.positions, out,
        batch.num_tokens, state.tokens.stride(0), B=BLOCK, num_warps=4, **pdl_options(state.tokens.device),
    )  # fmt: skip


def commit(
    state: RowState, batch: DeviceBatch, samples: Tensor, row_samples: Tensor, row_last: Tensor, report: StepReport,
    simulated: Tensor | None, max_accepted: Tensor | None = None,
) -> None:  # fmt: skip
    """``simulated``: float32 [depth], acceptance rates instead of a comparison; ``max_accepted``: int32 [rows], drafts
    that may be accepted, where not all may."""
    _commit[(batch.num_rows,)](
        state.tokens, state.known, state.cursor, state.num_drafts, state.replay, state.seeds,
        samples, batch.row_slots, batch.row_offsets, batch.row_starts, batch.row_fed, batch.row_committed,
        batch.row_replay, batch.row_stores, row_samples, row_last, report.num_fed, report.num_tokens, report.tokens,
        state.p_min if simulated is None else simulated, row_last if max_accepted is None else max_accepted,
        state.tokens.stride(0), report.stride, DEPTH=report.depth, SIMULATE=simulated is not None,
        LIMITED=max_accepted is not None, num_warps=1, **pdl_options(state.tokens.device),
    )  # fmt: skip


def draft_begin(
    state: RowState, batch: DeviceBatch, draft_rows: Tensor, row_slots: Tensor,
    sample_slots: Tensor, sample_index: Tensor, sources: Tensor, padding_row: int, ahead: int,
) -> None:  # fmt: skip
    _draft_begin[(triton.cdiv(batch.num_rows, BLOCK),)](
        state.tokens, state.known, draft_rows, row_slots,
        batch.tokens, batch.positions, batch.token_slots, batch.token_rows, batch.row_offsets, batch.row_starts,
        batch.row_fed, batch.row_committed, batch.row_replay, batch.tile_rows, batch.tile_firsts,
        sample_slots, sample_index, sources, state.tokens.stride(0), batch.num_rows, padding_row,
        AHEAD=ahead, B=BLOCK, num_warps=4, **pdl_options(state.tokens.device),
    )  # fmt: skip


def draft_commit(
    state: RowState, draft_rows: Tensor, thresholds: Tensor, continue_thresholds: Tensor,
    sample_slots: Tensor, samples: Tensor, confidence: Tensor, report: StepReport, simulated: Tensor | None, ahead: int,
) -> None:  # fmt: skip
    """``thresholds``: float32 [rows of the step]. ``simulated``: a head that is as sure as it will be right."""
    num_rows = sample_slots.shape[0]
    _draft_commit[(triton.cdiv(num_rows, BLOCK),)](
        state.tokens, state.known, state.num_drafts, state.p_min, draft_rows, thresholds, continue_thresholds,
        sample_slots, samples, confidence, confidence if simulated is None else simulated, report.confidences,
        state.tokens.stride(0), report.stride, num_rows,
        AHEAD=ahead, SIMULATE=simulated is not None, B=BLOCK, num_warps=4, **pdl_options(state.tokens.device),
    )  # fmt: skip


def report_drafts(state: RowState, batch: DeviceBatch, report: StepReport) -> None:
    _report_drafts[(batch.num_rows,)](
        state.tokens, state.known, state.num_drafts, batch.row_slots, batch.row_fed,
        report.num_drafts, report.drafts, state.tokens.stride(0), report.stride, DEPTH=report.depth,
        num_warps=1, **pdl_options(state.tokens.device),
    )  # fmt: skip
