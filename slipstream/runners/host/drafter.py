"""Drafters of the host-driven step: what a step committed goes in, the next step's drafts come out.

Which drafts are accepted is not a drafter's decision. Nothing lasting changes before ``settle``, so a step that fails
leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol

from slipstream.runners.drafter import Drafter
from slipstream.runners.host.deferred_feed import DeferredFeed
from slipstream.runners.host.masks import DraftMasks
from slipstream.runners.host.model import A, B, CommittedStep, HostHead, HostModel
from slipstream.runners.host.rows import NO_PROPOSAL, DraftRow, Proposal
from slipstream.runners.rows import RowSpan
from slipstream.runners.simulate import Simulation
from slipstream.sampling.masks import is_empty


class HostDrafter(Drafter[CommittedStep[A, B], Sequence[DraftRow], list[Proposal]], Protocol[A, B]):
    """Proposes for rows whose step was just ``committed``."""

    max_depth: int

    @property
    def late_seconds(self) -> float:
        """Of the last ``committed``, for tokens of earlier steps: no draft pass of this step needed them."""
        ...

    def join(self, slot: int, state_of: int | None) -> None:
        """A row enters a slot, perhaps as a copy of another."""

    def leave(self, slot: int) -> None: ...

    def settle(self) -> None:
        """The step is committed."""


class NoDrafter(Generic[A, B]):
    max_depth = 0
    late_seconds = 0.0

    def join(self, slot: int, state_of: int | None) -> None:
        """Nothing to remember."""

    def leave(self, slot: int) -> None:
        """Nothing to forget."""

    def committed(self, step: CommittedStep[A, B]) -> None:
        """Nothing to learn."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [NO_PROPOSAL] * len(rows)

    def settle(self) -> None:
        """Nothing to settle."""


class MtpDrafter(Generic[A, B]):
    """The model's own MTP head. Draft 1 comes from the last committed token; 2, 3, ... from the head's own output,
    whose keys and values are written ahead and overwritten when the head is fed next."""

    def __init__(
        self, model: HostModel[A, B], head: HostHead[A, B], max_depth: int, simulation: Simulation | None = None
    ) -> None:
        self.max_depth = max_depth
        self._model = model
        self._head = head
        self._feed = DeferredFeed(model, head)
        self._simulation = simulation

    @property
    def late_seconds(self) -> float:
        return self._feed.late_seconds

    def join(self, slot: int, state_of: int | None) -> None:
        if state_of is not None:
            self._feed.copy(state_of, slot)

    def leave(self, slot: int) -> None:
        self._feed.forget(slot)

    def committed(self, step: CommittedStep[A, B]) -> None:
        self._feed.feed(step)

    def settle(self) -> None:
        self._feed.settle()

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        depth = max((row.request.depth for row in rows), default=0)
        if depth == 0:
            return [NO_PROPOSAL] * len(rows)
        chains = [_Chain(row) for row in rows]
        measures = any(chain.measures for chain in chains)
        reads_now = any(chain.masks for chain in chains) or (measures and self._model.reads_are_cheap)
        hidden, tokens = self._feed.last_outputs([row.row.slot for row in rows]), None
        active = list(range(len(rows)))
        unread: list[tuple[list[_Chain], A, A | None]] = []
        for i in range(depth):
            kept = [j for j, row in enumerate(active) if rows[row].request.depth > i and not chains[row].ended]
            if not kept:
                break
            if len(kept) < len(active):
                active, hidden = [active[j] for j in kept], self._model.take(hidden, kept)
                tokens = None if tokens is None else self._model.take(tokens, kept)
            if tokens is not None:
                hidden = self._pass(hidden, tokens, [rows[row] for row in active], i - 1)
            chosen = [chains[row] for row in active]
            tokens, confidence = self._sample(hidden, [rows[row] for row in active], chosen, i, measures)
            unread.append((chosen, tokens, confidence))
            if reads_now:
                self._read(unread)
        self._read(unread)
        return [chain.proposal() for chain in chains]

    def _pass(self, hidden: A, tokens: A, rows: Sequence[DraftRow], ahead: int) -> A:
        """One pass of the head over its own output. [rows, hidden]"""
        spans = [RowSpan(row.row.slot, row.cursor + ahead, j, 1) for j, row in enumerate(rows)]
        return self._head.forward(hidden, tokens, self._model.lay_out(spans))

    def _sample(
        self, hidden: A, rows: Sequence[DraftRow], chains: Sequence[_Chain], i: int, measures: bool
    ) -> tuple[A, A | None]:
        """Draft i of each row, and the head's confidence where anybody measures it. With the noise that the target will
        use at that position."""
        logits = self._head.logits(hidden)
        if any(chain.masks for chain in chains):
            logits = self._masked(logits, chains)
        positions = [row.cursor + i + 1 for row in rows]
        tokens = self._model.sample(logits, [row.row.sampling for row in rows], positions)
        return tokens, self._model.confidence(logits) if measures and self._simulation is None else None

    def _masked(self, logits: A, chains: Sequence[_Chain]) -> A:
        """Rule out what may not follow, but not for rows that could then draft nothing: the head's vocabulary may be
        smaller than the target's."""
        size = self._head.vocab_size // 8
        masks = {j: mask for j, chain in enumerate(chains) if (mask := chain.mask()) and not is_empty(mask[:size])}
        return self._model.mask(logits, list(masks), list(masks.values())) if masks else logits

    def _read(self, unread: list[tuple[list[_Chain], A, A | None]]) -> None:
        for chains, tokens, confidence in unread:
            drafts = self._model.read(tokens)
            values = [self._made_up(chain) for chain in chains] if confidence is None else self._model.read(confidence)
            for chain, draft, value in zip(chains, drafts, values, strict=True):
                chain.add(draft, value)
        unread.clear()

    def _made_up(self, chain: _Chain) -> float:
        """A simulated head is as confident as it is right: a random one is confident of nothing."""
        return 1.0 if self._simulation is None else self._simulation.pass_rates[chain.num_made]


class _Chain:
    """One row's drafts as they are made: where they end, and how confident the head was."""

    def __init__(self, row: DraftRow) -> None:
        self._request = row.request
        self._p_min = row.row.p_min
        self.measures = row.request.measures or self._p_min > 0.0
        self.masks = None
        if row.request.depth and row.row.matcher is not None:
            self.masks = DraftMasks(row.row, row.verdict.num_accepted, row.verdict.sampled)
        self.ended = False
        self.num_made = 0
        self._drafts: list[int] = []
        self._confidences: list[float] = []
        self._confidence = 1.0  # of the whole chain

    def mask(self) -> bytes | None:
        return None if self.masks is None else self.masks.next()

    def add(self, draft: int, confidence: float) -> None:
        if self.ended:
            return  # made because the host had not looked yet
        self.num_made += 1
        if self.measures:
            self._confidences.append(confidence)
            self._confidence *= confidence
            if confidence < self._p_min or self._confidence < self._request.threshold:
                self.ended = True
                return
        self._drafts.append(draft)
        self.ended = self.measures and self._confidence < self._request.continue_threshold
        if self.masks is not None:
            self.masks.follow(draft)

    def proposal(self) -> Proposal:
        return Proposal(tuple(self._drafts), tuple(self._confidences))
