"""What constraints rule out in a host-driven step: in its samples, and in the drafts after them."""

from __future__ import annotations

from slipstream.runners.host.rows import Row, SamplingRows
from slipstream.runners.masks import StepMasks


def sample_masks(sampling: SamplingRows) -> StepMasks | None:
    """At each row's last known token and its drafts. None: nobody is constrained."""
    if all(row.matcher is None for row in sampling.rows):
        return None
    found = StepMasks([], [], [])
    first = 0
    for row, span in zip(sampling.rows, sampling.spans, strict=True):
        found.add(first, row.masks(span.num_drafts))
        first += span.num_drafts + 1
    return found


class DraftMasks:
    """What a constrained row may draft after the tokens it is about to commit. A row with a fault drafts anything."""

    def __init__(self, row: Row, num_accepted: int, sampled: int) -> None:
        self._row = row
        self._tokens = [*row.drafts[:num_accepted], sampled]

    def next(self) -> bytes | None:
        matcher = self._row.matcher
        if matcher is None or self._row.fault:
            return None
        masks = matcher.masks(self._tokens)
        return masks[-1] if len(masks) > len(self._tokens) else None

    def follow(self, draft: int) -> None:
        self._tokens.append(draft)
