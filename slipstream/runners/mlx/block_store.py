"""Keys and values that rows keep for others, by block: copies beside the rows' own, which are dense (decision 9).

When a row passes a position that it keeps, those of its blocks that are not here yet are copied out of the buffers, and
a row that starts with them has them copied into its own. A block belongs to the row that it was given to, so what the
prefix cache holds is never written. Memory is taken a segment at a time, as high block numbers come into use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from slipstream.runners.mlx.caches import KvCache

SEGMENT = 64  # blocks


@dataclass(slots=True)
class _Table:
    """The blocks of one row."""

    blocks: list[int] = field(default_factory=list)
    num_kept: int = 0  # the first ones: they are in the store


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of a list of blocks, all in one segment."""

    segment: int
    inside: mx.array  # int32: their places there
    places: list[int]  # in the list


class BlockStore:
    def __init__(self, caches: Sequence[KvCache], num_blocks: int, block_size: int) -> None:
        """``caches``: of all attention layers, the head's included."""
        self._block_size = block_size
        self._layers = [_LayerBlocks(cache, num_blocks, block_size) for cache in caches]
        self._tables: dict[int, _Table] = {}  # by slot

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self._layers)

    def join(self, slot: int, blocks: Sequence[int]) -> None:
        """``blocks``: kept ones, that the row starts with."""
        self._tables[slot] = _Table(list(blocks), len(blocks))

    def fork(self, source: int, slot: int, blocks: Sequence[int]) -> None:
        """The row starts with what another has, kept or not."""
        self._tables[slot] = _Table(list(blocks), min(self._tables[source].num_kept, len(blocks)))

    def grow(self, slot: int, blocks: Sequence[int]) -> None:
        self._tables[slot].blocks += blocks

    def leave(self, slot: int) -> None:
        del self._tables[slot]

    def load(self, slot: int, row: int) -> None:
        """The blocks that a row starts with, into its row of the buffers."""
        blocks = self._tables[slot].blocks
        parts = _parts(blocks)
        for layer in self._layers:
            layer.load(parts, len(blocks), row)

    def save(self, slot: int, row: int, num_tokens: int) -> None:
        """The blocks of a row's first tokens. The buffers are evaluated: else writing them next would copy them."""
        table, end = self._tables[slot], num_tokens // self._block_size
        first = table.num_kept
        if end <= first:
            return
        blocks = table.blocks[first:end]
        assert len(blocks) == end - first, "a row keeps a position that it has no blocks for"
        parts = _parts(blocks)
        for layer in self._layers:
            layer.save(parts, row, first, end)
        table.num_kept = end


class _LayerBlocks:
    """One attention layer's."""

    def __init__(self, cache: KvCache, num_blocks: int, block_size: int) -> None:
        self._cache = cache
        self._num_blocks = num_blocks
        self._block_size = block_size
        # [blocks, kv heads, block size, head dim]: keys and values
        self._segments: dict[int, tuple[mx.array, mx.array]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for both in self._segments.values() for array in both)

    def load(self, parts: Sequence[_Part], count: int, row: int) -> None:
        if any(part.segment not in self._segments for part in parts):
            return  # kept by a row that never drafts, so that the head was not fed; nor will it be by this one
        keys, values = (self._gathered(parts, count, which) for which in (0, 1))
        self._cache.write_row(row, keys, values)

    def _gathered(self, parts: Sequence[_Part], count: int, which: int) -> mx.array:
        """[1, kv heads, positions, head dim]"""
        blocks = mx.concatenate([self._segments[part.segment][which][part.inside] for part in parts])
        places = [place for part in parts for place in part.places]
        if places != list(range(count)):
            back = sorted(range(count), key=places.__getitem__)
            blocks = blocks[mx.array(back, dtype=mx.int32)]
        return blocks.swapaxes(0, 1).flatten(1, 2)[None]

    def save(self, parts: Sequence[_Part], row: int, first: int, end: int) -> None:
        size = self._block_size
        both = self._cache.read_row(row, first * size, end * size)
        if both is None:
            return
        new = [array.reshape(array.shape[0], end - first, size, array.shape[2]).swapaxes(0, 1) for array in both]
        changed: list[mx.array] = []
        for part in parts:
            segment = self._segment(part.segment, new)
            for array, blocks in zip(segment, new, strict=True):
                array[part.inside] = blocks[mx.array(part.places, dtype=mx.int32)]
            changed += segment
        mx.eval(changed)  # a layer at a time: the copies on the way take memory

    def _segment(self, number: int, new: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        if number not in self._segments:
            size = min(SEGMENT, self._num_blocks - number * SEGMENT)
            keys, values = (mx.zeros((size, *blocks.shape[1:]), blocks.dtype) for blocks in new)
            self._segments[number] = keys, values
        return self._segments[number]


def _parts(blocks: Sequence[int]) -> list[_Part]:
    places: dict[int, list[int]] = {}
    for place, block in enumerate(blocks):
        places.setdefault(block // SEGMENT, []).append(place)
    return [
        _Part(segment, mx.array([blocks[place] % SEGMENT for place in own], dtype=mx.int32), own)
        for segment, own in places.items()
    ]
