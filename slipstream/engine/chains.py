"""What the head's own confidence says of its drafts: how sure its chains are, how often one that sure is accepted.

A chain is the drafts of one row in one step; its confidence at position i is the product of the probabilities that
the head gave to drafts 1 to i. It never rises along a chain, so one floor cuts each chain at one place. Both tables
fade and outlive requests; a row has one number of its own, how much luckier it is than they say. Knows no costs.
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_BINS = 16  # of confidence, equally wide
PRIOR = 0.75  # the confidence of a draft assumed before anything was seen
PRIOR_TRIALS = 8.0
FADE = 0.99  # per trial of a position or a bin
ROW_FADE = 0.98  # per trial
LEAN_TRIALS = 24.0  # a row counts as ordinary for this many trials beside its own
MOST_LUCK = 1.25  # a row is not believed to be luckier than this
REFRESH = 16  # chains seen until the outlook is computed anew
NO_FLOOR = 1e-6  # cuts nothing, but lets the runner know that confidences are wanted
OUT_OF_REACH = 2.0  # a floor above every confidence

# Of a draft that may be asked for, before its confidence is known: the chance that the chain gets there without falling
# under the floor, and the chance that all its drafts up to there are then accepted.
Position = tuple[float, float]


class Chains:
    def __init__(self, max_depth: int) -> None:
        self.known = False  # whether the runner tells confidences
        # [depth][bins]: chains by their confidence at that position. Later ones weigh more: that is how old ones fade.
        self._counts = [_peak(PRIOR ** (i + 1)) for i in range(max_depth)]
        self._weights = [1.0] * max_depth  # [depth]: of the next chain
        # [bins]: drafts verified whose chain was this confident, and of those the accepted ones
        self._trials = [PRIOR_TRIALS] * NUM_BINS
        self._hits = [PRIOR_TRIALS * (i + 0.5) / NUM_BINS for i in range(NUM_BINS)]
        self._rows: dict[str, tuple[float, float]] = {}  # drafts accepted, and expected to be
        self._outlooks = self._tabulate()
        self._num_new = 0  # chains that the outlooks do not know

    def observe_proposal(self, num_asked: int, confidences: Sequence[float]) -> None:
        """One chain: its confidences, the first one under the floor included if there was one."""
        self.known = True
        chain = 1.0
        for position in range(min(num_asked, len(self._counts))):
            chain *= confidences[position] if position < len(confidences) else 0.0
            self._count(position, _bin(chain))
        self._num_new += 1

    def _count(self, position: int, where: int) -> None:
        counts = self._counts[position]
        counts[where] += self._weights[position]
        self._weights[position] /= FADE
        if self._weights[position] > 1e9:
            self._counts[position] = [count / self._weights[position] for count in counts]
            self._weights[position] = 1.0

    def observe_verdict(self, key: str, confidences: Sequence[float], num_accepted: int) -> None:
        """``confidences``: of the drafts that were verified."""
        accepted, expected = self._rows.get(key, (0.0, 0.0))
        chain = 1.0
        for position, confidence in enumerate(confidences):
            chain *= confidence
            where, hit = _bin(chain), position < num_accepted
            accepted = accepted * ROW_FADE + hit
            expected = expected * ROW_FADE + self._hits[where] / self._trials[where]
            self._trials[where] = self._trials[where] * FADE + 1.0
            self._hits[where] = self._hits[where] * FADE + hit
        self._rows[key] = accepted, expected

    def forget(self, key: str) -> None:
        self._rows.pop(key, None)

    def luck(self, key: str) -> float:
        """How often the row's drafts are accepted, by how often drafts as confident as its own are."""
        accepted, expected = self._rows.get(key, (0.0, 0.0))
        return min(MOST_LUCK, (accepted + LEAN_TRIALS) / (expected + LEAN_TRIALS))

    def floor(self, key: str, chance: float) -> float:
        """The confidence from which on the row's chains are accepted at least this often."""
        needed = chance / self.luck(key)
        first = NUM_BINS
        while first and self._hits[first - 1] >= needed * self._trials[first - 1]:
            first -= 1
        return OUT_OF_REACH if first == NUM_BINS else max(NO_FLOOR, first / NUM_BINS)

    def outlook(self, key: str, depth: int, floor: float) -> list[Position]:
        """What is to be expected of the row's drafts 1, 2, ... under this floor; nothing where none would pass it."""
        if floor > 1.0:
            return []
        if self._num_new >= REFRESH:
            self._outlooks = self._tabulate()
            self._num_new = 0
        luck = self.luck(key)
        positions = self._outlooks[_bin(floor)][:depth]
        return [(proposed, min(proposed, luck * accepted)) for proposed, accepted in positions]

    def _tabulate(self) -> list[list[Position]]:
        """[bins][depth]: the outlook of an ordinary row if the floor is the lower edge of the bin."""
        rates = [hits / trials for hits, trials in zip(self._hits, self._trials)]
        columns = [_from_above(counts, rates) for counts in self._counts]
        return [_falling(positions) for positions in zip(*columns)]


def _bin(confidence: float) -> int:
    return min(NUM_BINS - 1, int(confidence * NUM_BINS))


def _peak(confidence: float) -> list[float]:
    counts = [0.0] * NUM_BINS
    counts[_bin(confidence)] = PRIOR_TRIALS
    return counts


def _from_above(counts: Sequence[float], rates: Sequence[float]) -> list[Position]:
    """[bins]: the share of all chains that lie in this bin or above it, and the share that is accepted besides."""
    total, proposed, accepted = sum(counts), 0.0, 0.0
    positions = []
    for count, rate in zip(reversed(counts), reversed(rates)):
        proposed += count / total
        accepted += count / total * rate
        positions.append((proposed, accepted))
    return positions[::-1]


def _falling(positions: Sequence[Position]) -> list[Position]:
    """Positions were seen at different times: what noise makes rise along a chain is levelled."""
    proposed = accepted = 1.0
    levelled = []
    for there, good in positions:
        proposed, accepted = min(proposed, there), min(accepted, good)
        levelled.append((proposed, accepted))
    return levelled
