"""What constraints take out of a step's draws and drafts, gathered for whatever applies it. Knows no array library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.runners.host.rows import Row
from slipstream.runners.rows import RowSpan


@dataclass(frozen=True, slots=True)
class StepMasks:
    at: list[int]  # of the drawing positions, those that have a mask
    masks: list[bytes]  # theirs
    most: list[int]  # of each row: how many drafts may be accepted

    def add(self, first: int, told: Sequence[bytes | None]) -> None:
        """The next row, which draws from the position ``first`` on, and what its matcher told."""
        for i, mask in enumerate(told):
            if mask is not None:
                self.at.append(first + i)
                self.masks.append(mask)
        self.most.append(max(0, len(told) - 1))


def step_masks(rows: Sequence[Row], spans: Sequence[RowSpan]) -> StepMasks | None:
    """Of the rows that draw, each at its last known token and its drafts. None: nobody is constrained."""
    if all(row.matcher is None for row in rows):
        return None
    found = StepMasks([], [], [])
    first = 0
    for row, span in zip(rows, spans, strict=True):
        found.add(first, row.masks(span.num_drafts))
        first += span.num_drafts + 1
    return found


class Guide:
    """What a constrained row may draft, behind what it is about to commit. A row that cannot go on drafts anything."""

    def __init__(self, row: Row, accepted: int, drawn: int) -> None:
        self._row = row
        self._behind = [*row.drafts[:accepted], drawn]

    def mask(self) -> bytes | None:
        matcher = self._row.matcher
        if matcher is None or self._row.fault:
            return None
        masks = matcher.masks(self._behind)
        return masks[-1] if len(masks) > len(self._behind) else None

    def follow(self, draft: int) -> None:
        self._behind.append(draft)
