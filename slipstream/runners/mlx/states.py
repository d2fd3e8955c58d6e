"""What a stream keeps in recurrent layers: arrays by slot, replaced as a whole by every step.

The rows of a feed are batched in one array; while the same rows run together it is handed from step to step as it is.
When the company changes, rows are taken out of the arrays they were computed in. Nothing is written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from slipstream.runners.mlx.caches import FeedHolder


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a slot's row is found."""

    arrays: tuple[mx.array, ...]  # [rows, ...] each
    row: int


class StateStore:
    def __init__(self) -> None:
        self._homes: dict[int, _Home] = {}
        self._kept: dict[int, _Home] = {}  # by state slot: what rows left for others

    def get(self, slots: Sequence[int], fresh: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """[rows, ...] each. ``fresh``: what a new row starts with, [1, ...] each."""
        homes = [self._homes.get(slot) or _Home(tuple(fresh), 0) for slot in slots]
        arrays = homes[0].arrays
        together = all(home.arrays is arrays and home.row == i for i, home in enumerate(homes))
        if together and arrays[0].shape[0] == len(homes):
            return arrays
        parts = [[array[home.row : home.row + 1] for array in home.arrays] for home in homes]
        return tuple(mx.concatenate(list(column)) for column in zip(*parts, strict=True))

    def put(self, slots: Sequence[int], arrays: Sequence[mx.array]) -> None:
        kept = tuple(arrays)
        for row, slot in enumerate(slots):
            self._homes[slot] = _Home(kept, row)

    def leave(self, slot: int) -> None:
        self._homes.pop(slot, None)

    def fork(self, source: int, slot: int) -> None:
        """Arrays are replaced, never written: both may begin with the same."""
        self._homes[slot] = self._homes[source]

    def keep(self, state_slot: int, arrays: Sequence[mx.array]) -> None:
        """[1, ...] each, copies: a row of a larger array would hold on to all of it."""
        self._kept[state_slot] = _Home(tuple(arrays), 0)

    def start(self, state_slot: int, slot: int) -> None:
        """A row begins with what another kept."""
        self._homes[slot] = self._kept[state_slot]

    def example(self) -> tuple[mx.array, ...] | None:
        """Somebody's arrays, for their shapes."""
        return next((home.arrays for home in self._homes.values()), None)

    def arrays(self) -> list[mx.array]:
        return list({id(array): array for home in self._homes.values() for array in home.arrays}.values())


def one_row(array: mx.array, row: int) -> mx.array:
    """A copy. [1, ...]"""
    return mx.take(array, mx.array([row]), axis=0)


class RecurrentCache:
    """A recurrent layer of a model that does not draft: what it keeps is committed, so its last state is its state.

    For mlx-lm this is a list of arrays. No padding may be fed: the rows of a feed have equally many tokens.
    """

    lengths = None
    left_padding = None

    def __init__(self, holder: FeedHolder, size: int) -> None:
        self._holder = holder
        self._size = size
        self._store = StateStore()
        self._pending: dict[int, mx.array] = {}

    def __getitem__(self, index: int) -> mx.array | None:
        """None before the first token of all rows: the layer then makes its own zeros."""
        slots = self._holder.feed.slots
        example = self._store.example()
        if example is None or all(span.start == 0 for span in self._holder.feed.spans):
            return None
        return self._store.get(slots, [mx.zeros_like(array[:1]) for array in example])[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._pending[index] = value
        if len(self._pending) == self._size:
            arrays = [self._pending[i] for i in range(self._size)]
            self._store.put(self._holder.feed.slots, arrays)
            self._keep(arrays)
            self._pending = {}

    def _keep(self, arrays: Sequence[mx.array]) -> None:
        """A row that keeps a state ends its feed there."""
        for row, span in enumerate(self._holder.feed.spans):
            for num_tokens, state_slot in span.kept_states:
                assert num_tokens == span.num_committed
                kept = [one_row(array, row) for array in arrays]
                self._store.keep(state_slot, kept)
                self._holder.kept += kept

    def advance(self, num_tokens: int) -> None:
        assert num_tokens == self._holder.feed.width

    def make_mask(self, num_tokens: int) -> None:
        return None

    def leave(self, slot: int) -> None:
        self._store.leave(slot)

    def fork(self, source_slot: int, slot: int, source: int, target: int) -> None:
        self._store.fork(source_slot, slot)

    def start(self, state_slot: int, slot: int) -> None:
        self._store.start(state_slot, slot)

    def move(self, source: int, target: int) -> None:
        """Kept by slot, not by row of a buffer."""

    def arrays(self) -> list[mx.array]:
        return self._store.arrays()
