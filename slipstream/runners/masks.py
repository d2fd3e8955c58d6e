"""The masks of a step's samples, gathered for a runner. Knows no array library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepMasks:
    at: list[int]  # of the sampling positions, those that have a mask
    masks: list[bytes]  # theirs
    max_accepted: list[int]  # of each row: how many drafts may be accepted

    def add(self, first: int, masks: Sequence[bytes | None]) -> None:
        """The next row, which samples from the position ``first`` on, and its matcher's masks."""
        for i, mask in enumerate(masks):
            if mask is not None:
                self.at.append(first + i)
                self.masks.append(mask)
        self.max_accepted.append(max(0, len(masks) - 1))
