"""How rows lie in the flat batch: places, draws, tiles, draft passes, and that few shapes serve all loads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.contract import DraftRequest
from slipstream.runners.cuda.host_rows import RowFeed
from slipstream.runners.cuda.layout import (
    PROMPT_TILE,
    ROW_BUCKETS,
    TOKEN_BUCKETS,
    Buffers,
    Layout,
    aligned,
    lay_out,
)
from slipstream.runners.torch.caches import ring_size

DEPTH, MAX_ROWS = 3, 64

rows = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 260), st.integers(0, DEPTH)).map(
        lambda row: (row[0], row[1] if row[1] > 1 else 1, row[2])
    ),
    min_size=1,
    max_size=12,
)


def laid_out(rows: list[RowFeed]) -> tuple[Layout, list[np.ndarray]]:
    layout = lay_out(rows, 500, DEPTH, MAX_ROWS)
    parts = layout.upload[DEPTH * MAX_ROWS :]
    places = [aligned(size) for size in layout.shape.parts]
    firsts = np.cumsum(places) - places
    assert len(parts) == sum(places)
    return layout, [parts[first : first + size] for first, size in zip(firsts, layout.shape.parts, strict=True)]


@given(rows)
def test_every_place_has_one_row_and_draws_are_where_known_tokens_end(drawn: list[tuple[int, int, int]]) -> None:
    gaps = [gap for gap, _, _ in drawn]
    feeds = [min(feed, gap + DEPTH if gap == 1 else gap) for gap, feed, _ in drawn]
    steps = [
        RowFeed(10 + i, feed, gap, DraftRequest(propose))
        for i, (feed, (gap, _, propose)) in enumerate(zip(feeds, drawn, strict=True))
    ]
    layout, (slots, offsets, told_feeds, row_draws, token_rows, tile_rows, tile_firsts, draws) = laid_out(steps)
    shape = layout.shape
    assert shape.num_rows in ROW_BUCKETS
    few = (shape.num_rows, shape.num_rows * (1 + DEPTH))
    assert shape.num_tokens in (TOKEN_BUCKETS if shape.has_prompts or few[0] >= 16 else (*TOKEN_BUCKETS, *few))
    assert list(slots[: len(steps)]) == [step.slot for step in steps]
    assert list(told_feeds) == feeds + [0] * (shape.num_rows - len(feeds))
    flat = [i for i, feed in enumerate(feeds) for _ in range(feed)]
    assert list(token_rows) == flat + [-1] * (shape.num_tokens - len(flat))
    wanted = []
    for i, (gap, feed) in enumerate(zip(gaps, feeds, strict=True)):
        assert token_rows[offsets[i]] == i
        places = [offsets[i] + j for j in range(gap - 1, feed)]
        assert row_draws[i] == (len(wanted) if places else -1)
        wanted += places
    assert list(draws[draws >= 0]) == wanted
    covered = [(row, first + j) for row, first in zip(tile_rows, tile_firsts, strict=True) if row >= 0
               for j in range(shape.tile_size) if first + j < feeds[row]]  # fmt: skip
    assert sorted(covered) == [(i, j) for i, feed in enumerate(feeds) for j in range(feed)]
    passes = layout.upload[: DEPTH * MAX_ROWS].reshape(DEPTH, MAX_ROWS)
    for ahead in range(DEPTH):
        taking_part = [i for i, step in enumerate(steps) if feeds[i] >= gaps[i] and step.draft.depth > ahead]
        assert list(passes[ahead][passes[ahead] >= 0]) == taking_part
        assert (ahead < len(layout.pass_rows)) == bool(taking_part)


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
    """Products in 4 bits are others for up to 8 tokens than for 16."""
    kinds = [laid_out([RowFeed(i, 1) for i in range(n)])[0].shape.kind for n in (1, 8, 16, 32)]
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 3


def test_prompts_are_cut_into_tiles() -> None:
    layout, _ = laid_out([RowFeed(0, 100, 100, DraftRequest(1)), RowFeed(1, 4, 1, DraftRequest(3))])
    assert layout.shape.has_prompts
    assert layout.shape.tile_size == PROMPT_TILE
    assert layout.pass_rows == (2, 1, 1)


@pytest.mark.parametrize("depth", range(9))
def test_nothing_on_the_ring_is_overwritten_before_it_is_read(depth: int) -> None:
    """A step reads the window before what it replays, and writes a token and its drafts."""
    read = set(range(-3 - depth, 0))
    written = set(range(1 + depth))
    size = ring_size(depth)
    assert {p % size for p in read}.isdisjoint(p % size for p in written)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_the_device_finds_each_part_at_an_aligned_address(num_rows: int) -> None:
    rows = [RowFeed(slot, 30 + slot, 30 + slot, DraftRequest(1)) for slot in range(num_rows)]
    layout, written = laid_out(rows)
    buffers = Buffers(MAX_ROWS, 1024, DEPTH, torch.zeros(MAX_ROWS, 4, dtype=torch.int32), 8, torch.float32)
    buffers.upload[: len(layout.upload)] = torch.from_numpy(layout.upload)
    found = buffers.parts(layout.shape)
    assert [part.tolist() for part in found] == [part.tolist() for part in written]
    assert all(part.data_ptr() % 16 == 0 for part in found)
