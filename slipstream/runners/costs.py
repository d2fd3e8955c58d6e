"""What the runners' calibrations share."""

from __future__ import annotations

from collections.abc import Sequence

Points = tuple[tuple[int, float], ...]  # (size, seconds), sizes rising


def rising(points: Sequence[tuple[int, float]]) -> Points:
    """More work never takes less time: noise that says otherwise is levelled."""
    best = float("inf")
    levelled = []
    for n, seconds in reversed(points):
        best = min(best, seconds)
        levelled.append((n, best))
    return tuple(reversed(levelled))
