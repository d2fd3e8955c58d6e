"""The bookkeeping of a step on the device: which tokens each row feeds, what is accepted, what the head is fed.

Rows live in ``tokens`` [slots, places]: the known tokens of a slot and, right behind them, its drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.batch import DeviceBatch
from slipstream.runners.cuda.kernels.pdl import IN_TURN, take_turn

BLOCK = 128


@dataclass(frozen=True, slots=True)
class RowState:
    """What the device knows of each slot. int32 [slots] unless it says otherwise."""

    tokens: Tensor  # int32 [slots, places]
    known: Tensor  # tokens that are certain
    cursor: Tensor  # of those, how many are computed
    drafts: Tensor  # drafts held behind the known tokens
    replay: Tensor  # drafts accepted last step, still to be replayed by recurrent layers
    p_min: Tensor  # float32
    seeds: Tensor  # int64


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_draws"])
def _begin(
    places, known, cursor, drafts, replay,
    row_slots, row_offsets, row_feed, token_rows, draw_flat,
    tokens, positions, token_slots, clean_rows, row_starts, row_fed, row_certain, row_replay, draw_slots, draw_index,
    num_rows, num_tokens, num_draws, stride, B: tl.constexpr,
):  # fmt: skip
    take_turn()
    at = tl.program_id(0) * B + tl.arange(0, B)
    # Rows.
    is_row = at < num_rows
    slot = tl.load(row_slots + at, mask=is_row, other=0)
    feed = tl.load(row_feed + at, mask=is_row, other=0)
    start, certain, fed = _feed(slot, feed, known, cursor, drafts)
    tl.store(row_starts + at, start, mask=is_row)
    tl.store(row_fed + at, fed, mask=is_row)
    tl.store(row_certain + at, tl.minimum(fed, certain), mask=is_row)
    tl.store(row_replay + at, tl.load(replay + slot), mask=is_row)
    # Tokens.
    position, slot, row = _locate(at, num_tokens, token_rows, row_slots, row_offsets, row_feed, known, cursor, drafts)
    fed_here = position >= 0
    token = tl.load(places + slot.to(tl.int64) * stride + position, mask=fed_here, other=0)
    is_token = at < num_tokens
    tl.store(tokens + at, token, mask=is_token)
    tl.store(positions + at, position, mask=is_token)
    tl.store(token_slots + at, slot, mask=is_token)
    tl.store(clean_rows + at, tl.maximum(row, 0), mask=is_token)
    # Draws: where, for which slot, and the index of the token that is drawn.
    is_draw = at < num_draws
    flat = tl.load(draw_flat + at, mask=is_draw, other=-1)
    position, slot, row = _locate(flat, num_tokens, token_rows, row_slots, row_offsets, row_feed, known, cursor, drafts)
    tl.store(draw_slots + at, tl.where(position >= 0, slot, -1), mask=is_draw)
    tl.store(draw_index + at, position + 1, mask=is_draw)


@triton.jit
def _feed(slot, feed, known, cursor, drafts):
    """The rule of a step: position of the first fed token, known tokens to compute, tokens fed."""
    start = tl.load(cursor + slot)
    certain = tl.load(known + slot) - start
    return start, certain, tl.minimum(feed, certain + tl.load(drafts + slot))


@triton.jit
def _locate(flat, num_tokens, token_rows, row_slots, row_offsets, row_feed, known, cursor, drafts):
    """Position (-1: it does not count), slot and row of a flat token."""
    inside = (flat >= 0) & (flat < num_tokens)
    row = tl.load(token_rows + flat, mask=inside, other=-1)
    mine = row >= 0
    slot = tl.load(row_slots + row, mask=mine, other=0)
    start, _, fed = _feed(slot, tl.load(row_feed + row, mask=mine, other=0), known, cursor, drafts)
    j = flat - tl.load(row_offsets + row, mask=mine, other=0)
    return tl.where(mine & (j < fed), start + j, -1), slot, row


@triton.jit(do_not_specialize=["num_tokens"])
def _followers(places, token_slots, positions, followers, num_tokens, stride, B: tl.constexpr):
    """The token behind each fed one, once the step is committed; behind a rejected draft it may be anything."""
    take_turn()
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < num_tokens
    position = tl.load(positions + at, mask=inside, other=-1)
    slot = tl.load(token_slots + at, mask=inside, other=0)
    token = tl.load(places + slot.to(tl.int64) * stride + position + 1, mask=position >= 0, other=0)
    tl.store(followers + at, token, mask=inside)


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
    places, known, cursor, drafts, replay, seeds,
    draws, row_slots, row_offsets, row_starts, row_fed, row_certain, row_draws, row_last, report, simulated, most,
    stride, width, DEPTH: tl.constexpr, SIMULATE: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Accept drafts while they equal the draws, make them and the row's own draw real, tell the host."""
    take_turn()
    row = tl.program_id(0)
    fed = tl.load(row_fed + row)
    said = report + row * width
    tl.store(said, fed)
    tl.store(said + 1, 0)
    tl.store(row_last + row, 0)
    if fed > 0:
        slot = tl.load(row_slots + row)
        start = tl.load(row_starts + row)
        certain = tl.load(row_certain + row)
        first_draw = tl.load(row_draws + row)
        accepted = 0
        if first_draw >= 0:
            end = start + certain
            mine = places + slot.to(tl.int64) * stride
            going = fed > 0
            for i in tl.static_range(DEPTH):
                offered = going & (i < fed - certain)
                if LIMITED:
                    offered = offered & (i < tl.load(most + row))
                draft = tl.load(mine + end + i, mask=offered, other=-1)
                if SIMULATE:
                    seed = tl.load(seeds + slot)
                    chance = tl.load(simulated + i)
                    going = offered & (unit_noise(seed, (end + i).to(tl.int64)) < chance)
                else:
                    going = offered & (draft == tl.load(draws + first_draw + i, mask=offered, other=-2))
                tl.store(said + 2 + i, draft, mask=going)
                accepted += going.to(tl.int32)
            drawn = tl.load(draws + first_draw + accepted)
            tl.store(said + 1, accepted + 1)
            tl.store(said + 2 + accepted, drawn)
            tl.store(mine + end + accepted, drawn)
            tl.store(known + slot, end + accepted + 1)
        tl.store(cursor + slot, start + certain + accepted)
        tl.store(replay + slot, accepted)
        tl.store(drafts + slot, 0)
        tl.store(row_last + row, tl.load(row_offsets + row) + certain - 1 + accepted)


