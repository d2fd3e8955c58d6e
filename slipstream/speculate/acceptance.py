"""How likely drafts are accepted: per row and position, with the whole engine's acceptance as the prior.

The estimate at position i is conditional: the share of accepted drafts among those whose predecessors were accepted.
Old trials decay. The engine's own estimate outlives requests. Knows neither costs nor depths.
"""

from __future__ import annotations

from slipstream.speculate.tuning import TUNING, AcceptanceTuning


class Trials:
    """Decaying counts by position."""

    def __init__(self, depth: int, num_trials: float = 0.0, rate: float = 0.0) -> None:
        self.trials = [num_trials] * depth
        self.hits = [num_trials * rate] * depth

    def add(self, position: int, hit: bool, decay: float) -> None:
        self.trials[position] = self.trials[position] * decay + 1.0
        self.hits[position] = self.hits[position] * decay + hit

    def decay_from(self, start: int, decay: float) -> None:
        for position in range(start, len(self.trials)):
            self.trials[position] *= decay
            self.hits[position] *= decay


class Acceptance:
    def __init__(self, max_depth: int, tuning: AcceptanceTuning = TUNING.acceptance) -> None:
        self._max_depth = max_depth
        self._tuning = tuning
        self._engine = Trials(max_depth, tuning.prior_trials, tuning.prior_rate)
        self._rows: dict[str, Trials] = {}
        self._untried = Trials(max_depth)  # a row without trials

    def observe(self, key: str, num_drafted: int, num_accepted: int) -> None:
        """Drafts up to the first rejected one were tried; later ones say nothing."""
        row = self._rows.setdefault(key, Trials(self._max_depth))
        num_tried = min(num_accepted + 1, num_drafted, self._max_depth)
        for position in range(num_tried):
            row.add(position, position < num_accepted, self._tuning.row_decay)
            self._engine.add(position, position < num_accepted, self._tuning.engine_decay)
        row.decay_from(num_tried, self._tuning.idle_decay)

    def prior_hits(self) -> list[float]:
        """[depth]: the engine's own estimate, with optimism, as hits among ``engine_weight`` trials."""
        weight, optimism = self._tuning.engine_weight, self._tuning.optimism
        pairs = zip(self._engine.hits, self._engine.trials)
        return [weight * min(1.0, hits / trials + optimism / trials) for hits, trials in pairs]

    def survival(self, key: str, depth: int, prior_hits: list[float]) -> list[float]:
        """[depth]: probability that the first 1, 2, ... drafts of the row are all accepted."""
        row, weight = self._rows.get(key, self._untried), self._tuning.engine_weight
        survival, product = [], 1.0
        for hits, trials, prior in zip(row.hits[:depth], row.trials, prior_hits):
            product *= (hits + prior) / (trials + weight)
            survival.append(product)
        return survival

    def forget(self, key: str) -> None:
        self._rows.pop(key, None)
