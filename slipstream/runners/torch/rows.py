"""Rows by slot, and the block table they live in."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from slipstream.engine.contract import RowJoin, RowStep
from slipstream.runners import rows
from slipstream.runners.torch.noise import signed64
from slipstream.runners.torch.processors import Processor, cuts_for, processors_for

Row: TypeAlias = rows.Row[Processor]
RowDraw: TypeAlias = rows.RowDraw[Processor]


class RowTable:
    def __init__(self, num_slots: int, blocks_per_slot: int, vocab_size: int, device: torch.device) -> None:
        self._rows: dict[int, Row] = {}
        self._vocab_size = vocab_size
        self._num_blocks: dict[int, int] = {}
        self.num_slots = num_slots
        self.block_table: Tensor = torch.zeros(num_slots, blocks_per_slot, dtype=torch.int32, device=device)

    def __getitem__(self, slot: int) -> Row:
        return self._rows[slot]

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, join: RowJoin) -> None:
        assert 0 <= join.slot < self.num_slots
        assert join.slot not in self._rows, f"slot {join.slot} is taken"
        processors = processors_for(join.params, self.block_table.device)
        seed, cuts = signed64(join.seed), cuts_for(join.params)
        self._rows[join.slot] = rows.joined(join, seed, self._vocab_size, processors, cuts)
        self._num_blocks[join.slot] = 0
        self._append(join.slot, join.start.blocks)

    def leave(self, slot: int) -> None:
        del self._rows[slot], self._num_blocks[slot]

    def grow(self, step: RowStep) -> None:
        """Append the step's new blocks to its row's table."""
        self._append(step.slot, step.blocks)

    def _append(self, slot: int, blocks: tuple[int, ...]) -> None:
        if not blocks:
            return
        start = self._num_blocks[slot]
        end = self._num_blocks[slot] = start + len(blocks)
        new = torch.tensor(blocks, dtype=torch.int32)
        self.block_table[slot, start:end] = new.to(self.block_table.device, non_blocking=True)
