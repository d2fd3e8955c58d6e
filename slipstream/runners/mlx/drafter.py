"""Who proposes the next step's drafts. Two calls a step: ``feed`` what was computed, ``propose`` behind it.

The MTP head is fed every committed token with the trunk's hidden state of the position before, also when nobody
drafts: its KV has no holes. How many drafts were accepted is not known here yet: positions are arrays, and rows are cut
short by ``p_min`` or their floor on the device. What is accepted is not a drafter's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from slipstream.engine.contract import DraftRequest
from slipstream.runners.mlx.caches import FeedHolder, KvCache
from slipstream.runners.mlx.draw import choose
from slipstream.runners.mlx.grid import Feed, Grid
from slipstream.runners.mlx.mtp import MtpHead
from slipstream.runners.mlx.noise import key_halves, noise_key
from slipstream.runners.mlx.rows import Row
from slipstream.runners.mlx.trunk import OpenTrunk
from slipstream.runners.rows import RowSpan


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the rows that draw stand after this step's verdict."""

    rows: Sequence[Row]
    spans: Sequence[RowSpan]
    places: Sequence[int]  # in the caches' buffers
    propose: Sequence[int]  # drafts asked for, per row
    drafts: Sequence[DraftRequest]  # per row
    last: mx.array  # int32 [rows]: flat index of each row's last committed token
    accepted: mx.array  # int32 [rows]


@dataclass(frozen=True, slots=True)
class Proposal:
    drafts: mx.array  # int32 [rows, depth]
    lengths: mx.array  # int32 [rows]: how many of them count
    confidences: mx.array | None = None  # float32 [rows, depth]: the head's probability of each, where asked for


class Drafter(Protocol):
    max_depth: int

    def feed(self, hidden: mx.array, next_tokens: mx.array, grid: Grid) -> mx.array:
        """Learn a grid's tokens: hidden [rows, width, hidden] and the token behind each. Rejected ones are overwritten
        later."""
        ...

    def propose(self, fed: mx.array, ends: Ends) -> Proposal:
        """fed: [tokens of all grids, hidden], as ``feed`` returned it."""
        ...


def no_proposal(num_rows: int) -> Proposal:
    return Proposal(mx.zeros((num_rows, 0), mx.int32), mx.zeros(num_rows, mx.int32))


class NoDrafter:
    max_depth = 0

    def feed(self, hidden: mx.array, next_tokens: mx.array, grid: Grid) -> mx.array:
        return hidden

    def propose(self, fed: mx.array, ends: Ends) -> Proposal:
        return no_proposal(len(ends.rows))


class MtpDrafter:
    def __init__(
        self,
        head: MtpHead,
        trunk: OpenTrunk,
        output: Callable[[mx.array], mx.array],
        cache: KvCache,
        holder: FeedHolder,
        max_depth: int,
    ) -> None:
        self.max_depth = max_depth
        self._head = head
        self._trunk = trunk
        self._output = output  # may know only the first, most frequent, part of the vocabulary
        self._cache = cache
        self._holder = holder

    def feed(self, hidden: mx.array, next_tokens: mx.array, grid: Grid) -> mx.array:
        self._holder.set(grid.feed)
        return self._head(self._trunk.embed(next_tokens), hidden, self._cache)

    def propose(self, fed: mx.array, ends: Ends) -> Proposal:
        depth = max(ends.propose, default=0)
        if depth == 0:
            return no_proposal(len(ends.rows))
        noisy = not all(row.draw.greedy for row in ends.rows)
        halves = _keys_ahead(ends, depth) if noisy else None  # [rows, positions, 2]
        columns: list[mx.array] = []  # [rows] each
        confidences: list[mx.array] = []
        hidden, active = fed[ends.last], list(range(len(ends.rows)))
        measured = any(row.draw.p_min for row in ends.rows) or any(draft.measures for draft in ends.drafts)
        for i in range(depth):
            kept = [j for j, row in enumerate(active) if ends.propose[row] > i]
            if len(kept) < len(active):
                active, hidden = [active[j] for j in kept], hidden[mx.array(kept)]
            index = mx.array(active)
            if i > 0:
                hidden = self._again(columns[-1][index], hidden, ends, active, i)
            logits = self._output(hidden).astype(mx.float32)
            # Drawn with the noise the target will use at that index.
            keys = None if halves is None else halves[index, ends.accepted[index] + i]
            drawn = choose(logits, [ends.rows[row].draw for row in active], keys)
            columns.append(_spread(drawn, index, len(ends.rows)))
            if measured:
                confidence = mx.softmax(logits, axis=-1).max(axis=-1)
                confidences.append(_spread(confidence, index, len(ends.rows)))
        told = mx.stack(confidences, axis=1) if measured else None
        return Proposal(mx.stack(columns, axis=1), _lengths(ends, depth, told), told)

    def _again(self, tokens: mx.array, hidden: mx.array, ends: Ends, active: Sequence[int], ahead: int) -> mx.array:
        """One pass of the head over its own output. [rows, hidden]"""
        order = sorted(range(len(active)), key=lambda i: ends.places[active[i]])
        back = mx.array(sorted(range(len(active)), key=lambda i: order[i]))
        rows = [active[i] for i in order]
        spans = [ends.spans[row] for row in rows]
        certain = mx.array([span.start + span.num_certain for span in spans], dtype=mx.int32)
        feed = Feed(
            slots=tuple(span.slot for span in spans),
            places=tuple(ends.places[row] for row in rows),
            offset=certain + ends.accepted[mx.array(rows)] + (ahead - 1),
            width=1,
            reach=max(span.start + span.num_fed for span in spans) + ahead,
        )
        self._holder.set(feed)
        index = mx.array(order)
        passed = self._head(self._trunk.embed(tokens[index])[:, None], hidden[index][:, None], self._cache)
        return passed[:, 0][back]


def _keys_ahead(ends: Ends, depth: int) -> mx.array:
    """Noise keys of every position that may be drafted, whatever is accepted. uint32 [rows, positions, 2]"""
    most = max(span.num_drafts for span in ends.spans)
    keys = [
        noise_key(row.draw.seed, span.start + span.num_certain + 1 + i)
        for row, span in zip(ends.rows, ends.spans, strict=True)
        for i in range(most + depth)
    ]
    return key_halves(keys).reshape(len(ends.rows), most + depth, 2)


def _spread(values: mx.array, index: mx.array, num_rows: int) -> mx.array:
    """Values of some rows as a column of all; 0 elsewhere. [rows]"""
    return mx.put_along_axis(mx.zeros(num_rows, values.dtype), index, values, axis=0)


def _lengths(ends: Ends, depth: int, confidences: mx.array | None) -> mx.array:
    """Drafts that count: as many as asked for, or fewer where the head's confidence falls too low. int32 [rows]"""
    good = mx.arange(depth) < mx.array(list(ends.propose))[:, None]  # [rows, depth]
    if confidences is not None:
        p_min = mx.array([row.draw.p_min for row in ends.rows])[:, None]
        floors = mx.array([draft.threshold for draft in ends.drafts], dtype=mx.float32)[:, None]
        good = good & (confidences >= p_min) & (mx.cumprod(confidences, axis=1) >= floors)
    return mx.cumprod(good.astype(mx.int32), axis=1).sum(axis=1)
