"""Rows by slot, and where each lies in the caches' buffers. Knows no array."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from slipstream.engine.contract import RowJoin
from slipstream.runners import rows
from slipstream.runners.mlx.processors import Processor, cuts_for, processors_for

Row: TypeAlias = rows.Row[Processor]
RowDraw: TypeAlias = rows.RowDraw[Processor]


class RowTable:
    """Rows by slot. Their places in the buffers are always 0, 1, 2, ...: who leaves is replaced by the last one."""

    def __init__(self, num_slots: int, vocab_size: int, move: Callable[[int, int], None]) -> None:
        """``move(source, target)``: called when a row changes its place."""
        self.num_slots = num_slots
        self._vocab_size = vocab_size
        self._move = move
        self._rows: dict[int, Row] = {}
        self._places: list[int] = []  # place -> slot

    def __getitem__(self, slot: int) -> Row:
        return self._rows[slot]

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, slot: int) -> int:
        return self._places.index(slot)

    def join(self, join: RowJoin) -> None:
        assert 0 <= join.slot < self.num_slots
        assert join.slot not in self._rows, f"slot {join.slot} is taken"
        self._rows[join.slot] = rows.joined(
            join, join.seed, self._vocab_size, processors_for(join.params), cuts_for(join.params)
        )
        self._places.append(join.slot)

    def leave(self, slot: int) -> None:
        del self._rows[slot]
        place, last = self.place(slot), len(self._places) - 1
        if place != last:
            self._move(last, place)
            self._places[place] = self._places[last]
        self._places.pop()
