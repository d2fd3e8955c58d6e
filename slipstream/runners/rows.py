"""The host's view of a stream in its slot, whatever computes it: its tokens, drafts and cursor, and what a step feeds.

A row keeps its slot until it leaves. Its state changes in two places only: join, and commit at the end of a step.
Knows no array library; a runner says what its processors are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from slipstream.engine.plan import RowJoin, RowResult

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


@dataclass(frozen=True)  # with slots, making a RowDraw[...] would fail on Python 3.11
class RowDraw(Generic[P]):
    """How a row draws its tokens."""

    greedy: bool
    inv_temperature: float
    seed: int  # as the runner's noise takes it
    p_min: float
    num_prompt: int
    may_draft: bool
    processors: tuple[P, ...]


@dataclass(slots=True)
class Row(Generic[P]):
    slot: int
    tokens: list[int]
    draw: RowDraw[P]
    cursor: int = 0  # tokens whose caches are committed
    drafts: list[int] = field(default_factory=list)
    num_replay: int = 0  # drafts accepted last step: certain by now, but not yet in the recurrent state

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

    def commit(self, span: RowSpan, accepted: int, drawn: int | None, drafts: list[int]) -> tuple[int, ...]:
        """Make ``accepted`` drafts and the row's own draw real; returns the new tokens."""
        assert 0 <= accepted <= span.num_drafts
        new = [] if drawn is None else [*self.drafts[:accepted], drawn]
        self.cursor = span.start + span.num_certain + accepted
        self.num_replay = accepted
        self.tokens.extend(new)
        self.drafts = drafts
        return tuple(new)


def joined(join: RowJoin, seed: int, processors: tuple[P, ...]) -> Row[P]:
    """The row of a stream that enters its slot, with an empty cache."""
    params = join.params
    draw = RowDraw(
        params.greedy, params.inverse_temperature, seed, join.p_min, join.num_prompt, join.may_draft, processors
    )
    return Row(join.slot, list(join.tokens), draw)


def commit(rows: Sequence[Row[P]], spans: Sequence[RowSpan], told: Mapping[int, Told]) -> tuple[RowResult, ...]:
    """End a step. ``told``: of the rows that drew, by their index; the others only read."""
    results = []
    for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
        accepted, drawn, drafts, confidences = told.get(i, (0, None, [], ()))
        tokens = row.commit(span, accepted, drawn, drafts)
        results.append(RowResult(row.slot, span.num_fed, tokens, tuple(drafts), confidences))
    return tuple(results)
