"""When the MTP head is fed: as soon as its row drafts or keeps something for others, and not before.

A row that reads or decodes without drafts leaves its tokens and the target's hidden states here, up to a limit. Fed
together later they give the head the keys and values that it would have had: there are no holes, only a delay. A stream
that ends before that never fed the head. Nothing lasting changes before ``settle``, so a step that fails leaves no
trace.

Many tokens of earlier steps are fed apart from the step's own, and timed: no draft pass is to be taken for that dear.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple

from slipstream.runners.host.model import A, B, CommittedStep, HostHead, HostModel
from slipstream.runners.host.rows import CommittedRow
from slipstream.runners.rows import RowSpan

MAX_DEFERRED = 512  # tokens of a row that may wait: they take memory, and time when they are fed at last
KEPT_DEFERRED = 256  # of those that go on waiting when more than that did
FEW = 4  # tokens of earlier steps that are fed with the step's own: as many as a step with drafts commits


class _Unfed(NamedTuple, Generic[A]):
    """A row's tokens that the head has not seen yet: those of one step, and what waited before it."""

    hidden: A  # [tokens, hidden]: of all rows that wait since that step with few tokens, or of one with many
    first: int  # the row's first among them
    next_tokens: tuple[int, ...]
    before: _Unfed[A] | None
    num_tokens: int  # those before included


Piece = tuple[A, range, tuple[int, ...]]  # hidden, tokens, next tokens
Part = tuple[RowSpan, list[Piece[A]]]  # of a row, to be fed


def _pieces(unfed: _Unfed[A] | None) -> list[Piece[A]]:
    """The oldest first."""
    pieces: list[Piece[A]] = []
    while unfed is not None:
        hidden, first, next_tokens, unfed, _ = unfed
        pieces.append((hidden, range(first, first + len(next_tokens)), next_tokens))
    return pieces[::-1]


def _and(before: _Unfed[A] | None, hidden: A, first: int, next_tokens: tuple[int, ...]) -> _Unfed[A]:
    count = len(next_tokens) if before is None else before.num_tokens + len(next_tokens)
    return _Unfed(hidden, first, next_tokens, before, count)


