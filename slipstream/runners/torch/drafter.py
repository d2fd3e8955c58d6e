"""Who proposes the next step's drafts. Two calls: ``feed`` what was computed, ``propose`` behind it.

The MTP head is fed every committed token with the trunk's hidden state of the position before, at once or before its
row drafts next (feeding.py): its KV has no holes. Rows cut short by ``p_min`` or their floor are cut on the device.
What is accepted is not a drafter's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.engine.contract import NO_DRAFTS, DraftRequest
from slipstream.runners.masks import Guide
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.batch import RaggedBatch
from slipstream.runners.torch.draw import apply_masks, choose
from slipstream.runners.torch.models.mtp import MtpHead
from slipstream.runners.torch.ops import Linear, Ops
from slipstream.runners.torch.rows import Row
from slipstream.runners.torch.simulate import pass_rates
from slipstream.sampling.masks import is_empty


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the rows that draw stand after this step's verdict."""

    rows: Sequence[Row]
    spans: Sequence[RowSpan]
    propose: Sequence[int]  # drafts asked for, per row
    last: Tensor  # int64 [rows]: flat index of each row's last committed token
    cursors: Tensor  # int64 [rows]: the new cursors
    # Per row, the chain's confidence below which a draft is not kept, and below which none follows it. (): no limits
    bounds: Sequence[DraftRequest] = ()
    guides: Sequence[Guide] = ()  # what each row may draft; (): anything


@dataclass(frozen=True, slots=True)
class Proposal:
    drafts: Tensor  # int64 [rows, depth]
    lengths: Tensor  # int64 [rows]: how many of them count
    confidences: Tensor | None = (
        None  # float [rows, depth]: the head's probability of each, where a floor was asked for
    )


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
        self,
        head: MtpHead,
        embedding: Linear,
        output: Linear,
        ops: Ops,
        block_table: Tensor,
        max_depth: int,
        simulate_acceptance: Sequence[float] = (),
    ) -> None:
        self.max_depth = max_depth
        self._pass_rates = pass_rates(simulate_acceptance, max_depth) if simulate_acceptance else []
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
        limits = _Limits(ends, depth, fed.device)
        hidden = fed[ends.last]
        active = list(range(len(ends.rows)))
        for i in range(depth):
            keep = [j for j, row in enumerate(active) if ends.propose[row] > i and row not in limits.ended]
            active = [active[j] for j in keep]
            if not active:
                break
            if len(keep) < hidden.shape[0]:
                hidden = hidden[torch.tensor(keep).to(fed.device, non_blocking=True)]
            index = torch.tensor(active).to(fed.device, non_blocking=True)
            if i > 0:
                hidden = self._again(drafts[index, i - 1], hidden, ends, active, ends.cursors[index] + i - 1, i)
            logits = self.output(hidden)
            if ends.guides:
                _guide(logits, [ends.guides[row] for row in active])
            # Drawn with the noise the target will use at that index.
            drafts[index, i] = choose(
                self._ops, logits, [ends.rows[row].draw for row in active], ends.cursors[index] + i + 1
            )
            if ends.guides:
                for row, draft in zip(active, drafts[index, i].tolist(), strict=True):
                    ends.guides[row].follow(draft)
            if limits.any:
                limits.tell(i, active, index, self._confidence(logits, i))
        return Proposal(drafts, limits.lengths(), limits.confidences)

    def _confidence(self, logits: Tensor, i: int) -> Tensor:
        """In its draft i. Of a simulated head: as sure as it is right, since a random one is sure of nothing. [rows]"""
        own = self._ops.confidence(logits)
        return torch.full_like(own, self._pass_rates[i]) if self._pass_rates else own

    def _again(
        self, tokens: Tensor, hidden: Tensor, ends: Ends, active: Sequence[int], positions: Tensor, ahead: int
    ) -> Tensor:
        """One pass of the head over its own output. [rows, hidden]"""
        spans = tuple(
            RowSpan(ends.spans[row].slot, ends.spans[row].start + ends.spans[row].num_fed + ahead - 1, i, 1)
            for i, row in enumerate(active)
        )
        slots = torch.tensor([span.slot for span in spans], dtype=torch.int32).to(hidden.device, non_blocking=True)
        small = positions.int()
        batch = RaggedBatch(spans, tokens, small, small, slots, self._block_table)
        return self._head.forward(self._embedding.rows(tokens), hidden, batch)


def _guide(logits: Tensor, guides: Sequence[Guide]) -> None:
    """Take out what may not be drafted, but for rows that could then draft nothing: the head may not know the token."""
    masks = {i: mask for i, guide in enumerate(guides) if (mask := guide.mask()) is not None}
    known = {i: mask for i, mask in masks.items() if not is_empty(mask[: logits.shape[1] // 8])}
    if known:
        apply_masks(logits, list(known), list(known.values()))


class _Limits:
    """Where each row's drafts end: at the depth asked for, or before the head's confidence falls too low.

    On the CPU a look at it costs nothing, so rows that have ended leave the later passes; elsewhere the host does not
    know, and they stay.
    """

    def __init__(self, ends: Ends, depth: int, device: torch.device) -> None:
        self._p_min = [row.draw.p_min for row in ends.rows]
        asked = ends.bounds or [NO_DRAFTS] * len(ends.rows)
        self._bounds = [(draft.threshold, draft.continue_threshold) for draft in asked]
        self._asked = torch.tensor([[n > i for i in range(depth)] for n in ends.propose])  # [rows, depth]
        self._asked = self._asked.to(device, non_blocking=True)
        self._chains = [1.0] * len(ends.rows)  # on the CPU only
        self.any = any(self._p_min) or any(draft.measures for draft in asked)
        self.confidences = torch.zeros(self._asked.shape, device=device) if self.any else None  # [rows, depth]
        self.ended: set[int] = set()

    def tell(self, i: int, active: Sequence[int], index: Tensor, confidence: Tensor) -> None:
        assert self.confidences is not None
        self.confidences[index, i] = confidence.float()
        if confidence.device.type != "cpu":
            return
        for row, value in zip(active, confidence.tolist(), strict=True):
            self._chains[row] *= value
            if value < self._p_min[row] or self._chains[row] < max(self._bounds[row]):
                self.ended.add(row)

    def lengths(self) -> Tensor:
        """int64 [rows]"""
        good = self._asked
        if self.confidences is not None:
            limits = torch.tensor([self._p_min, *zip(*self._bounds, strict=True)])  # [3, rows]
            p_min, floor, onward = limits.to(good.device, non_blocking=True)[:, :, None]
            chains = self.confidences.cumprod(1)
            good = good & (self.confidences >= p_min) & (chains >= floor)
            good[:, 1:] &= chains[:, :-1] >= onward
        return good.long().cumprod(1).sum(1)
