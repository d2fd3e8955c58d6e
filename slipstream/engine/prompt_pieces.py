"""How many tokens of prompts a step reads: by what they cost, on every runner.

Beside decoding streams, as many as keep the step within a factor of what it would take without them. Where nobody
decodes, as many as are read fastest. Knows neither sequences nor blocks. See decision 20.
"""

from __future__ import annotations

from bisect import bisect_right

from slipstream.config import EngineConfig
from slipstream.engine.contract import RunnerInfo
from slipstream.speculate.cost_model import CostModel, Decoding, Reading

UNTIMED = 64  # tokens beside decoding streams until steps have been timed
NEAR = 0.95  # of the highest rate: as fast, as far as timings can tell


class PromptPieces:
    def __init__(self, info: RunnerInfo, config: EngineConfig, costs: CostModel) -> None:
        self._sizes, self._config, self._costs = info.step_sizes, config, costs

    def size(self, rows: Decoding, budget: int, num_before: int = 0) -> int:
        """At least 1 where the budget allows it. ``rows``: all that decode in the step; ``budget``: tokens it may feed
        beside them; ``num_before``: tokens before the piece in its prompt."""
        if not rows.num_rows:
            return self._fastest(budget)
        budget = min(budget, self._config.max_step_tokens - rows.num_tokens)
        seconds = self._costs.undisturbed(rows)
        if seconds is None or not self._costs.reads_timed:
            return max(0, min(budget, UNTIMED))
        piece = self._within((self._config.max_slowdown - 1.0) * seconds, rows.num_tokens, budget, num_before)
        return max(0, min(budget, max(1, self._whole(rows.num_tokens, piece))))

    def _within(self, seconds: float, num_decoding: int, budget: int, num_before: int) -> int:
        """The largest piece that adds no more to the step."""
        low, high = 0, max(0, budget)
        while low < high:
            middle = (low + high + 1) // 2
            if self._costs.added(num_decoding, Reading.of(middle, num_before)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _whole(self, num_decoding: int, piece: int) -> int:
        """A runner that pads its steps computes the padding too: so the step ends where it begins."""
        index = bisect_right(self._sizes, num_decoding + piece)
        whole = self._sizes[index - 1] - num_decoding if index else 0
        return whole if whole > 0 else piece

    def _fastest(self, budget: int) -> int:
        """With most tokens a second; of those that are as fast, the largest."""
        if not self._costs.reads_timed:
            return budget
        rates = {n: n / self._costs.reading(n) for n in (*self._costs.read_sizes, budget) if 0 < n <= budget}
        best = max(rates.values(), default=0.0)
        return max((n for n, rate in rates.items() if rate >= NEAR * best), default=budget)
