"""The cost of work by its size and by the cached tokens that it attends to: a curve, and a line on top of it.

The two are learned apart. Streams that join and leave change the KV tokens of a step at once, a machine that slows down
does not: so the line follows sudden changes of the context only, and all else is the curve's.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.speculate.cost_curve import CostCurve
from slipstream.speculate.tuning import TUNING, CostTuning


class ContextSlope:
    """Seconds for each KV token: a regression through differences from the last steps, with a slope to start from."""

    def __init__(self, slope: float = 0.0, tuning: CostTuning = TUNING.costs) -> None:
        self._tuning = tuning
        self._prior = tuning.context_span**2
        self._first = self.value = slope
        self._means: tuple[float, float] | None = None  # of KV tokens and seconds, in the last steps
        self._variance = self._covariance = 0.0

    def observe(self, context: float, seconds: float) -> None:
        """``seconds``: beyond those of the curve."""
        if self._means is None:
            self._means = context, seconds
        mean_context, mean_seconds = self._means
        tokens, more = context - mean_context, seconds - mean_seconds
        rate, decay = self._tuning.context_rate, self._tuning.context_decay
        self._means = mean_context + rate * tokens, mean_seconds + rate * more
        self._variance = decay * self._variance + tokens * tokens
        self._covariance = decay * self._covariance + tokens * more
        slope = (self._covariance + self._prior * self._first) / (self._variance + self._prior)
        self.value = max(0.0, slope)


class ContextCost:
    def __init__(
        self, points: Iterable[tuple[int, float]] = (), slope: float = 0.0, tuning: CostTuning = TUNING.costs
    ) -> None:
        self.curve = CostCurve(points, tuning)
        self._slope = ContextSlope(slope, tuning)
        self._tuning = tuning

    @property
    def known(self) -> bool:
        return self.curve.known

    def at(self, size: int, context: float = 0.0) -> float:
        return self.curve.at(size) + self.of_context(context)

    def of_context(self, context: float) -> float:
        """``context``: KV tokens."""
        return self._slope.value * context

    def observe(self, size: int, context: float, seconds: float) -> None:
        if seconds <= 0.0 or size <= 0:
            return
        if self.known:
            expected, tuning = self.at(size, context), self._tuning
            likely = min(max(seconds, tuning.min_error * expected), tuning.max_context_error * expected)
            self._slope.observe(context, likely - self.curve.at(size))
        attending = min(self.of_context(context), self._tuning.max_context_share * seconds)
        self.curve.observe(size, seconds - attending)
