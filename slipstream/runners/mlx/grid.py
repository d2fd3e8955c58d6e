"""A step's rows laid out for mlx-lm's models, which take [rows, width] tokens: grids, and what caches know of one.

Rows that decode or verify share one grid, short ones padded at the end; a row that reads a prompt has a grid of its
own. Padding is harmless to attention (it lies beyond the row's cursor) and is never fed to a recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from slipstream.runners.mlx.rows import Span


@dataclass(frozen=True, slots=True)
class Feed:
    """One forward as the caches see it."""

    slots: tuple[int, ...]
    places: tuple[int, ...]  # of these rows in the caches' buffers
    offset: mx.array  # int32 [rows]: position of each row's first token
    width: int
    reach: int  # no row has a token at this position or behind it
    spans: tuple[Span, ...] = ()  # what the recurrent layers need; () in a draft pass

    @property
    def positions(self) -> mx.array:
        """int32 [rows, width]"""
        return self.offset[:, None] + mx.arange(self.width, dtype=mx.int32)

    @property
    def neighbours(self) -> bool:
        """Whether the rows lie side by side, so that a view of the buffers serves them."""
        return self.places == tuple(range(self.places[0], self.places[0] + len(self.places)))


@dataclass(frozen=True, slots=True)
class Grid:
    index: tuple[int, ...]  # of its rows, in the plan
    spans: tuple[Span, ...]
    tokens: mx.array  # int32 [rows, width]
    feed: Feed

    @property
    def width(self) -> int:
        return self.feed.width


def make_grid(
    index: Sequence[int], spans: Sequence[Span], places: Sequence[int], tokens: Sequence[Sequence[int]]
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


def group(spans: Sequence[Span], share_up_to: int, pads: bool) -> list[list[int]]:
    """Which rows share a grid. ``pads`` False: only rows that feed equally many tokens do."""
    shared: dict[int, list[int]] = {}
    alone: list[list[int]] = []
    for i, span in enumerate(spans):
        if span.num_fed > share_up_to:
            alone.append([i])
        else:
            shared.setdefault(0 if pads else span.num_fed, []).append(i)
    return [*shared.values(), *alone]
