"""A step's rows laid out for mlx-lm's models, which take [rows, width] tokens: grids, and what caches know of one.

Rows that decode or verify share one grid, the shorter ones padded at the end; prompts share a grid with others that
read equally much. Padding is harmless to attention (it lies beyond the row's cursor) and is never fed to a recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from slipstream.runners.rows import RowSpan


@dataclass(frozen=True)
class Feed:
    """One forward as the caches see it."""

    slots: tuple[int, ...]
    places: tuple[int, ...]  # of these rows in the caches' buffers
    offset: mx.array  # int32 [rows]: position of each row's first token
    width: int
    reach: int  # no row has a token at this position or behind it
    spans: tuple[RowSpan, ...] = ()  # what the recurrent layers need; () in a draft pass

    @cached_property
    def rows(self) -> mx.array:
        """int32 [rows]: the places"""
        return mx.array(self.places, dtype=mx.int32)

    @cached_property
    def positions(self) -> mx.array:
        """int32 [rows, width]"""
        return self.offset[:, None] + mx.arange(self.width, dtype=mx.int32)

    @cached_property
    def neighbours(self) -> bool:
        """Whether the rows lie side by side, so that a view of the buffers serves them."""
        return self.places == tuple(range(self.places[0], self.places[0] + len(self.places)))


@dataclass(frozen=True, slots=True)
class Grid:
    index: tuple[int, ...]  # of its rows, in the plan
    spans: tuple[RowSpan, ...]
    tokens: mx.array  # int32 [rows, width]
    feed: Feed

    @property
    def width(self) -> int:
        return self.feed.width


def make_grid(
    index: Sequence[int], spans: Sequence[RowSpan], places: Sequence[int], tokens: Sequence[Sequence[int]]
) -> Grid:
    """In the order of their places; a short row repeats its last token."""
    order = sorted(range(len(spans)), key=lambda i: places[i])
    width = max(span.num_fed for span in spans)
    padded = [[*tokens[i], *[tokens[i][-1]] * (width - len(tokens[i]))] for i in order]
    chosen = tuple(spans[i] for i in order)
    feed = Feed(
        slots=tuple(span.slot for span in chosen),
        places=tuple(places[i] for i in order),
        offset=mx.array([span.start for span in chosen], dtype=mx.int32),
        width=width,
        reach=max(span.start for span in chosen) + width,
        spans=chosen,
    )
    return Grid(tuple(index[i] for i in order), chosen, mx.array(padded, dtype=mx.int32), feed)


def group(spans: Sequence[RowSpan], share_up_to: int, pads: bool) -> list[list[int]]:
    """Which rows share a grid: those that feed equally many tokens, and short ones with padding if ``pads``."""
    groups: dict[int, list[int]] = {}
    for i, span in enumerate(spans):
        short = pads and span.num_fed <= share_up_to
        groups.setdefault(0 if short else span.num_fed, []).append(i)
    return list(groups.values())
