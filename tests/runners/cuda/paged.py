"""Ragged rows over a paged cache, padded as the runner pads them, and the same rows as the reference sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.batch import RaggedBatch, make_batch
from slipstream.runners.torch.caches import FP8, LayerKv, coded_layer, decode, kv_bytes
from slipstream.runners.torch.ops import HeadShape


@dataclass(frozen=True)
class PaddedBatch:
    num_tokens: int
    positions: Tensor
    rope_positions: Tensor
    token_slots: Tensor
    token_rows: Tensor
    row_slots: Tensor
    row_offsets: Tensor
    row_starts: Tensor
    row_fed: Tensor
    tile_rows: Tensor
    tile_firsts: Tensor
    tile_size: int
    block_table: Tensor
    context_hint: int


@dataclass(frozen=True)
class Row:
    start: int  # position of the first token
    fed: int  # tokens that count
    room: int = 0  # tokens of the flat batch reserved for it, where more than ``fed``

    @property
    def num_reserved(self) -> int:
        return max(self.fed, self.room)

    @property
    def end(self) -> int:
        return self.start + self.fed


@dataclass(frozen=True)
class Case:
    heads: HeadShape
    kv: LayerKv  # NaN where nothing was written
    padded: PaddedBatch
    ragged: RaggedBatch  # the same rows without padding, for the reference
    real: Tensor  # int64: where each token of ``ragged`` lies in ``padded``


def make_case(
    rows: list[Row],
    heads: HeadShape,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tile_size: int = 4,
    hint: int = 0,
    num_padding: int = 3,
) -> Case:
    """Each row in a slot of its own; padding tokens, rows and tiles at the end."""
    table = _block_table(rows, block_size)
    num_blocks = int(table.max()) + 1
    k, v = torch.full((2, num_blocks, heads.num_kv, block_size, heads.dim), torch.nan, dtype=dtype)
    slots = [len(rows) - 1 - i for i in range(len(rows))]
    for row, slot in zip(rows, slots):
        seen = torch.arange(row.end)
        at = table[slot, seen // block_size].long(), slice(None), seen % block_size
        k[at] = torch.randn(row.end, heads.num_kv, heads.dim).to(dtype)
        v[at] = torch.randn(row.end, heads.num_kv, heads.dim).to(dtype)
    table = table.to(device)
    offsets = [sum(row.num_reserved for row in rows[:i]) for i in range(len(rows))]
    real = torch.cat([torch.arange(at, at + row.fed) for at, row in zip(offsets, rows)]).to(device)
    packed = [sum(row.fed for row in rows[:i]) for i in range(len(rows))]
    spans = [RowSpan(slot, row.start, at, row.fed) for slot, row, at in zip(slots, rows, packed) if row.fed]
    ragged = make_batch(spans, table)
    num_tokens = sum(row.num_reserved for row in rows) + num_padding
    padded = _padded(rows, slots, offsets, num_tokens, tile_size, table, hint or max(row.end for row in rows))
    return Case(heads, LayerKv(k.to(device), v.to(device)), padded, ragged, real)


def coded(kv: LayerKv) -> LayerKv:
    """The same in codes, laid out as the runner does it. Codes that are no number where nothing was written."""
    num_blocks, *sizes = kv.k.shape
    heads, block_size, dim = sizes
    blocks = torch.empty(2, num_blocks, kv_bytes(heads * block_size, dim, FP8), dtype=torch.uint8, device=kv.k.device)
    codes = coded_layer(blocks, (heads, block_size, dim))
    at = torch.arange(block_size, device=kv.k.device).repeat(num_blocks)
    block = torch.arange(num_blocks, device=kv.k.device).repeat_interleave(block_size)
    codes.write(block, at, *(x.transpose(1, 2).flatten(0, 1) for x in (kv.k, kv.v)))
    return codes


def floats(kv: LayerKv) -> LayerKv:
    """What codes stand for; 0 where they are no number."""
    assert kv.k_scale is not None
    assert kv.v_scale is not None
    return LayerKv(decode(kv.k, kv.k_scale).nan_to_num(), decode(kv.v, kv.v_scale).nan_to_num())


def _block_table(rows: list[Row], block_size: int) -> Tensor:
    """Blocks in random order; -1, never to be read, after a row's last one."""
    counts = [-(-row.end // block_size) for row in rows][::-1]  # by slot
    free = (torch.randperm(sum(counts)) + 1).int()  # block 0 belongs to nobody
    table = torch.full((len(rows), max(counts) + 1), -1, dtype=torch.int32)
    for slot, count in enumerate(counts):
        first = sum(counts[:slot])
        table[slot, :count] = free[first : first + count]
    return table


def _padded(
    rows: list[Row], slots: list[int], offsets: list[int], num_tokens: int, tile_size: int, table: Tensor, hint: int
) -> PaddedBatch:
    positions, token_slots, token_rows = [-1] * num_tokens, [0] * num_tokens, [0] * num_tokens
    tiles = []
    for i, (row, slot, offset) in enumerate(zip(rows, slots, offsets)):
        span = slice(offset, offset + row.fed)
        positions[span] = range(row.start, row.end)
        token_slots[span], token_rows[span] = [slot] * row.fed, [i] * row.fed
        tiles += [(i, first) for first in range(0, row.num_reserved, tile_size)]
    tiles.append((-1, 0))

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=table.device)

    where = ints(positions)
    return PaddedBatch(
        num_tokens,
        where,
        where,
        ints(token_slots),
        ints(token_rows),
        ints([*slots, 0]),
        ints([*offsets, 0]),
        ints([*(row.start for row in rows), 0]),
        ints([*(row.fed for row in rows), 0]),
        ints([row for row, _ in tiles]),
        ints([first for _, first in tiles]),
        tile_size,
        table,
        hint,
    )
