"""The host's view of a stream in its slot, whatever computes it: its tokens, drafts and cursor, and what a step feeds.

A row keeps its slot until it leaves. Its state changes in two places only: join, and commit at the end of a step.
Knows no array library; a runner says what its processors are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from slipstream.engine.contract import RowJoin, RowResult
from slipstream.errors import ConstraintFault
from slipstream.sampling.constraints import Matcher, matcher_for

P = TypeVar("P")  # a runner's logits processors

# What a step tells of a row that drew: drafts accepted, its own draw, new drafts, the head's confidences in them.
Told = tuple[int, int, list[int], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """What one row feeds in a step, where it lies, and what of it is certain."""

    slot: int
    start: int  # position of its first fed token (its cursor); a draft pass has an upper bound here
    offset: int  # of that token in a flat batch; 0 where rows are laid out otherwise
    num_certain: int  # known tokens fed
    num_drafts: int = 0  # drafts fed behind them
    num_replay: int = 0  # drafts accepted last step, whose recurrent inputs lie on the tape

    @property
    def num_fed(self) -> int:
        return self.num_certain + self.num_drafts


@dataclass(frozen=True, slots=True)
class Asked:
    """How many likeliest tokens a row wants told beside each token's own log-probability; None: nothing at all."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def most(self) -> int | None:
        return max((top for top in (self.logprobs, self.prompt_logprobs) if top is not None), default=None)


def asked_by(join: RowJoin) -> Asked:
    """A stream that joins with output has been told of its prompt before."""
    fresh = join.num_prompt == len(join.tokens)
    return Asked(join.params.logprobs, join.params.prompt_logprobs if fresh else None)


@dataclass(frozen=True)  # with slots, making a RowDraw[...] would fail on Python 3.11
class RowDraw(Generic[P]):
    """How a row draws its tokens."""

    greedy: bool
    inv_temperature: float
    seed: int  # as the runner's noise takes it
    p_min: float
    num_prompt: int
    may_draft: bool
    processors: tuple[P, ...]  # before the masks
    cuts: tuple[P, ...] = ()  # behind them


@dataclass(slots=True)
class Row(Generic[P]):
    slot: int
    tokens: list[int]
    draw: RowDraw[P]
    cursor: int = 0  # tokens whose caches are committed
    drafts: list[int] = field(default_factory=list)
    num_replay: int = 0  # drafts accepted last step: certain by now, but not yet in the recurrent state
    matcher: Matcher | None = None  # what takes tokens out of its choice
    fault: str = ""  # why it cannot go on; it is computed on until it leaves, and tells nothing any more
    asked: Asked = Asked()

    def span(self, feed: int, offset: int = 0) -> RowSpan:
        """What a step that may feed ``feed`` tokens feeds of this row."""
        num_known = len(self.tokens) - self.cursor
        num_fed = min(feed, num_known + len(self.drafts))
        assert num_fed > 0, f"slot {self.slot} was planned with nothing to feed"
        certain = min(num_fed, num_known)
        return RowSpan(self.slot, self.cursor, offset, certain, num_fed - certain, self.num_replay)

    def fed_tokens(self, span: RowSpan) -> list[int]:
        known = self.tokens[span.start : span.start + span.num_certain]
        return known + self.drafts[: span.num_drafts]

    def draws(self, span: RowSpan) -> bool:
        return span.start + span.num_certain == len(self.tokens)

    def masks(self, num_drafts: int) -> list[bytes | None]:
        """At its next position and behind each draft, as far as they can be followed; none where it cannot go on."""
        if self.matcher is None:
            return [None] * (num_drafts + 1)
        try:
            return self.matcher.masks(self.drafts[:num_drafts])
        except ConstraintFault as fault:
            self.fault = str(fault)
            return []

    def num_prompt_told(self, span: RowSpan) -> int:
        """Of how many tokens of the prompt, each behind a fed one, the log-probability is told."""
        if self.asked.prompt_logprobs is None:
            return 0
        return max(0, min(span.start + span.num_fed, self.draw.num_prompt - 1) - span.start)

    def commit(self, span: RowSpan, accepted: int, drawn: int | None, drafts: list[int]) -> tuple[int, ...]:
        """Make ``accepted`` drafts and the row's own draw real; returns the new tokens."""
        assert 0 <= accepted <= span.num_drafts
        new = [] if drawn is None else [*self.drafts[:accepted], drawn]
        self.cursor = span.start + span.num_certain + accepted
        self.num_replay = accepted
        self.tokens.extend(new)
        self.drafts = drafts
        if self.matcher is not None:
            self.matcher.advance(new)
        return tuple(new)


def joined(join: RowJoin, seed: int, vocab_size: int, processors: tuple[P, ...], cuts: tuple[P, ...] = ()) -> Row[P]:
    """The row of a stream that enters its slot."""
    params = join.params
    draw = RowDraw(
        params.greedy, params.inverse_temperature, seed, join.p_min, join.num_prompt, join.may_draft, processors, cuts
    )
    return Row(
        slot=join.slot,
        tokens=list(join.tokens),
        draw=draw,
        cursor=join.start.num_computed,
        matcher=matcher_of(join, vocab_size),
        asked=asked_by(join),
    )


def matcher_of(join: RowJoin, vocab_size: int) -> Matcher | None:
    """It stands behind the output that a preempted stream brings along."""
    matcher = matcher_for(join.params, join.end_tokens, vocab_size)
    if matcher is not None:
        matcher.advance(join.tokens[join.num_prompt :])
    return matcher


def commit(rows: Sequence[Row[P]], spans: Sequence[RowSpan], told: Mapping[int, Told]) -> tuple[RowResult, ...]:
    """End a step. ``told``: of the rows that drew, by their index; the others only read."""
    results = []
    for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
        accepted, drawn, drafts, confidences = told.get(i, (0, None, [], ()))
        tokens = row.commit(span, accepted, drawn, drafts)
        if row.fault:
            results.append(RowResult(row.slot, span.num_fed, (), (), fault=row.fault))
        else:
            results.append(RowResult(row.slot, span.num_fed, tokens, tuple(drafts), confidences))
    return tuple(results)
