"""A step's rows laid out for mlx-lm's models, which take [rows, width] tokens: grids, and what caches know of one.

Rows that decode or verify share one grid, the shorter ones padded at the end; prompts share a grid with others that
read equally much. Padding is harmless to attention (it lies beyond the row's cursor) and is never fed to a recurrence.
Where recurrent layers are mlx-lm's own, a row that keeps a state is fed in pieces: only the last state can be had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from slipstream.runners.rows import RowSpan


@dataclass(frozen=True)
class Feed:
    """One forward as the caches see it."""

    spans: tuple[RowSpan, ...]
    buffer_rows: tuple[int, ...]  # of these rows in the caches' buffers
    width: int

    @cached_property
    def slots(self) -> tuple[int, ...]:
        return tuple(span.slot for span in self.spans)

    @cached_property
    def reach(self) -> int:
        """No row has a token at this position or after it."""
        return max(span.start for span in self.spans) + self.width

    @cached_property
    def offset(self) -> mx.array:
        """int32 [rows]: position of each row's first token"""
        return mx.array([span.start for span in self.spans], dtype=mx.int32)

    @cached_property
    def rows(self) -> mx.array:
        """int32 [rows]: in the buffers"""
        return mx.array(self.buffer_rows, dtype=mx.int32)

    @cached_property
    def positions(self) -> mx.array:
        """int32 [rows, width]"""
        return self.offset[:, None] + mx.arange(self.width, dtype=mx.int32)

    @cached_property
    def contiguous(self) -> bool:
        """Whether the rows are neighbours in the buffers, so that a view serves them."""
        first = self.buffer_rows[0]
        return self.buffer_rows == tuple(range(first, first + len(self.buffer_rows)))


@dataclass(frozen=True, slots=True)
class Grid:
    feed: Feed
    index: mx.array | None  # int32 [rows * width]: flat tokens in the grid's order; None: they are in that order

    def lay(self, flat: mx.array) -> mx.array:
        """[tokens, ...] of all rows -> [rows, width, ...] of this grid"""
        values = flat if self.index is None else flat[self.index]
        return values.reshape(len(self.feed.spans), self.feed.width, *values.shape[1:])


@dataclass(frozen=True, slots=True)
class Grids:
    """A step's rows in one or more grids."""

    grids: tuple[Grid, ...]
    index: mx.array | None  # int32 [tokens]: each flat token among those of all grids; None: they are in that order

    def flatten(self, parts: Sequence[mx.array]) -> mx.array:
        """[rows, width, ...] of each grid -> [tokens, ...] of all rows, without padding"""
        flat = [part.flatten(0, 1) for part in parts]
        joined = flat[0] if len(flat) == 1 else mx.concatenate(flat)
        return joined if self.index is None else joined[self.index]


def make_grids(spans: Sequence[RowSpan], buffer_rows: Sequence[int], max_short: int, pads: bool) -> Grids:
    """``max_short``: rows of up to so many tokens share a grid, if it may be padded."""
    grids: list[Grid] = []
    order: dict[int, int] = {}  # flat index -> index among the tokens of all grids
    num_before, num_tokens = 0, sum(span.num_fed for span in spans)
    for group in _groups(spans, buffer_rows, max_short, pads):
        chosen = sorted(group, key=lambda piece: piece.buffer_row)
        width = max(piece.span.num_fed for piece in chosen)
        # A short row repeats its last token.
        index = [piece.span.offset + min(j, piece.span.num_fed - 1) for piece in chosen for j in range(width)]
        for row, piece in enumerate(chosen):
            first = num_before + row * width
            order |= {piece.span.offset + j: first + j for j in range(piece.span.num_fed)}
        num_before += len(index)
        feed = Feed(tuple(piece.span for piece in chosen), tuple(piece.buffer_row for piece in chosen), width)
        grids.append(Grid(feed, _index(index, len(index) == num_tokens)))
    flat = [order[token] for token in range(len(order))]
    return Grids(tuple(grids), _index(flat, len(flat) == num_before))


def _index(index: list[int], complete: bool) -> mx.array | None:
    """None for all in their order."""
    return None if complete and index == list(range(len(index))) else mx.array(index, dtype=mx.int32)


@dataclass(frozen=True, slots=True)
class _Piece:
    span: RowSpan
    buffer_row: int


def _groups(spans: Sequence[RowSpan], buffer_rows: Sequence[int], max_short: int, pads: bool) -> list[list[_Piece]]:
    """Which rows share a grid: those that feed equally many tokens, and short ones with padding if ``pads``. The pieces
    of a row come one after the other."""
    groups: dict[tuple[int, int], list[_Piece]] = {}
    for span, row in zip(spans, buffer_rows, strict=True):
        for turn, piece in enumerate([span] if pads else _pieces(span)):
            short = pads and span.num_fed <= max_short
            groups.setdefault((turn, 0 if short else piece.num_fed), []).append(_Piece(piece, row))
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def _pieces(span: RowSpan) -> list[RowSpan]:
    """Cut where a state is kept. Such rows have no drafts."""
    assert not span.num_drafts
    assert not span.num_replay
    pieces, first = [], 0
    for keep in span.keeps:
        end = keep.position - span.start
        pieces.append(
            replace(
                span, start=span.start + first, offset=span.offset + first, num_committed=end - first, keeps=(keep,)
            )
        )
        first = end
    if first < span.num_committed:
        rest = span.num_committed - first
        pieces.append(replace(span, start=span.start + first, offset=span.offset + first, num_committed=rest, keeps=()))
    return pieces
