"""When the head is fed: as soon as its row drafts, and not before.

A row that reads or decodes without drafts leaves its tokens and the trunk's hidden states here, up to a limit. Fed
together later they give the head the keys and values that it would have had: there are no holes, only a delay. Nothing
changes before ``settle``, so a step that dies leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.batch import RaggedBatch, make_batch
from slipstream.runners.torch.drafter import Drafter

MOST = 256  # tokens of a row that may wait: they take memory, and time when they are fed at last


@dataclass(frozen=True, slots=True)
class Share:
    """A row's part of a step, as the head is to know it."""

    span: RowSpan
    num_kept: int  # of its fed tokens: not the rejected drafts
    at_once: bool  # it drafts behind this step
    at_all: bool = True  # False: it never drafts

    @property
    def kept(self) -> range:
        """In the flat batch."""
        return range(self.span.offset, self.span.offset + self.num_kept)


@dataclass(frozen=True, slots=True)
class _Unfed:
    """A row's tokens that the head does not know yet, oldest first."""

    hidden: tuple[Tensor, ...] = ()  # [tokens, hidden] each
    next_tokens: tuple[int, ...] = ()

    def then(self, hidden: Tensor, next_tokens: Sequence[int]) -> _Unfed:
        return _Unfed((*self.hidden, hidden), (*self.next_tokens, *next_tokens))


class Feeding:
    def __init__(self, block_table: Tensor) -> None:
        self._block_table = block_table
        self._waiting: dict[int, _Unfed] = {}  # by slot
        self._after: dict[int, _Unfed] = {}  # this step

    def fork(self, source: int, slot: int) -> None:
        """The keys and values that both will write are the same."""
        if source in self._waiting:
            self._waiting[slot] = self._waiting[source]

    def forget(self, slot: int) -> None:
        self._waiting.pop(slot, None)

    def settle(self) -> None:
        self._waiting = self._after

    def feed(
        self, drafter: Drafter, hidden: Tensor, next_tokens: Tensor, batch: RaggedBatch, shares: Sequence[Share]
    ) -> tuple[Tensor, list[int]]:
        """What the head makes of all that it is fed now; and, of each row, where its last kept token lies in it.

        hidden: [tokens, hidden]; next_tokens: the token behind each. Of a row that is not fed the place means nothing.
        """
        if not self._waiting and all(share.at_once and share.at_all for share in shares):
            self._after = {}
            return drafter.feed(hidden, next_tokens, batch), [share.kept.stop - 1 for share in shares]
        self._after = self._with(hidden, next_tokens.tolist(), shares)
        spans: list[RowSpan] = []
        parts: list[_Unfed] = []
        places = []
        end = 0
        for share in shares:
            slot = share.span.slot
            count = len(self._after[slot].next_tokens) if share.at_all else 0
            if share.at_all and (share.at_once or count > MOST):
                parts.append(self._after.pop(slot))
                spans.append(RowSpan(slot, share.span.start + share.num_kept - count, end, count))
                end += count
            places.append(max(0, end - 1))
        if not parts:
            return hidden, places
        tokens = [token for part in parts for token in part.next_tokens]
        again = make_batch(tuple(spans), tokens, self._block_table)
        joined = torch.cat([piece for part in parts for piece in part.hidden])
        return drafter.feed(joined, again.tokens, again), places

    def _with(self, hidden: Tensor, next_tokens: list[int], shares: Sequence[Share]) -> dict[int, _Unfed]:
        """What waits, by slot, this step's tokens included."""
        shares = [share for share in shares if share.at_all]
        # A copy: the next step may use the array again.
        kept = hidden[torch.tensor([place for share in shares for place in share.kept], dtype=torch.int64)]
        waiting = dict(self._waiting)
        for share, own in zip(shares, kept.split([share.num_kept for share in shares]), strict=True):
            before = waiting.get(share.span.slot, _Unfed())
            waiting[share.span.slot] = before.then(own, next_tokens[share.kept.start : share.kept.stop])
        return waiting
