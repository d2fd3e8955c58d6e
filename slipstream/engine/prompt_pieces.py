"""How many tokens of prompts a step reads, by what they cost, and how prompts share them. The same on every runner.

Beside decoding streams, as many as keep the step within a factor of what it would take without them. Where nobody
decodes, as many as are read fastest. Knows neither sequences nor blocks. See decision 20.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from slipstream.config import EngineConfig
from slipstream.engine.contract import RunnerInfo
from slipstream.speculate.cost_model import CostModel, Decoding, Reading

UNTIMED = 64  # tokens beside decoding streams until steps have been timed
NEAR = 0.95  # of the highest rate: as fast, as far as timings can tell
PROBE = 8  # one of so many steps where nobody decodes reads all it may: no verdict on large pieces is final
QUIET = 8  # one of so many steps beside a prompt reads nothing, to see what decoding takes by now
BESIDE = 0.75  # of the rate at which prompts are read alone: beside a stream it is as good


class PromptPieces:
    def __init__(self, info: RunnerInfo, config: EngineConfig, costs: CostModel) -> None:
        self._sizes, self._config, self._costs = info.step_sizes, config, costs
        self._num_alone = self._num_beside = 0  # steps where nobody decoded, and where some did

    def size(self, rows: Decoding, budget: int, num_before: int = 0, *, has_prompts: bool = True) -> int:
        """Seldom 0 where the budget allows more. ``rows``: all that decode in the step; ``budget``: tokens it may feed
        beside them; ``num_before``: tokens before the piece in its prompt."""
        if not rows.num_rows:
            self._num_alone += 1
            return self._fastest(budget) if self._num_alone % PROBE else budget
        budget = min(budget, self._config.max_step_tokens - rows.num_tokens)
        seconds = self._costs.undisturbed(rows)
        if seconds is None or not self._costs.reads_timed:
            return max(0, min(budget, UNTIMED))
        self._num_beside += has_prompts
        if has_prompts and self._num_beside % QUIET == 0:
            return 0
        piece = self._within((self._config.max_slowdown - 1.0) * seconds, rows.num_tokens, budget, num_before)
        return max(0, min(budget, max(1, self._whole(rows.num_tokens, piece))))

    def ends_together(self, budget: int) -> bool:
        """Whether prompts that are read while nobody decodes should end at the same time: the first that ends slows
        down the reading of the others."""
        alone, stream = self._fastest(budget), Decoding(1, 1)
        seconds = self._costs.undisturbed(stream)
        if seconds is None or not self._costs.reads_timed:
            return False
        piece = self.size(stream, budget, has_prompts=False)
        beside = piece / (seconds + self._costs.added(1, Reading.of(piece, 0)))
        return beside < BESIDE * alone / self._costs.reading(alone)

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
        """With most tokens a second; of those that are as fast, the largest. One that was never timed is tried."""
        sizes = [n for n in self._costs.read_sizes if n <= budget]
        if not self._costs.reads_timed or not sizes:
            return budget
        rates = {n: n / self._costs.reading(n) for n in sizes}
        rates[budget] = rates[sizes[-1]] if sizes == self._costs.read_sizes else budget / self._costs.reading(budget)
        return max(n for n, rate in rates.items() if rate >= NEAR * max(rates.values()))


def share_by_length(piece: int, lefts: Sequence[int], next_left: int | None) -> list[int]:
    """What prompts get, the oldest first. It is sure of half, so that it never starves; else those with the least left
    come first, so that they need not wait for long ones. ``next_left``: of a prompt that could be admitted; what it
    should get is left over."""
    shares = [0] * len(lefts)
    reserved = min(lefts[0], (piece + 1) // 2) if lefts else 0
    free = piece - reserved
    for index in sorted(range(len(lefts)), key=lefts.__getitem__):
        if next_left is not None and next_left < lefts[index]:
            free, next_left = max(0, free - next_left), None
        free += 0 if index else reserved
        shares[index] = min(lefts[index], free)
        free -= shares[index]
    return shares


def share_evenly(piece: int, lefts: Sequence[int], num_waiting: int) -> tuple[list[int], int]:
    """What prompts get, and what each that is admitted gets at most: as much each, and what one does not need the
    others."""
    shares, count = [0] * len(lefts), len(lefts) + num_waiting
    for index in sorted(range(len(lefts)), key=lefts.__getitem__):
        shares[index] = min(lefts[index], -(-piece // count))
        piece, count = piece - shares[index], count - 1
    return shares, -(-piece // max(1, count))
