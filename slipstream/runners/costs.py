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


def of_context(more: Sequence[tuple[int, float]], num_before: int) -> tuple[float, float]:
    """Seconds for each token before a piece of a prompt: of the piece, and of each of its tokens.

    ``more``: by tokens of the piece, two sizes, what so many before added; negative numbers are noise.
    """
    if len(more) < 2:
        return 0.0, 0.0
    (few, less), (many, most) = ((n, max(0.0, seconds)) for n, seconds in more)
    each = max(0.0, most - less) / (many - few)
    return max(0.0, less - each * few) / num_before, each / num_before
