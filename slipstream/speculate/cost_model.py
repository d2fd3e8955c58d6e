"""What steps cost on this machine: measured at the start, learned from every step. For depths and for prompts.

A step verifies the tokens of decoding rows, makes drafts, and may read prompts beside it. Steps that read prompts teach
nothing about verification: their tokens are cheaper, since few of them are sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.engine.contract import StepCosts
from slipstream.speculate.context_cost import ContextCost
from slipstream.speculate.tuning import TUNING, Tuning

READ_TILE = 64  # tokens of a prompt that share one reading of the tokens before them


class Decoding(NamedTuple):
    """The decoding rows of a step."""

    num_tokens: int  # drafts included
    num_rows: int
    context: float = 0.0  # KV tokens, all rows together
    draft_kv: float = 0.0  # the same for each draft that a row feeds
    pass_rows: Sequence[int] = ()  # rows in draft pass 1, 2, ...
    draft_context: float = 0.0  # KV tokens of a row that drafts, in the mean


class Reading(NamedTuple):
    """The prompt tokens of a step."""

    num_tokens: int
    context: float = 0.0  # KV tokens: those before a tile, once for each

    @staticmethod
    def of(num_tokens: int, num_before: int) -> Reading:
        """A piece of one prompt after so many tokens of it."""
        return Reading(num_tokens, num_tokens / READ_TILE * (num_before + num_tokens / 2))


NO_READING = Reading(0)


@dataclass(frozen=True, slots=True)
class StepTiming:
    decoding: Decoding
    verify_seconds: float
    draft_seconds: float
    other_seconds: float = 0.0  # between the results of this step and the one before, outside of the runner
    reading: Reading = NO_READING

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
        """``costs``: as calibrated; None: all is learned."""
        costs = costs or StepCosts()
        self.verify = ContextCost(costs.verify, costs.context, tuning.costs)  # by tokens
        self.draft = ContextCost(costs.draft, 0.0, tuning.costs)  # one pass, by rows
        self.read = ContextCost(costs.read, costs.read_context, tuning.reading)  # a step with prompts only, by tokens
        self._read_calibrated = bool(costs.read)
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
    def reads_timed(self) -> bool:
        """One size says nothing about others."""
        return len(self.read.curve.sizes) > 1

    @property
    def read_sizes(self) -> Sequence[int]:
        """Those at which the curve bends."""
        return self.read.curve.sizes

    def reading(self, num_tokens: int) -> float:
        """Seconds of a step that reads so many. Beyond all that were timed, at best as many tokens a second."""
        last = self.read.curve.sizes[-1]
        seconds = self.read.curve.at(num_tokens)
        return seconds if num_tokens <= last else max(seconds, self.read.curve.at(last) * num_tokens / last)

    def added(self, num_decoding: int, reading: Reading) -> float:
        """Seconds that reading adds to a step which decodes so many tokens."""
        total = self.reading(num_decoding + reading.num_tokens)
        return total - self.reading(num_decoding) + self.read.of_context(reading.context)

    def plain_seconds(self, timing: StepTiming) -> float | None:
        """What a step would have taken without its drafts; None: not known. By the expected costs of both: what slows
        the whole machine for a moment slows both."""
        rows = timing.decoding
        expected = self.undisturbed(rows)
        plain = self.undisturbed(Decoding(rows.num_rows, rows.num_rows, rows.context))
        return None if expected is None or plain is None else timing.seconds * plain / expected

    def observe(self, timing: StepTiming) -> None:
        if timing.reading.num_tokens:
            self._observe_reading(timing)
        else:
            self._observe_decoding(timing)

    def _observe_decoding(self, timing: StepTiming) -> None:
        rows = timing.decoding
        own = min(self._per_row * rows.num_rows, timing.verify_seconds * self._tuning.max_row_share)
        context = rows.context + self._share * rows.draft_kv
        drift = self.verify.observe(rows.num_tokens, context, timing.verify_seconds - own)
        if self._read_calibrated:
            self.read.curve.rescale(drift)  # what slows the machine slows reading
        else:  # few tokens of a prompt take about as long
            self.read.observe(rows.num_tokens, 0.0, timing.verify_seconds - self.verify.of_context(context))
        self._other += self._tuning.other_rate * (timing.busy_other_seconds - self._other)
        if not rows.pass_rows or timing.draft_seconds <= 0.0:
            return
        if not self.draft.known:
            self.draft.observe(rows.pass_rows[0], 0.0, timing.draft_seconds / len(rows.pass_rows))
        error = timing.draft_seconds / self.drafting(rows.pass_rows, rows.draft_context)
        for num_rows in rows.pass_rows:
            kv = num_rows * rows.draft_context
            self.draft.observe(num_rows, kv, error * self.draft.at(num_rows, kv))

    def _observe_reading(self, timing: StepTiming) -> None:
        """Beside decoding rows the prompt has its share of an error only: if it were all the prompt's, a machine that
        slows down would seem to read ever more slowly, and pieces would shrink to nothing."""
        rows, reading = timing.decoding, timing.reading
        seconds = timing.verify_seconds + timing.draft_seconds
        if not rows.num_rows:
            self.read.observe(reading.num_tokens, reading.context, seconds)
            return
        undisturbed = self.undisturbed(rows)
        if undisturbed is None or not self.read.known:
            return
        before, added = self.reading(rows.num_tokens), self.added(rows.num_tokens, reading)
        expected = undisturbed - self._other + added
        error = (seconds - expected) / expected * added / expected
        self.read.observe(rows.num_tokens + reading.num_tokens, reading.context, before + added * (1.0 + error))
