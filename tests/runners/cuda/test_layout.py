"""How rows lie in the flat batch: tokens, samples, tiles, draft passes, and that few shapes serve all loads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.contract import MAX_KEEPS, DraftRequest, Keep, RowStep
from slipstream.runners.cuda.buffers import StepBuffers
from slipstream.runners.cuda.host_rows import HostRow, RowFeed
from slipstream.runners.cuda.layout import (
    PROMPT_TILE,
    ROW_BUCKETS,
    TOKEN_BUCKETS,
    Inputs,
    Layout,
    input_sizes,
    lay_out,
    unpack,
)
from slipstream.runners.logprobs import NO_LOGPROBS
from slipstream.runners.torch.caches import max_replay, ring_size

DEPTH, MAX_ROWS = 3, 64

rows = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 260), st.integers(0, DEPTH)).map(
        lambda row: (row[0], row[1] if row[1] > 1 else 1, row[2])
    ),
    min_size=1,
    max_size=12,
)


def laid_out(rows: list[RowFeed]) -> tuple[Layout, Inputs[torch.Tensor]]:
    layout = lay_out(rows, 500, DEPTH, MAX_ROWS)
    return layout, unpack(torch.from_numpy(layout.upload), input_sizes(layout.shape, MAX_ROWS, DEPTH))


@given(rows)
def test_every_token_has_one_row_and_samples_are_where_known_tokens_end(cases: list[tuple[int, int, int]]) -> None:
    rows = [
        RowFeed(10 + i, min(feed, left + DEPTH if left == 1 else left), left, DraftRequest(depth))
        for i, (left, feed, depth) in enumerate(cases)
    ]
    feeds = [row.feed for row in rows]
    layout, inputs = laid_out(rows)
    shape = layout.shape
    assert shape.num_rows in ROW_BUCKETS
    few = (shape.num_rows, shape.num_rows * (1 + DEPTH))
    assert shape.num_tokens in (TOKEN_BUCKETS if shape.has_prompts or few[0] >= 16 else (*TOKEN_BUCKETS, *few))
    assert inputs.row_slots[: len(rows)].tolist() == [row.slot for row in rows]
    assert inputs.row_feed.tolist() == feeds + [0] * (shape.num_rows - len(feeds))
    token_rows = [i for i, feed in enumerate(feeds) for _ in range(feed)]
    assert inputs.token_rows.tolist() == token_rows + [-1] * (shape.num_tokens - len(token_rows))
    wanted: list[int] = []
    for i, row in enumerate(rows):
        offset = int(inputs.row_offsets[i])
        assert inputs.token_rows[offset] == i
        samples = [offset + j for j in range(row.num_uncomputed - 1, row.feed)]
        assert inputs.row_samples[i] == layout.first_samples[i] == (len(wanted) if samples else -1)
        wanted += samples
    assert inputs.sample_flat[inputs.sample_flat >= 0].tolist() == wanted
    tiles = zip(inputs.tile_rows.tolist(), inputs.tile_firsts.tolist(), strict=True)
    covered = [(row, first + j) for row, first in tiles if row >= 0
               for j in range(shape.tile_size) if first + j < feeds[row]]  # fmt: skip
    assert sorted(covered) == [(i, j) for i, feed in enumerate(feeds) for j in range(feed)]
    passes = inputs.draft_rows.view(DEPTH, MAX_ROWS)
    for ahead in range(DEPTH):
        drafting = [i for i, row in enumerate(rows) if row.feed >= row.num_uncomputed and row.draft.depth > ahead]
        assert passes[ahead][passes[ahead] >= 0].tolist() == drafting
        assert (ahead < len(layout.pass_rows)) == bool(drafting)


def test_decode_steps_have_few_shapes() -> None:
    shapes = set()
    for count in range(1, MAX_ROWS + 1):
        for depth in range(DEPTH + 1):
            layout, _ = laid_out([RowFeed(i, 1 + depth, 1, DraftRequest(depth)) for i in range(count)])
            assert not layout.shape.has_prompts
            assert layout.shape.tile_size in (1, 4)
            shapes.add(layout.shape)
    assert len(shapes) < 40


def test_the_first_step_of_a_kind_compiles_for_the_others() -> None:
    """Products of codes are others for 1, 2 and 4 tokens, for up to 8, and for 16."""
    kinds = [laid_out([RowFeed(i, 1) for i in range(n)])[0].shape.kind for n in (1, 2, 3, 4, 5, 8, 16, 32)]
    assert kinds[2] == kinds[3]
    assert kinds[4] == kinds[5]
    assert len(set(kinds)) == 6


def test_prompts_are_cut_into_tiles() -> None:
    layout, _ = laid_out([RowFeed(0, 100, 100, DraftRequest(1)), RowFeed(1, 4, 1, DraftRequest(3))])
    assert layout.shape.has_prompts
    assert layout.shape.tile_size == PROMPT_TILE
    assert layout.pass_rows == (2, 1, 1)


@pytest.mark.parametrize("depth", range(9))
def test_nothing_on_the_ring_is_overwritten_before_it_is_read(depth: int) -> None:
    """A step reads the window before what it replays, and writes a token and its drafts."""
    read = set(range(-3 - max_replay(depth), 0))
    written = set(range(1 + depth))
    size = ring_size(depth)
    assert {p % size for p in read}.isdisjoint(p % size for p in written)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_the_device_finds_each_part_at_an_aligned_address(num_rows: int) -> None:
    rows = [RowFeed(slot, 30 + slot, 30 + slot, DraftRequest(1)) for slot in range(num_rows)]
    layout, written = laid_out(rows)
    buffers = StepBuffers(MAX_ROWS, 1024, DEPTH, torch.zeros(MAX_ROWS, 4, dtype=torch.int32), 8, torch.float32)
    buffers.upload[: len(layout.upload)] = torch.from_numpy(layout.upload)
    found = buffers.inputs(layout.shape)
    assert [part.tolist() for part in found] == [part.tolist() for part in written]
    assert all(part.data_ptr() % 16 == 0 for part in found)
    for part in (
        "draft_rows",
        "thresholds",
        "continue_thresholds",
        "row_slots",
    ):  # where captured draft passes look for them
        assert getattr(found, part).data_ptr() == getattr(buffers.draft_inputs(), part).data_ptr()


def test_a_step_feeds_known_tokens_before_drafts() -> None:
    row = HostRow(slot=0, num_uncomputed=10, max_known=10, plain=True, may_draft=True, p_min=0.0, logprobs=NO_LOGPROBS)
    prompt = row.feed(RowStep(0, 6))
    assert (prompt.num_before, prompt.num_samples, prompt.num_drafts) == (6, 0, 0)
    rest = row.feed(RowStep(0, 4))
    assert (rest.num_before, rest.num_samples, rest.num_drafts) == (3, 1, 0)
    verify = row.feed(RowStep(0, 4))
    assert (verify.num_before, verify.num_samples, verify.num_drafts) == (0, 4, 3)
    assert (row.num_uncomputed, row.max_known) == (1, 15)
    row.commit(rest, 1)
    row.commit(verify, 2)
    assert row.max_known == 13


def test_keeps_lie_at_their_row() -> None:
    host = HostRow(
        slot=7, num_uncomputed=200, max_known=200, plain=True, may_draft=True, p_min=0.0, logprobs=NO_LOGPROBS
    )
    keeping = host.feed(RowStep(7, 100, keeps=(Keep(32, 70), Keep(64, None), Keep(96, 71))))
    _, inputs = laid_out([RowFeed(0, 1), keeping, RowFeed(1, 1)])
    nothing, no_state = [-1] * MAX_KEEPS, [0] * MAX_KEEPS
    assert inputs.keep_positions.tolist() == [*nothing, 32, -1, 96, -1, *nothing, *nothing]
    assert inputs.keep_states.tolist() == [*no_state, 70, 0, 71, 0, *no_state, *no_state]
