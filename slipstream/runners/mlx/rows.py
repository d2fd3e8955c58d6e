"""The host's view of each slot: a stream's tokens, drafts and cursor, and where it lies in the caches' buffers.

A row's tokens change in two places only: join, and commit at the end of a step. Knows no array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.engine.plan import RowJoin
from slipstream.runners.mlx.processors import Processor, inverse_temperature, processors_for


@dataclass(frozen=True, slots=True)
class Span:
    """What one row feeds in a step, and what of it is certain."""

    slot: int
    start: int  # position of its first fed token: its cursor
    num_certain: int  # known tokens fed
    num_drafts: int = 0  # drafts fed behind them
    num_replay: int = 0  # drafts accepted last step, whose recurrent inputs lie on the tape

    @property
    def num_fed(self) -> int:
        return self.num_certain + self.num_drafts


@dataclass(frozen=True, slots=True)
class RowDraw:
    """How a row draws its tokens."""

    greedy: bool
    inv_temperature: float
    seed: int
    p_min: float
    num_prompt: int
    may_draft: bool
    processors: tuple[Processor, ...]


@dataclass(slots=True)
class Row:
    slot: int
    tokens: list[int]
    draw: RowDraw
    cursor: int = 0  # tokens whose caches are committed
    drafts: list[int] = field(default_factory=list)
    num_replay: int = 0  # drafts accepted last step: certain by now, but not yet in the recurrent state

    def span(self, feed: int) -> Span:
        """What a step that may feed ``feed`` tokens feeds of this row."""
        num_known = len(self.tokens) - self.cursor
        num_fed = min(feed, num_known + len(self.drafts))
        certain = min(num_fed, num_known)
        assert num_fed > 0, f"slot {self.slot} was planned with nothing to feed"
        return Span(self.slot, self.cursor, certain, num_fed - certain, self.num_replay)

    def fed_tokens(self, span: Span) -> list[int]:
        return self.tokens[span.start : span.start + span.num_certain] + self.drafts[: span.num_drafts]

    def draws(self, span: Span) -> bool:
        return span.start + span.num_certain == len(self.tokens)

    def commit(self, span: Span, accepted: int, drawn: int | None, drafts: list[int]) -> tuple[int, ...]:
        """Make ``accepted`` drafts and the row's own draw real; returns the new tokens."""
        assert 0 <= accepted <= span.num_drafts
        new = [] if drawn is None else [*self.drafts[:accepted], drawn]
        self.cursor = span.start + span.num_certain + accepted
        self.num_replay = accepted
        self.tokens.extend(new)
        self.drafts = drafts
        return tuple(new)


class RowTable:
    """Rows by slot. Their places in the buffers are always 0, 1, 2, ...: who leaves is replaced by the last one."""

    def __init__(self, num_slots: int, move: Callable[[int, int], None]) -> None:
        """``move(source, target)``: called when a row changes its place."""
        self.num_slots = num_slots
        self._move = move
        self._rows: dict[int, Row] = {}
        self._places: list[int] = []  # place -> slot

    def __getitem__(self, slot: int) -> Row:
        return self._rows[slot]

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, slot: int) -> int:
        return self._places.index(slot)

    def join(self, join: RowJoin) -> None:
        assert 0 <= join.slot < self.num_slots
        assert join.slot not in self._rows, f"slot {join.slot} is taken"
        draw = RowDraw(
            greedy=join.params.greedy,
            inv_temperature=inverse_temperature(join.params),
            seed=join.seed,
            p_min=join.p_min,
            num_prompt=join.num_prompt,
            may_draft=join.may_draft,
            processors=processors_for(join.params),
        )
        self._rows[join.slot] = Row(join.slot, list(join.tokens), draw)
        self._places.append(join.slot)

    def leave(self, slot: int) -> None:
        del self._rows[slot]
        place, last = self.place(slot), len(self._places) - 1
        if place != last:
            self._move(last, place)
            self._places[place] = self._places[last]
        self._places.pop()
