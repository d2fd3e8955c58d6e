"""What the head's own confidence says of its drafts: how sure its chains are, how often one that sure is accepted.

A chain is the drafts of one row in one step; its confidence at position i is the product of the probabilities that
the head gave to drafts 1 to i. It never rises along a chain, so a floor cuts each chain at one place. Both tables fade
and outlive requests; a row has one number of its own, how much luckier it is than they say. Knows no costs.
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
REFRESH = 16  # chains seen until the shares are computed anew

# Of a draft that may be asked for, before its confidence is known: the chance that it is made, that it is also kept,
# and that it is then accepted with all before it.
Position = tuple[float, float, float]


class Chains:
    def __init__(self, max_depth: int) -> None:
        self.known = False  # whether the runner tells confidences
        # [depth][bins]: chains that got there, by their confidence. Later ones weigh more: that is how old ones fade.
        self._counts = [_peak(PRIOR ** (i + 1)) for i in range(max_depth)]
        self._weights = [1.0] * max_depth  # [depth]: of the next chain
        # [bins]: drafts verified whose chain was this confident, and of those the accepted ones
        self._trials = [PRIOR_TRIALS] * NUM_BINS
        self._hits = [PRIOR_TRIALS * (i + 0.5) / NUM_BINS for i in range(NUM_BINS)]
        self._rows: dict[str, tuple[float, float]] = {}  # drafts accepted, and expected to be
        self._above: list[list[tuple[float, float]]] = []  # see _tables
        self._num_new = 0  # chains that those do not know

    def observe_proposal(self, confidences: Sequence[float]) -> None:
        """One chain: the confidences of all drafts that were made, whether they were kept or not."""
        self.known = True
        chain = 1.0
        for position, confidence in enumerate(confidences):
            chain *= confidence
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

    def threshold(self, key: str, chance: float) -> float | None:
        """The confidence from which on the row's chains are accepted at least this often; None: no chain is."""
        needed = chance / self.luck(key)
        first = NUM_BINS
        while first and self._hits[first - 1] >= needed * self._trials[first - 1]:
            first -= 1
        return None if first == NUM_BINS else first / NUM_BINS

    def outlook(self, key: str, depth: int, draft: float | None, go_on: float | None) -> list[Position]:
        """What to expect of the row's drafts 1, 2, ... under these thresholds; nothing where none would be kept."""
        if draft is None:
            return []
        luck, reached = self.luck(key), 1.0
        positions: list[Position] = []
        for above in self._tables()[:depth]:
            kept, accepted = above[_bin(draft)]
            positions.append((reached, reached * kept, reached * min(kept, luck * accepted)))
            reached *= 0.0 if go_on is None else above[_bin(go_on)][0]
        return positions

    def first(self) -> float:
        """How often a first draft is accepted."""
        return self._tables()[0][0][1]

    def _tables(self) -> list[list[tuple[float, float]]]:
        """[depth][bins]: of the chains that got to the position, the share that is at least as confident as the bin,
        and the share that is also accepted up to there."""
        if self._num_new >= REFRESH or not self._above:
            rates = [hits / trials for hits, trials in zip(self._hits, self._trials)]
            self._above = [_from_above(counts, rates) for counts in self._counts]
            self._num_new = 0
        return self._above


def _bin(confidence: float) -> int:
    return min(NUM_BINS - 1, int(confidence * NUM_BINS))


def _peak(confidence: float) -> list[float]:
    counts = [0.0] * NUM_BINS
    counts[_bin(confidence)] = PRIOR_TRIALS
    return counts


def _from_above(counts: Sequence[float], rates: Sequence[float]) -> list[tuple[float, float]]:
    """[bins]: the share of the chains that lie in this bin or above it, and the share that is accepted besides."""
    total, kept, accepted = sum(counts), 0.0, 0.0
    shares = []
    for count, rate in zip(reversed(counts), reversed(rates)):
        kept += count / total
        accepted += count / total * rate
        shares.append((kept, accepted))
    return shares[::-1]
