"""How many drafts of a row are accepted: a draft is, while it equals the target's own sample at its position.

A sample's randomness is a function of (seed, position), so the output with speculation is the output without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.runners.host.rows import Row, SamplingRows, Verdict
from slipstream.runners.simulate import Simulation


def accept_all(
    sampling: SamplingRows, sampled: Sequence[int], max_accepted: Sequence[int] | None, simulation: Simulation | None
) -> list[Verdict]:
    """``sampled``: the target's tokens at all sampling positions; ``max_accepted``: per row, where masks limit it."""
    verdicts, at = [], 0
    for i, (row, span) in enumerate(zip(sampling.rows, sampling.spans, strict=True)):
        own = sampled[at : at + span.num_drafts + 1]
        limit = span.num_drafts if max_accepted is None else min(span.num_drafts, max_accepted[i])
        count = accept(row, own, limit, simulation)
        verdicts.append(Verdict(count, own[count]))
        at += span.num_drafts + 1
    return verdicts


def accept(row: Row, sampled: Sequence[int], limit: int, simulation: Simulation | None) -> int:
    for i in range(limit):
        if simulation is not None:
            passes = simulation.passes(row.sampling.seed, len(row.tokens) + i, i)
        else:
            passes = row.drafts[i] == sampled[i]
        if not passes:
            return i
    return limit
