"""What steps cost on this machine, for depths and for prompts: measured at the start, learned from steps that decode.

The cost of reading prompts is measured at the start only, and from then on follows the cost of decoding: what slows the
machine slows both. Steps that read prompts teach nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.engine.contract import StepCosts
from slipstream.speculate.context_cost import ContextCost
from slipstream.speculate.cost_curve import CostCurve
from slipstream.speculate.tuning import TUNING, Tuning


class Decoding(NamedTuple):
    """The decoding rows of a step."""

    num_tokens: int  # drafts included
    num_rows: int
    context: float = 0.0  # KV tokens, all rows together
    draft_kv: float = 0.0  # the same for each draft that a row feeds
    pass_rows: Sequence[int] = ()  # rows in draft pass 1, 2, ...
    draft_context: float = 0.0  # KV tokens of a row that drafts, in the mean


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The seconds of a step that reads no prompt."""

    decoding: Decoding
    verify_seconds: float
    draft_seconds: float
    other_seconds: float = 0.0  # between the results of this step and the one before, outside of the runner

    @property
    def busy_other_seconds(self) -> float:
        """An engine that was idle for a while says nothing: no step has that much time outside of the runner."""
        return min(self.other_seconds, self.verify_seconds)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.verify_seconds + self.draft_seconds + self.busy_other_seconds


class CostModel:
    def __init__(self, costs: StepCosts | None = None, tuning: Tuning = TUNING) -> None:
        """``costs``: as calibrated; None: all is learned, and what reading costs is not known."""
        costs = costs or StepCosts()
        self.verify = ContextCost(costs.verify, costs.context, tuning.costs)  # by tokens
        self.draft = ContextCost(costs.draft, 0.0, tuning.costs)  # one pass, by rows
        self._at_start = CostCurve(costs.verify, tuning.costs)
        self._read = CostCurve(costs.read, tuning.costs)  # as calibrated
        self._read_context, self.read_sizes = costs.read_context, tuple(n for n, _ in costs.read)
        self._per_row, self._share = costs.per_row, costs.context_share
        self._other = 0.0  # seconds a step takes outside of the runner, whatever its size
        self._tuning = tuning.costs

    def fixed(self, num_rows: int, context: float) -> float:
        """Seconds of a step without prompts that no depth changes."""
        return self._other + self._per_row * num_rows + self.verify.of_context(context)

    def attending(self, context: float) -> float:
        """Seconds of verifying one draft more after so many KV tokens, for attention."""
        return self._share * self.verify.of_context(context)

    def drafting(self, pass_rows: Sequence[int], context: float) -> float:
        """Seconds of draft passes. ``context``: KV tokens of a row, in the mean."""
        return sum(self.draft.at(num_rows, num_rows * context) for num_rows in pass_rows)

    def undisturbed(self, rows: Decoding) -> float | None:
        """Seconds of the step that decodes these rows and reads no prompt; None: not known."""
        if not self.verify.known or not (self.draft.known or not rows.pass_rows):
            return None
        drafting = self.attending(rows.draft_kv) + self.drafting(rows.pass_rows, rows.draft_context)
        return self.fixed(rows.num_rows, rows.context) + self.verify.curve.at(rows.num_tokens) + drafting

    @property
    def knows_reading(self) -> bool:
        return len(self.read_sizes) > 1 and self._at_start.known  # one size says nothing about others

    def drift(self, num_tokens: int) -> float:
        """How many times as long steps that decode so many tokens take by now."""
        return self.verify.curve.at(num_tokens) / self._at_start.at(num_tokens)

    def reading(self, num_tokens: int) -> float:
        """Seconds of a step that reads so many and nothing else, at the start."""
        if not num_tokens:
            return 0.0
        last, seconds = self.read_sizes[-1], self._read.at(num_tokens)
        if num_tokens > last:  # at best as many tokens a second
            seconds = max(seconds, self._read.at(last) * num_tokens / last)
        return seconds

    def attending_before(self, num_tokens: int, num_before: int) -> float:
        """Seconds of reading for attention to those before in the prompt, at the start."""
        of_piece, of_token = self._read_context
        return num_before * (of_piece + of_token * num_tokens)

    def plain_seconds(self, timing: StepTiming) -> float | None:
        """What a step would have taken without its drafts; None: not known. By the expected costs of both: what slows
        the whole machine for a moment slows both."""
        rows = timing.decoding
        expected = self.undisturbed(rows)
        plain = self.undisturbed(Decoding(rows.num_rows, rows.num_rows, rows.context))
        return None if expected is None or plain is None else timing.seconds * plain / expected

    def observe(self, timing: StepTiming) -> None:
        rows = timing.decoding
        own = min(self._per_row * rows.num_rows, timing.verify_seconds * self._tuning.max_row_share)
        context = rows.context + self._share * rows.draft_kv
        before = self.verify.curve.scale
        self.verify.observe(rows.num_tokens, context, timing.verify_seconds - own)
        if not rows.pass_rows:  # draft passes are not seen, and what slows the machine slows them, too (log 268)
            self.draft.curve.follow(self.verify.curve.scale / before)
        self._other += self._tuning.other_rate * (timing.busy_other_seconds - self._other)
        if not rows.pass_rows or timing.draft_seconds <= 0.0:
            return
        if not self.draft.known:
            self.draft.observe(rows.pass_rows[0], 0.0, timing.draft_seconds / len(rows.pass_rows))
        error = timing.draft_seconds / self.drafting(rows.pass_rows, rows.draft_context)
        for num_rows in rows.pass_rows:
            kv = num_rows * rows.draft_context
            self.draft.observe(num_rows, kv, error * self.draft.at(num_rows, kv))
