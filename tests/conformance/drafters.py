"""Drafters that know too much: always right, always wrong, or guessing. Same output, different speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from script import Script

from slipstream.runners.host.drafter import NoDrafter
from slipstream.runners.host.rows import DraftRow, Proposal


class ScriptedDrafter(NoDrafter[Any, Any]):
    """Proposes from each stream's true continuation, found by its seed. For every host-driven runner."""

    def __init__(self, truth: Mapping[int, Sequence[int]], vocab: int, mode: str, max_depth: int = 4) -> None:
        self.max_depth = max_depth
        self._script = Script(truth, vocab, mode)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [Proposal(tuple(self._tokens(row))) for row in rows]

    def _tokens(self, row: DraftRow) -> list[int]:
        seed = row.row.sampling.seed
        return [self._script.token(seed, row.cursor + 1 + j) for j in range(row.request.depth)]
