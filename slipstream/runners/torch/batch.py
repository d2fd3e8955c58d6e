"""One step's tokens, flat: no padding rows. Linear layers see [tokens, hidden]; attention and recurrence see rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.runners.rows import RowSpan


class Batch(Protocol):
    """What a model sees of a step; the rest is between the runner and its operations."""

    @property
    def tokens(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    rows: tuple[RowSpan, ...]
    tokens: Tensor  # int64 [tokens]
    positions: Tensor  # int32 [tokens]
    token_slots: Tensor  # int32 [tokens]
    block_table: Tensor  # int32 [slots, blocks per slot], shared by all steps

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]


def make_batch(rows: tuple[RowSpan, ...], tokens: list[int], block_table: Tensor) -> RaggedBatch:
    positions: list[int] = []
    slots: list[int] = []
    for row in rows:
        positions.extend(range(row.start, row.start + row.num_fed))
        slots.extend([row.slot] * row.num_fed)
    # One upload for all three. [3, tokens]
    packed = torch.tensor([tokens, positions, slots]).to(block_table.device, non_blocking=True)
    small = packed[1:].int()
    return RaggedBatch(rows, packed[0], small[0], small[1], block_table)
