"""Confidence calibration: how confident chains of drafts are, and how often one that confident is accepted.

A chain is the drafts of one row in one step; its confidence at position i is the product of the probabilities that
the head gave to drafts 1 to i. It never rises along a chain, so a threshold ends each chain at one position. Both
tables decay and outlive requests; a row has one number of its own, its acceptance ratio. Knows no costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.speculate.tuning import TUNING, ConfidenceTuning

_MAX_WEIGHT = 1e9  # counts are scaled down before they lose precision


class Thresholds(NamedTuple):
    """Of a row's chains; None: no chain is confident enough."""

    draft: float | None  # below it a draft is not verified
    go_on: float | None  # below it no further draft is made


class DraftOutlook(NamedTuple):
    """The chances of a draft before its confidence is known."""

    made: float
    kept: float  # made, and not below the draft threshold
    accepted: float  # kept, and accepted with all before it


class Shares(NamedTuple):
    """Of the chains that reached a position: those at least as confident as a bin."""

    kept: float
    accepted: float  # kept, and accepted up to there


class RowRecord(NamedTuple):
    """Decaying counts of a row's verified drafts."""

    accepted: float = 0.0
    expected: float = 0.0  # to be accepted, by their confidence


_NEW_ROW = RowRecord()


class ConfidenceCalibration:
    def __init__(self, max_depth: int, tuning: ConfidenceTuning = TUNING.confidence) -> None:
        self.known = False  # whether the runner reports confidences
        self._tuning = tuning
        self._num_bins = num_bins = tuning.num_bins
        # [depth][bins]: chains that got there, by their confidence. Later ones weigh more: that is how old ones decay.
        self._counts = [self._peak(tuning.prior_confidence ** (i + 1)) for i in range(max_depth)]
        self._weights = [1.0] * max_depth  # [depth]: of the next chain
        # [bins]: drafts verified whose chain was this confident, and of those the accepted ones
        self._trials = [tuning.prior_trials] * num_bins
        self._hits = [tuning.prior_trials * (i + 0.5) / num_bins for i in range(num_bins)]
        self._rows: dict[str, RowRecord] = {}
        self._shares: list[list[Shares]] = []  # see _tables
        self._num_new = 0  # chains observed since those were computed

    def observe_proposal(self, confidences: Sequence[float]) -> None:
        """One chain: the confidences of all drafts that were made, whether they were kept or not."""
        self.known = True
        chain = 1.0
        for position, confidence in enumerate(confidences):
            chain *= confidence
            self._count(position, self._bin(chain))
        self._num_new += 1

    def _count(self, position: int, index: int) -> None:
        counts = self._counts[position]
        counts[index] += self._weights[position]
        self._weights[position] /= self._tuning.decay
        if self._weights[position] > _MAX_WEIGHT:
            self._counts[position] = [count / self._weights[position] for count in counts]
            self._weights[position] = 1.0

    def observe_verdict(self, key: str, confidences: Sequence[float], num_accepted: int) -> None:
        """``confidences``: of the drafts that were verified."""
        decay, row_decay = self._tuning.decay, self._tuning.row_decay
        accepted, expected = self._rows.get(key, _NEW_ROW)
        chain = 1.0
        for position, confidence in enumerate(confidences):
            chain *= confidence
            index, hit = self._bin(chain), position < num_accepted
            accepted = accepted * row_decay + hit
            expected = expected * row_decay + self._hits[index] / self._trials[index]
            self._trials[index] = self._trials[index] * decay + 1.0
            self._hits[index] = self._hits[index] * decay + hit
        self._rows[key] = RowRecord(accepted, expected)

    def forget(self, key: str) -> None:
        self._rows.pop(key, None)

    def acceptance_ratio(self, key: str) -> float:
        """The row's accepted drafts over those to be expected from their confidence."""
        row, prior = self._rows.get(key, _NEW_ROW), self._tuning.row_prior_trials
        return min(self._tuning.max_acceptance_ratio, (row.accepted + prior) / (row.expected + prior))

    def threshold(self, key: str, chance: float) -> float | None:
        """The confidence from which on the row's chains are accepted at least this often; None: no chain is."""
        needed = chance / self.acceptance_ratio(key)
        first = self._num_bins
        while first and self._hits[first - 1] >= needed * self._trials[first - 1]:
            first -= 1
        return None if first == self._num_bins else first / self._num_bins

    def outlook(self, key: str, depth: int, thresholds: Thresholds) -> list[DraftOutlook]:
        """Of the row's drafts 1, 2, ... under these thresholds; nothing where none would be kept."""
        draft, go_on = thresholds
        if draft is None:
            return []
        ratio, reached = self.acceptance_ratio(key), 1.0
        draft_bin, go_on_bin = self._bin(draft), None if go_on is None else self._bin(go_on)
        outlook: list[DraftOutlook] = []
        for shares in self._tables()[:depth]:
            kept, accepted = shares[draft_bin]
            outlook.append(DraftOutlook(reached, reached * kept, reached * min(kept, ratio * accepted)))
            reached *= 0.0 if go_on_bin is None else shares[go_on_bin].kept
        return outlook

    def first_draft_acceptance(self) -> float:
        return self._tables()[0][0].accepted

    def _tables(self) -> list[list[Shares]]:
        """[depth][bins]"""
        if self._num_new >= self._tuning.refresh_chains or not self._shares:
            rates = [hits / trials for hits, trials in zip(self._hits, self._trials)]
            self._shares = [_shares_from(counts, rates) for counts in self._counts]
            self._num_new = 0
        return self._shares

    def _bin(self, confidence: float) -> int:
        return min(self._num_bins - 1, int(confidence * self._num_bins))

    def _peak(self, confidence: float) -> list[float]:
        """[bins]: the prior's trials, all at one confidence."""
        counts = [0.0] * self._num_bins
        counts[self._bin(confidence)] = self._tuning.prior_trials
        return counts


def _shares_from(counts: Sequence[float], rates: Sequence[float]) -> list[Shares]:
    """[bins]: summed from the most confident bin down."""
    total, kept, accepted = sum(counts), 0.0, 0.0
    shares = []
    for count, rate in zip(reversed(counts), reversed(rates)):
        kept += count / total
        accepted += count / total * rate
        shares.append(Shares(kept, accepted))
    return shares[::-1]
