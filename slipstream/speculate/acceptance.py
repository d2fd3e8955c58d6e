"""How likely drafts are accepted: per row and position, leaning on what the whole engine has seen.

The estimate at position i is conditional: of the drafts whose predecessors were accepted, how many were.
Old trials fade. The engine's own estimate outlives requests. Knows neither costs nor depths.
"""

from __future__ import annotations

PRIOR = 0.75  # acceptance assumed before anything was seen
PRIOR_TRIALS = 8.0
LEAN_TRIALS = 24.0  # the engine's estimate counts in a row's as this many trials
ENGINE_FADE = 0.998  # per trial
ROW_FADE = 0.98  # per trial
DOUBT = 1.5  # hits granted to the engine's estimate: an unlucky start must not end drafting
IDLE_FADE = 0.995  # per step in which the position was not tried: a verdict is not for ever


class Trials:
    """Faded counts by position."""

    def __init__(self, depth: int, num_trials: float = 0.0, rate: float = 0.0) -> None:
        self.trials = [num_trials] * depth
        self.hits = [num_trials * rate] * depth

    def add(self, position: int, hit: bool, fade: float) -> None:
        self.trials[position] = self.trials[position] * fade + 1.0
        self.hits[position] = self.hits[position] * fade + hit

    def fade(self, start: int, by: float) -> None:
        for position in range(start, len(self.trials)):
            self.trials[position] *= by
            self.hits[position] *= by


class Acceptance:
    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._engine = Trials(max_depth, PRIOR_TRIALS, PRIOR)
        self._rows: dict[str, Trials] = {}
        self._blank = Trials(max_depth)  # a row that was never tried

    def observe(self, key: str, num_drafted: int, num_accepted: int) -> None:
        """Drafts up to the first rejected one were tried; those behind it say nothing."""
        row = self._rows.setdefault(key, Trials(self._max_depth))
        num_tried = min(num_accepted + 1, num_drafted, self._max_depth)
        for position in range(num_tried):
            row.add(position, position < num_accepted, ROW_FADE)
            self._engine.add(position, position < num_accepted, ENGINE_FADE)
        row.fade(num_tried, IDLE_FADE)

    def lean(self) -> list[float]:
        """The engine's own estimate by position, with the benefit of the doubt, as hits of LEAN_TRIALS trials."""
        pairs = zip(self._engine.hits, self._engine.trials)
        return [LEAN_TRIALS * min(1.0, hits / trials + DOUBT / trials) for hits, trials in pairs]

    def survival(self, key: str, depth: int, lean: list[float]) -> list[float]:
        """[depth]: probability that the first 1, 2, ... drafts of the row are all accepted."""
        row = self._rows.get(key, self._blank)
        survival, product = [], 1.0
        for hits, trials, leaning in zip(row.hits[:depth], row.trials, lean):
            product *= (hits + leaning) / (trials + LEAN_TRIALS)
            survival.append(product)
        return survival

    def forget(self, key: str) -> None:
        self._rows.pop(key, None)
