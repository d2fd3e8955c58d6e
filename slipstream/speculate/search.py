"""The search for depths: drafts compete by their chance of being accepted, and the best prefix by rate wins.

Rate = tokens expected of the step over the seconds it is expected to take. Pure functions; see decision 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from slipstream.sampling.params import MAX_DEPTH


class Candidate(NamedTuple):
    """One draft that may be made."""

    chance: float  # that it is proposed and accepted with all before it
    depth: int
    row: int
    proposed: float  # chance that it is proposed
    in_pass: float  # chance that its row takes part in its draft pass


@dataclass(frozen=True, slots=True)
class Choice:
    depths: list[int]
    tokens: float  # expected
    drafts: float  # expected to be verified
    seconds: float  # expected
    plain_seconds: float  # of the same step without drafts

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Costs:
    """Seconds of a step. The last value stands twice, so that there is always a next one to interpolate with."""

    def __init__(self, verify: Sequence[float], draft: Sequence[float]) -> None:
        self.verify = [*verify, verify[-1]]  # [drafts + 2]
        self.draft = [*draft, draft[-1]]  # [rows + 2]: of one draft pass


class Offset(NamedTuple):
    """Tokens and seconds that do not count in a rate."""

    tokens: float = 0.0
    seconds: float = 0.0

    def rate(self, tokens: float, seconds: float) -> float:
        return (tokens - self.tokens) / max(seconds - self.seconds, 1e-9)


NOTHING = Offset()
_CHANCE, _DEPTH = attrgetter("chance"), attrgetter("depth")


def by_chance(by_depth: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """The likeliest first; of equal ones the less deep. A row's own drafts stay in order: their chances never rise."""
    return sorted(chain.from_iterable(by_depth), key=_CHANCE, reverse=True)  # stable


def search(
    candidates: list[Candidate], costs: Costs, plain: Choice, min_gain: float, offset: Offset = NOTHING
) -> Choice:
    """Most tokens a second, without the offset; ``plain`` where no drafts gain at least ``min_gain`` over its rate.

    The best prefix under each cap of the depth: a pass has a price of its own, so likely drafts of the next may wait.
    """
    best, min_rate = plain, min_gain * plain.rate
    max_depth = max(map(_DEPTH, candidates), default=0)
    for cap in range(1, max_depth + 1):
        capped = candidates if cap == max_depth else [each for each in candidates if each.depth <= cap]
        found = _best_prefix(capped, costs, plain, min_rate, offset)
        if found is not None:
            best, min_rate = found, offset.rate(found.tokens, found.seconds)
    return best


def _best_prefix(
    candidates: list[Candidate], costs: Costs, plain: Choice, min_rate: float, offset: Offset
) -> Choice | None:
    """Take one candidate after the other: the count with the highest rate, if it is above ``min_rate``.

    Every step runs this for each row and depth, so interpolation stands in the loop.
    """
    verify, draft = costs.verify, costs.draft
    tokens_off, seconds_off = offset
    num_in_pass = [0.0] * (MAX_DEPTH + 1)
    pass_seconds = [0.0] * (MAX_DEPTH + 1)
    tokens, drafts, drafting = plain.tokens, 0.0, 0.0
    best = None
    for index, (chance, depth, _, proposed, in_pass) in enumerate(candidates, 1):
        tokens += chance
        drafts += proposed
        num_in_pass[depth] = num_rows = num_in_pass[depth] + in_pass
        left = int(num_rows)
        drafting -= pass_seconds[depth]
        pass_seconds[depth] = draft[left] + (num_rows - left) * (draft[left + 1] - draft[left])
        drafting += pass_seconds[depth]
        left = int(drafts)
        seconds = verify[left] + (drafts - left) * (verify[left + 1] - verify[left]) + drafting
        if tokens - tokens_off > min_rate * (seconds - seconds_off):
            min_rate = (tokens - tokens_off) / max(seconds - seconds_off, 1e-9)
            best = index, (tokens, drafts, seconds)
    if best is None:
        return None
    count, expected = best
    depths = [0] * len(plain.depths)
    for candidate in candidates[:count]:
        depths[candidate.row] = candidate.depth
    return Choice(depths, *expected, plain.seconds)
