"""How many tokens of prompts a step reads, by what they cost, and how prompts share them. The same on every runner.

Beside decoding streams, as many as keep the step within a factor of what it would take without them, but no piece so
small that it wastes time. Streams that began while prompts waited, as in a burst, let these be read at full speed: a
stream is undisturbed by those who came after it, not before. Where nobody decodes, as many as the budget allows. Knows
neither sequences nor blocks. See decision 20.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config import EngineConfig
from slipstream.engine.contract import RunnerInfo
from slipstream.speculate.cost_model import CostModel, Decoding

DEFAULT_PIECE = 64  # tokens of a prompt beside decoding streams where costs do not decide
SMALL = (1, 2, 4, 8, 16, 32, DEFAULT_PIECE)  # candidates for the smallest piece
WASTE = 1.5  # times the least seconds a token: a piece that takes more is too small, whatever the factor
FULL_SPEED = 1.05  # the same for a piece of a burst, whole steps counted


class PromptPieces:
    def __init__(self, info: RunnerInfo, config: EngineConfig, costs: CostModel) -> None:
        self._info, self._config, self._costs = info, config, costs

    def size(self, rows: Decoding, budget: int, num_before: int = 0, num_earlier: int = 0) -> int:
        """``rows``: all that decode in the step; ``budget``: tokens it may feed beside them; ``num_before``: tokens
        before the piece in its prompt; ``num_earlier``: prompts that came before any of the rows had a token."""
        if not rows.num_rows:
            return budget
        beside = min(budget, self._config.max_step_tokens - rows.num_tokens)  # of streams that are not to be disturbed
        seconds = self._costs.undisturbed(rows)
        if seconds is None or not self._costs.knows_reading:
            return max(0, min(beside, DEFAULT_PIECE * max(1, num_earlier)))
        seconds /= self._costs.drift(rows.num_tokens)
        piece = _Piece(self._costs, 0 if self._info.prompts_apart else rows.num_tokens, num_before)
        allowed = (self._config.max_slowdown - 1.0) * seconds
        largest = min(beside, self._whole(rows.num_tokens, max(piece.smallest(), piece.within(allowed, beside))))
        if num_earlier:
            each = min(beside, DEFAULT_PIECE * num_earlier)
            burst = max(each, piece.fastest(seconds, budget + rows.num_tokens))
            largest = max(largest, self._whole(rows.num_tokens, min(budget, burst)))
        return max(0, min(budget, largest))

    def _whole(self, num_decoding: int, piece: int) -> int:
        """A runner that pads its steps computes the padding too: so the step ends where it begins."""
        whole = [n - num_decoding for n in self._info.step_sizes if n > num_decoding]
        return max((n for n in whole if n <= piece), default=whole[0] if whole else piece)


class _Piece:
    """The seconds that reading adds to a step, as calibrated, by the tokens that are read."""

    def __init__(self, costs: CostModel, num_decoding: int, num_before: int) -> None:
        """``num_decoding``: tokens that share a forward with the piece."""
        self._costs, self._num_decoding, self._num_before = costs, num_decoding, num_before

    def seconds(self, num_tokens: int) -> float:
        together = self._costs.reading(self._num_decoding + num_tokens)
        attending = self._costs.attending_before(num_tokens, self._num_before)
        return together - self._costs.reading(self._num_decoding) + attending

    def within(self, seconds: float, budget: int) -> int:
        """The largest that adds no more."""
        low, high = 0, budget
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def smallest(self) -> int:
        """That is read nearly as fast as the best: fewer tokens would take more time than they need, in every step."""
        each = {n: self.seconds(n) / n for n in SMALL}
        return min(n for n, seconds in each.items() if seconds <= WASTE * min(each.values()))

    def fastest(self, decoding: float, largest: int) -> int:
        """Of the sizes that were timed, the smallest that is read nearly as fast as the best: more would be longer
        pauses for nothing. Each step takes ``decoding`` seconds besides, which are lost: all streams of a burst decode
        together later."""
        sizes = [n for n in self._costs.read_sizes if n <= largest] or [DEFAULT_PIECE]
        each = {n: (decoding + self._costs.reading(n)) / n for n in sizes}
        return min(n for n, seconds in each.items() if seconds <= FULL_SPEED * min(each.values()))


def share(piece: int, lefts: Sequence[int]) -> list[int]:
    """What prompts get, the oldest first. It is sure of half, so that it never starves; else those with the least left
    come first, so that they need not wait for long ones."""
    shares = [0] * len(lefts)
    reserved = min(lefts[0], (piece + 1) // 2) if lefts else 0
    free = piece - reserved
    for index in sorted(range(len(lefts)), key=lefts.__getitem__):
        free += 0 if index else reserved
        shares[index] = min(lefts[index], free)
        free -= shares[index]
    return shares