class DeferredFeed(Generic[A, B]):
    def __init__(self, model: HostModel[A, B], head: HostHead[A, B]) -> None:
        self._model = model
        self._head = head
        self._waiting: dict[int, _Unfed[A]] = {}  # by slot
        self._after: dict[int, _Unfed[A]] = {}  # the same after this step
        self._fed: list[A] = []  # the head's output for this step's feed, if there was one
        self._last: dict[int, int] = {}  # by slot: where its last kept token lies in that
        self.late_seconds = 0.0  # of this step, for tokens of earlier ones

    def copy(self, source: int, slot: int) -> None:
        """Both rows will write the same keys and values."""
        if source in self._waiting:
            self._waiting[slot] = self._waiting[source]

    def forget(self, slot: int) -> None:
        self._waiting.pop(slot, None)

    def settle(self) -> None:
        self._waiting = self._after

    def last_outputs(self, slots: Sequence[int]) -> A:
        """The head's output at the last kept token of rows that were fed in this step. [slots, hidden]"""
        [fed] = self._fed
        return self._model.take(fed, [self._last[slot] for slot in slots])

    def feed(self, step: CommittedStep[A, B]) -> None:
        rows, self._fed, self.late_seconds = step.rows, [], 0.0
        if not self._waiting and all(row.drafts_now and row.may_draft for row in rows):
            self._after = {}
            tokens = [token for row in rows for token in row.next_tokens]
            self._last = {row.span.slot: row.span.offset + row.num_kept - 1 for row in rows}
            self._fed = [self._head.forward(step.hidden, tokens, step.batch)]
            return
        rows = [row for row in rows if row.may_draft]
        self._after = self._with(step.hidden, rows)
        self._feed_late(rows)
        self._feed_now([row for row in rows if row.drafts_now])

    def _feed_late(self, rows: Iterable[CommittedRow]) -> None:
        """Tokens of earlier steps of rows that draft now; all of those that keep something; the oldest of those of
        which too many wait."""
        late: list[Part[A]] = []
        offset = 0
        for row in rows:
            unfed = self._after[row.span.slot]
            num_late = _num_late(row, unfed.num_tokens)
            if num_late > 0:
                part = self._take_oldest(row, num_late, offset)
                offset += part[0].num_fed
                late.append(part)
        if late:
            began = time.perf_counter()
            self._model.wait(self._forward(late))
            self.late_seconds = time.perf_counter() - began

    def _take_oldest(self, row: CommittedRow, num_tokens: int, offset: int) -> Part[A]:
        """At least so many of what waits. ``offset``: of the part among all that are fed together"""
        slot = row.span.slot
        unfed = self._after.pop(slot)
        start, count, taken = row.span.start + row.num_kept - unfed.num_tokens, 0, []
        for piece in _pieces(unfed):
            hidden, tokens, next_tokens = piece
            if count < num_tokens:
                taken.append(piece)
                count += len(tokens)
            else:
                self._after[slot] = _and(self._after.get(slot), hidden, tokens.start, next_tokens)
        return RowSpan(slot, start, offset, count), taken

    def _feed_now(self, rows: Sequence[CommittedRow]) -> None:
        """All that waits of these rows."""
        parts: list[Part[A]] = []
        offset = 0
        for row in rows:
            parts.append(self._take_oldest(row, self._after[row.span.slot].num_tokens, offset))
            offset += parts[-1][0].num_fed
        if parts:
            self._last = {span.slot: span.offset + span.num_fed - 1 for span, _ in parts}
            self._fed = [self._forward(parts)]

    def _forward(self, parts: Sequence[Part[A]]) -> A:
        """[tokens, hidden]"""
        pieces = [piece for _, each in parts for piece in each]
        hidden = self._model.concatenate([self._model.take(hidden, tokens) for hidden, tokens, _ in pieces])
        tokens = [token for _, _, next_tokens in pieces for token in next_tokens]
        return self._head.forward(hidden, tokens, self._model.lay_out([span for span, _ in parts]))

    def _with(self, hidden: A, rows: Sequence[CommittedRow]) -> dict[int, _Unfed[A]]:
        """What waits, by slot, with this step's kept tokens. Those that go on waiting are copied, all rows with few at
        once, since the next step may use the array again."""
        waiting = dict(self._waiting)
        few: list[CommittedRow] = []
        for row in rows:
            if row.drafts_now or row.span.keeps:
                self._add(waiting, row, hidden, row.span.offset)
            elif row.num_kept <= FEW:
                few.append(row)
            else:
                first = row.span.offset
                self._add(waiting, row, self._model.take(hidden, range(first, first + row.num_kept)), 0)
        if few:
            index = [row.span.offset + i for row in few for i in range(row.num_kept)]
            copy, first = self._model.take(hidden, index), 0
            for row in few:
                self._add(waiting, row, copy, first)
                first += row.num_kept
        return waiting

    @staticmethod
    def _add(waiting: dict[int, _Unfed[A]], row: CommittedRow, hidden: A, first: int) -> None:
        slot = row.span.slot
        waiting[slot] = _and(waiting.get(slot), hidden, first, tuple(row.next_tokens[: row.num_kept]))


def _num_late(row: CommittedRow, num_waiting: int) -> int:
    """How many of its tokens the row feeds apart. ``num_waiting``: with this step's"""
    num_earlier = num_waiting - row.num_kept
    if row.drafts_now:
        return num_earlier if num_earlier > FEW else 0
    if row.span.keeps:
        return num_waiting
    return num_waiting - KEPT_DEFERRED if num_waiting > MAX_DEFERRED else 0
