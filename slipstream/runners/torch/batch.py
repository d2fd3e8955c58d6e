"""One step's tokens, flat: no padding rows. Linear layers see [tokens, hidden]; attention and recurrence see rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.runners.rows import RowSpan


class Batch(Protocol):
    """What a model sees of a step; the rest is between the runner and its operations."""

    @property
    def positions(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    rows: tuple[RowSpan, ...]
    positions: Tensor  # int32 [tokens]
    token_slots: Tensor  # int32 [tokens]
    block_table: Tensor  # int32 [slots, blocks per slot], shared by all steps

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


def make_batch(rows: Sequence[RowSpan], block_table: Tensor) -> RaggedBatch:
    positions: list[int] = []
    slots: list[int] = []
    for row in rows:
        positions.extend(range(row.start, row.start + row.num_fed))
        slots.extend([row.slot] * row.num_fed)
    packed = torch.tensor([positions, slots], dtype=torch.int32).to(block_table.device)  # [2, tokens]
    return RaggedBatch(tuple(rows), packed[0], packed[1], block_table)
