"""When the MTP head is fed: as soon as its row drafts or keeps something for others, and not before.

A row that reads or decodes without drafts leaves its tokens and the target's hidden states here, up to a limit. Fed
together later they give the head the keys and values that it would have had: there are no holes, only a delay. Nothing
lasting changes before ``settle``, so a step that fails leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from slipstream.runners.host.model import A, B, CommittedStep, HostHead, HostModel
from slipstream.runners.host.rows import CommittedRow
from slipstream.runners.rows import RowSpan

MAX_DEFERRED = 256  # tokens of a row that may wait: they take memory, and time when they are fed at last


@dataclass(frozen=True)  # with slots, a generic dataclass fails on Python 3.11
class _Unfed(Generic[A]):
    """A row's tokens that the head has not seen yet, oldest first."""

    hidden: tuple[A, ...]  # [tokens, hidden] each
    next_tokens: tuple[int, ...]


class DeferredFeed(Generic[A, B]):
    def __init__(self, model: HostModel[A, B], head: HostHead[A, B]) -> None:
        self._model = model
        self._head = head
        self._waiting: dict[int, _Unfed[A]] = {}  # by slot
        self._after: dict[int, _Unfed[A]] = {}  # the same after this step
        self._fed: list[A] = []  # the head's output for this step's feed, if there was one
        self._last: dict[int, int] = {}  # by slot: where its last kept token lies in that

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
        rows, self._fed = step.rows, []
        if not self._waiting and all(row.drafts_now and row.may_draft for row in rows):
            self._after = {}
            tokens = [token for row in rows for token in row.next_tokens]
            self._last = {row.span.slot: row.span.offset + row.num_kept - 1 for row in rows}
            self._fed = [self._head.forward(step.hidden, tokens, step.batch)]
            return
        self._after = self._with(step.hidden, [row for row in rows if row.may_draft])
        self._feed_due([row for row in rows if row.may_draft])

    def _feed_due(self, rows: Sequence[CommittedRow]) -> None:
        """Rows that draft now, those that keep something, and those of which too much waits."""
        spans: list[RowSpan] = []
        parts: list[_Unfed[A]] = []
        end = 0
        for row in rows:
            slot = row.span.slot
            count = len(self._after[slot].next_tokens)
            if row.drafts_now or row.span.keeps or count > MAX_DEFERRED:
                parts.append(self._after.pop(slot))
                spans.append(RowSpan(slot, row.span.start + row.num_kept - count, end, count))
                end += count
        if parts:
            tokens = [token for part in parts for token in part.next_tokens]
            hidden = self._model.concatenate([piece for part in parts for piece in part.hidden])
            self._last = {span.slot: span.offset + span.num_fed - 1 for span in spans}
            self._fed = [self._head.forward(hidden, tokens, self._model.lay_out(spans))]

    def _with(self, hidden: A, rows: Sequence[CommittedRow]) -> dict[int, _Unfed[A]]:
        """What waits, by slot, with this step's kept tokens."""
        waiting = dict(self._waiting)
        for row in rows:
            first = row.span.offset
            # A copy: the next step may use the array again.
            kept = self._model.take(hidden, range(first, first + row.num_kept))
            before = waiting.get(row.span.slot, _Unfed((), ()))
            tokens = (*before.next_tokens, *row.next_tokens[: row.num_kept])
            waiting[row.span.slot] = _Unfed((*before.hidden, kept), tokens)
        return waiting
