"""The cost of a step on this machine: a curve through measured points that keeps learning from every step.

Never decreasing, linear between its points, extrapolated beyond the last. Knows neither rows nor drafts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from slipstream.speculate.tuning import TUNING, CostTuning


class CostCurve:
    def __init__(self, points: Iterable[tuple[int, float]] = (), tuning: CostTuning = TUNING.costs) -> None:
        good = [(x, seconds) for x, seconds in points if seconds > 0.0]
        self._xs = [x for x, _ in good]
        self._ys = [seconds for _, seconds in good]
        self._weights = [tuning.calibration_weight] * len(good)  # observations of each point
        self._tuning = tuning
        self._scale = 1.0
        self._drift = 0.0  # errors of the last steps, whatever their size: not what bends the curve
        self._settling = tuning.num_settling if good else 0
        self._smooth: list[float] | None = None

    @property
    def known(self) -> bool:
        return bool(self._xs)

    def at(self, x: int) -> float:
        assert self._xs
        return self._segment(x, x + 1)[0]

    def span(self, start: int, count: int) -> list[float]:
        """Seconds at start, start + 1, ... (count of them)."""
        assert self._xs
        values: list[float] = []
        while len(values) < count:
            values += self._segment(start + len(values), start + count)
        return values

    @property
    def scale(self) -> float:
        """How much slower the machine is, at every size, than when the first points were measured."""
        return self._scale

    def follow(self, factor: float) -> None:
        """The machine is that much slower than before, as other work showed."""
        self._scale *= factor
        self._smooth = None

    def observe(self, x: int, seconds: float) -> None:
        if seconds <= 0.0 or x <= 0:
            return
        if not self.known:
            self._xs, self._ys, self._weights = [x], [seconds], [1.0]
            return
        expected = self.at(x)
        error = min(max(seconds / expected, self._tuning.min_error), self._tuning.max_error) - 1.0
        if self._settling:
            self._settling -= 1
        else:
            self._bend(x, expected, error)
        self._drift += self._tuning.scale_rate * (error - self._drift)
        self.follow(1.0 + self._tuning.scale_rate * error)

    def _bend(self, x: int, expected: float, error: float) -> None:
        self._insert(x, expected)
        for index, weight in self._neighbours(x):
            self._weights[index] += weight
            seen = self._weights[index]
            # Of a point that is known well only what is its own: a machine that slows down bends nothing (log 269).
            own = error - self._drift if seen >= self._tuning.calibration_weight else error
            self._ys[index] *= 1.0 + max(self._tuning.point_rate, 1.0 / seen) * weight * own

    def _segment(self, start: int, stop: int) -> list[float]:
        """The values from start on that lie on one straight line."""
        xs, ys = self._xs, self._isotonic()
        right = bisect_right(xs, start)
        if right == 0:
            return [ys[0]] * (min(stop, xs[0]) - start)
        if len(xs) == 1:
            return [ys[0]] * (stop - start)
        if right < len(xs):
            stop = min(stop, xs[right])
        left = min(right, len(xs) - 1) - 1
        slope = (ys[left + 1] - ys[left]) / (xs[left + 1] - xs[left])
        return [ys[left] + slope * (x - xs[left]) for x in range(start, stop)]

    def _isotonic(self) -> list[float]:
        """The points made never decreasing: neighbours that disagree share their weighted mean."""
        if self._smooth is None:
            pools: list[tuple[float, float, int]] = []  # mean, weight, number of points
            for y, weight in zip(self._ys, self._weights):
                pools.append((y * self._scale, weight, 1))
                while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                    (high, u, m), (low, v, n) = pools[-2:]
                    pools[-2:] = [((high * u + low * v) / (u + v), u + v, m + n)]
            self._smooth = [mean for mean, _, count in pools for _ in range(count)]
        return self._smooth

    def _insert(self, x: int, expected: float) -> None:
        right = bisect_left(self._xs, x)
        near = self._xs[max(0, right - 1) : right + 1]
        if all(max(x, other) > self._tuning.spacing * min(x, other) for other in near):
            self._xs.insert(right, x)
            self._ys.insert(right, expected / self._scale)
            self._weights.insert(right, 1.0)

    def _neighbours(self, x: int) -> list[tuple[int, float]]:
        """The points next to x and their weights in the value at x."""
        xs = self._xs
        right = bisect_left(xs, x)
        if right == 0:
            return [(0, 1.0)]
        if right == len(xs):
            return [(right - 1, 1.0)]
        share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
        return [(right - 1, 1.0 - share), (right, share)]
