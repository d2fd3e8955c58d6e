"""What a row may have become once its steps in flight are done: one pure function folds them.

Exact when nothing is in flight. Knows neither sequences nor blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from slipstream.engine.contract import RowStep


@dataclass(frozen=True, slots=True)
class Bounds:
    """Only acceptance is uncertain, so tokens and cursor vary together and their difference is always exact."""

    min_tokens: int
    max_tokens: int
    num_uncomputed: int  # known tokens after the cursor
    max_drafts: int  # drafts the row holds at most

    @property
    def max_computed(self) -> int:
        """The furthest its cursor can be."""
        return self.max_tokens - self.num_uncomputed

    @property
    def max_feed(self) -> int:
        """Tokens it can feed at most."""
        return self.num_uncomputed + self.max_drafts

    def after(self, row: RowStep) -> Bounds:
        if row.feed < self.num_uncomputed:
            return Bounds(self.min_tokens, self.max_tokens, self.num_uncomputed - row.feed, 0)
        num_verified = min(row.feed, self.max_feed) - self.num_uncomputed
        return Bounds(self.min_tokens + 1, self.max_tokens + 1 + num_verified, 1, row.draft.depth)


def fold(now: Bounds, in_flight: Iterable[RowStep]) -> Bounds:
    return reduce(Bounds.after, in_flight, now)