@triton.jit(do_not_specialize=["num_rows"])
def _draft_begin(
    places, known, pass_rows, row_slots,
    tokens, positions, token_slots, token_rows, offsets, starts, fed, certain, replay, tile_rows, tile_firsts,
    draw_slots, draw_index, sources, stride, num_rows, trash, AHEAD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The batch of one draft pass: each row that goes on feeds its newest draft, AHEAD - 1 places behind its tokens."""
    take_turn()
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < num_rows
    row = tl.load(pass_rows + at, mask=inside, other=-1)
    active = row >= 0
    slot = tl.load(row_slots + row, mask=active, other=0)
    count = tl.load(known + slot)
    position = tl.where(active, count + AHEAD - 2, -1)
    token = tl.zeros_like(row)
    if AHEAD > 0:
        token = tl.load(places + slot.to(tl.int64) * stride + position + 1, mask=active, other=0)
    one = active.to(tl.int32)
    tl.store(tokens + at, token, mask=inside)
    tl.store(positions + at, position, mask=inside)
    tl.store(token_slots + at, slot, mask=inside)
    tl.store(token_rows + at, at, mask=inside)
    tl.store(offsets + at, at, mask=inside)
    tl.store(starts + at, position, mask=inside)
    tl.store(fed + at, one, mask=inside)
    tl.store(certain + at, one, mask=inside)
    tl.store(replay + at, 0, mask=inside)
    tl.store(tile_rows + at, tl.where(active, at, -1), mask=inside)
    tl.store(tile_firsts + at, 0, mask=inside)
    tl.store(draw_slots + at, tl.where(active, slot, -1), mask=inside)
    tl.store(draw_index + at, count + AHEAD, mask=inside)
    tl.store(sources + at, tl.where(active, row, trash), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _draft_commit(
    places, known, drafts, p_min, draw_slots, picked, sure, stride, num_rows, AHEAD: tl.constexpr, B: tl.constexpr
):
    """Write the drafts behind the known tokens; a row goes on while the head is sure enough."""
    take_turn()
    at = tl.program_id(0) * B + tl.arange(0, B)
    slot = tl.load(draw_slots + at, mask=at < num_rows, other=-1)
    active = slot >= 0
    count = tl.load(known + slot, mask=active, other=0)
    token = tl.load(picked + at, mask=active, other=0)
    tl.store(places + slot.to(tl.int64) * stride + count + AHEAD, token, mask=active)
    held = tl.load(drafts + slot, mask=active, other=-1)
    confident = tl.load(sure + at, mask=active, other=0.0) >= tl.load(p_min + slot, mask=active, other=2.0)
    tl.store(drafts + slot, AHEAD + 1, mask=active & confident & (held == AHEAD))


@triton.jit
def _tell_drafts(places, known, drafts, row_slots, row_fed, report, stride, width, DEPTH: tl.constexpr):
    take_turn()
    row = tl.program_id(0)
    if tl.load(row_fed + row) > 0:
        slot = tl.load(row_slots + row)
        count = tl.load(drafts + slot)
        end = tl.load(known + slot)
        said = report + row * width + 3 + DEPTH
        tl.store(said, count)
        for i in tl.static_range(DEPTH):
            draft = tl.load(places + slot.to(tl.int64) * stride + end + i, mask=i < count, other=-1)
            tl.store(said + 1 + i, draft)


def report_width(depth: int) -> int:
    """fed, number of new tokens, the new tokens (depth + 1), number of drafts, the drafts (depth)."""
    return 4 + 2 * depth


def begin(
    state: RowState, batch: DeviceBatch, row_feed: Tensor, token_rows: Tensor, draw_flat: Tensor,
    draw_slots: Tensor, draw_index: Tensor,
) -> None:  # fmt: skip
    """Fill the batch from the rows' state. ``token_rows`` and ``row_feed`` are the layout: -1 and 0 are padding."""
    num_draws = draw_flat.shape[0]
    most = max(batch.num_rows, batch.num_tokens, num_draws)
    _begin[(triton.cdiv(most, BLOCK),)](
        state.tokens, state.known, state.cursor, state.drafts, state.replay,
        batch.row_slots, batch.row_offsets, row_feed, token_rows, draw_flat,
        batch.tokens, batch.positions, batch.token_slots, batch.token_rows,
        batch.row_starts, batch.row_fed, batch.row_certain, batch.row_replay, draw_slots, draw_index,
        batch.num_rows, batch.num_tokens, num_draws, state.tokens.stride(0), B=BLOCK, num_warps=4, **IN_TURN,
    )  # fmt: skip


def followers(state: RowState, batch: DeviceBatch, out: Tensor) -> None:
    _followers[(triton.cdiv(batch.num_tokens, BLOCK),)](
        state.tokens, batch.token_slots, batch.positions, out,
        batch.num_tokens, state.tokens.stride(0), B=BLOCK, num_warps=4, **IN_TURN,
    )  # fmt: skip


def commit(
    state: RowState, batch: DeviceBatch, draws: Tensor, row_draws: Tensor, row_last: Tensor, report: Tensor,
    depth: int, simulated: Tensor | None, most: Tensor | None = None,
) -> None:  # fmt: skip
    """``most``: int32 [rows], how many drafts may be accepted, where not all may."""
    _commit[(batch.num_rows,)](
        state.tokens, state.known, state.cursor, state.drafts, state.replay, state.seeds,
        draws, batch.row_slots, batch.row_offsets, batch.row_starts, batch.row_fed, batch.row_certain, row_draws,
        row_last, report, state.p_min if simulated is None else simulated, row_last if most is None else most,
        state.tokens.stride(0), report.stride(0), DEPTH=depth, SIMULATE=simulated is not None,
        LIMITED=most is not None, num_warps=1, **IN_TURN,
    )  # fmt: skip


def draft_begin(
    state: RowState, batch: DeviceBatch, pass_rows: Tensor, row_slots: Tensor,
    draw_slots: Tensor, draw_index: Tensor, sources: Tensor, trash: int, ahead: int,
) -> None:  # fmt: skip
    _draft_begin[(triton.cdiv(batch.num_rows, BLOCK),)](
        state.tokens, state.known, pass_rows, row_slots,
        batch.tokens, batch.positions, batch.token_slots, batch.token_rows, batch.row_offsets, batch.row_starts,
        batch.row_fed, batch.row_certain, batch.row_replay, batch.tile_rows, batch.tile_firsts,
        draw_slots, draw_index, sources, state.tokens.stride(0), batch.num_rows, trash,
        AHEAD=ahead, B=BLOCK, num_warps=4, **IN_TURN,
    )  # fmt: skip


def draft_commit(state: RowState, draw_slots: Tensor, picked: Tensor, sure: Tensor, ahead: int) -> None:
    num_rows = draw_slots.shape[0]
    _draft_commit[(triton.cdiv(num_rows, BLOCK),)](
        state.tokens, state.known, state.drafts, state.p_min, draw_slots, picked, sure,
        state.tokens.stride(0), num_rows, AHEAD=ahead, B=BLOCK, num_warps=4, **IN_TURN,
    )  # fmt: skip


def tell_drafts(state: RowState, batch: DeviceBatch, report: Tensor, depth: int) -> None:
    _tell_drafts[(batch.num_rows,)](
        state.tokens, state.known, state.drafts, batch.row_slots, batch.row_fed, report,
        state.tokens.stride(0), report.stride(0), DEPTH=depth, num_warps=1, **IN_TURN,
    )  # fmt: skip
