"""One step's tokens, flat: no padding rows. Linear layers see [tokens, hidden]; attention and recurrence see rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.runners.rows import RowSpan

Shared = TypeVar("Shared")


class Batch(Protocol):
    """A step as a model sees it: handed on to the operations, which know this runner's batches."""

    @property
    def positions(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    rows: tuple[RowSpan, ...]
    positions: Tensor  # int32 [tokens]: in the cache
    rope_positions: Tensor  # int32 [tokens]: of the rotation; for text the same tensor
    token_slots: Tensor  # int32 [tokens]
    block_table: Tensor  # int32 [slots, blocks per slot], shared by all steps
    _shared: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, name: str, make: Callable[[], Shared]) -> Shared:
        """A value that all layers of this step share: made by the first one that asks."""
        if name not in self._shared:
            self._shared[name] = make()
        shared: Shared = self._shared[name]
        return shared

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
    return RaggedBatch(tuple(rows), packed[0], packed[0], packed[1], block_table)
