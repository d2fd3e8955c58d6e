"""Who proposes the next step's drafts. Two calls a step: ``feed`` what was computed, ``propose`` behind it.

The MTP head is fed every committed token with the trunk's hidden state of the position before, also when nobody
drafts: its KV has no holes. Rows cut short by ``p_min`` are cut on the device. What is accepted is not a
drafter's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.runners.torch.batch import RaggedBatch, RowSpan
from slipstream.runners.torch.draw import choose
from slipstream.runners.torch.models.mtp import MtpHead
from slipstream.runners.torch.ops import Linear, Ops
from slipstream.runners.torch.rows import Row


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the rows that draw stand after this step's verdict."""

    rows: Sequence[Row]
    spans: Sequence[RowSpan]
    propose: Sequence[int]  # drafts asked for, per row
    last: Tensor  # int64 [rows]: flat index of each row's last committed token
    cursors: Tensor  # int64 [rows]: the new cursors


@dataclass(frozen=True, slots=True)
class Proposal:
    drafts: Tensor  # int64 [rows, depth]
    lengths: Tensor  # int64 [rows]: how many of them count


class Drafter(Protocol):
    max_depth: int

    def feed(self, hidden: Tensor, next_tokens: Tensor, batch: RaggedBatch) -> Tensor:
        """Learn a step's tokens: hidden [tokens, hidden] and the token behind each. Rejected ones are overwritten."""
        ...

    def propose(self, fed: Tensor, ends: Ends) -> Proposal: ...


def no_proposal(num_rows: int, device: torch.device) -> Proposal:
    nothing = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
    return Proposal(nothing, nothing.sum(1))


class NoDrafter:
    max_depth = 0

    def feed(self, hidden: Tensor, next_tokens: Tensor, batch: RaggedBatch) -> Tensor:
        return hidden

    def propose(self, fed: Tensor, ends: Ends) -> Proposal:
        return no_proposal(len(ends.rows), fed.device)


class MtpDrafter:
    def __init__(
        self, head: MtpHead, embedding: Linear, output: Linear, ops: Ops, block_table: Tensor, max_depth: int
    ) -> None:
        self.max_depth = max_depth
        self._head = head
        self._embedding = embedding
        self.output = output  # may hold only the first, most frequent, part of the vocabulary
        self._ops = ops
        self._block_table = block_table

    def feed(self, hidden: Tensor, next_tokens: Tensor, batch: RaggedBatch) -> Tensor:
        return self._head.forward(self._embedding.rows(next_tokens), hidden, batch)

    def propose(self, fed: Tensor, ends: Ends) -> Proposal:
        depth = max(ends.propose, default=0)
        if depth == 0:
            return no_proposal(len(ends.rows), fed.device)
        drafts = torch.zeros(len(ends.rows), depth, dtype=torch.int64, device=fed.device)
        sure = torch.zeros(len(ends.rows), depth, dtype=torch.int64, device=fed.device)
        hidden = fed[ends.last]
        active = list(range(len(ends.rows)))
        for i in range(depth):
            keep = [j for j, row in enumerate(active) if ends.propose[row] > i]
            active = [active[j] for j in keep]
            if len(keep) < hidden.shape[0]:
                hidden = hidden[torch.tensor(keep).to(fed.device, non_blocking=True)]
            index = torch.tensor(active).to(fed.device, non_blocking=True)
            if i > 0:
                hidden = self._again(drafts[index, i - 1], hidden, ends, active, ends.cursors[index] + i - 1, i)
            token, confident = self._pick(hidden, ends, active, ends.cursors[index] + i + 1)
            drafts[index, i] = token
            sure[index, i] = confident
        return Proposal(drafts, sure.cumprod(1).sum(1))

    def _again(
        self, tokens: Tensor, hidden: Tensor, ends: Ends, active: Sequence[int], positions: Tensor, ahead: int
    ) -> Tensor:
        """One pass of the head over its own output. [rows, hidden]"""
        spans = tuple(
            RowSpan(ends.spans[row].slot, ends.spans[row].start + ends.spans[row].num_fed + ahead - 1, i, 1)
            for i, row in enumerate(active)
        )
        slots = torch.tensor([span.slot for span in spans], dtype=torch.int32).to(hidden.device, non_blocking=True)
        batch = RaggedBatch(spans, tokens, positions.int(), slots, self._block_table)
        return self._head.forward(self._embedding.rows(tokens), hidden, batch)

    def _pick(self, hidden: Tensor, ends: Ends, active: Sequence[int], index: Tensor) -> tuple[Tensor, Tensor]:
        """A token per row, drawn with the noise the target will use at that index, and whether to go on."""
        logits = self.output(hidden)
        draws = [ends.rows[row].draw for row in active]
        token = choose(self._ops, logits, draws, index)
        if not any(draw.p_min for draw in draws):
            return token, torch.ones_like(token)
        p_min = torch.tensor([draw.p_min for draw in draws]).to(logits.device, non_blocking=True)
        return token, (self._ops.confidence(logits) >= p_min).long()
