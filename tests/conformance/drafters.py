"""Drafters that know too much: always right, always wrong, or guessing. Same output, different speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from script import Script
from torch import Tensor

from slipstream.runners.torch.batch import RaggedBatch
from slipstream.runners.torch.drafter import Ends, Proposal, no_proposal


class ScriptedDrafter:
    """Proposes from each stream's true continuation, found by its seed."""

    def __init__(self, truth: Mapping[int, Sequence[int]], vocab: int, mode: str, max_depth: int = 4) -> None:
        self.max_depth = max_depth
        self._script = Script(truth, vocab, mode)

    def feed(self, hidden: Tensor, next_tokens: Tensor, batch: RaggedBatch) -> Tensor:
        return hidden

    def propose(self, fed: Tensor, ends: Ends) -> Proposal:
        depth = max(ends.propose, default=0)
        if depth == 0:
            return no_proposal(len(ends.rows), fed.device)
        drafts = torch.zeros(len(ends.rows), depth, dtype=torch.int64)
        for i, (row, end) in enumerate(zip(ends.rows, ends.cursors.tolist(), strict=True)):
            for j in range(ends.propose[i]):
                drafts[i, j] = self._script.token(row.draw.seed, end + 1 + j)
        return Proposal(drafts, torch.tensor(ends.propose))
