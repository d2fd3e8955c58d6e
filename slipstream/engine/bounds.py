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
    """Only acceptance is uncertain, so the tokens vary together with the cursor and their gap is always exact."""

    least: int  # tokens the row has at least
    most: int  # tokens the row has at most
    gap: int  # known tokens that are not computed yet
    drafts: int  # drafts it holds at most

    @property
    def computed(self) -> int:
        """The furthest its cursor can be."""
        return self.most - self.gap

    @property
    def pending(self) -> int:
        """Tokens it can feed at most."""
        return self.gap + self.drafts

    def after(self, row: RowStep) -> Bounds:
        if row.feed < self.gap:
            return Bounds(self.least, self.most, self.gap - row.feed, 0)
        verified = min(row.feed, self.pending) - self.gap
        return Bounds(self.least + 1, self.most + 1 + verified, 1, row.draft.depth)


def fold(now: Bounds, in_flight: Iterable[RowStep]) -> Bounds:
    return reduce(Bounds.after, in_flight, now)
