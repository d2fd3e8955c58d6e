"""Rows of tokens over paged keys and values, some of them never written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.runners.cpu.bindings import Kernels


@dataclass
class Case:
    q: torch.Tensor  # [T, Hq D]
    caches: torch.Tensor  # [2, num_blocks, Hkv, block_size, D], NaN where nothing was written
    positions: torch.Tensor
    slot: torch.Tensor
    table: torch.Tensor
    dense: torch.Tensor  # [2, slots, context, Hkv, D]

    def attend(self, kernels: Kernels, rows: slice = slice(None)) -> torch.Tensor:
        q = self.q[rows]
        index = self.positions[rows].contiguous(), self.slot[rows].contiguous(), self.table
        return kernels.attend(q, self.caches[0], self.caches[1], *index, 0.3, torch.full_like(q, torch.nan))


def make(rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block_size: int) -> Case:
    """rows: (first position, number of tokens) of each slot."""
    torch.manual_seed(len(rows) + dim)
    context = max(first + n for first, n in rows)
    per_slot = -(-context // block_size)
    table = torch.randperm(len(rows) * per_slot, dtype=torch.int32).reshape(len(rows), per_slot)
    caches = torch.full((2, table.numel(), kv_heads, block_size, dim), torch.nan)
    dense = torch.randn(2, len(rows), context, kv_heads, dim)
    for slot, (first, n) in enumerate(rows):
        for pos in range(first + n):
            caches[:, table[slot, pos // block_size], :, pos % block_size] = dense[:, slot, pos]
        table[slot, -(-(first + n) // block_size) :] = -1  # never to be read
    positions = torch.cat([torch.arange(first, first + n) for first, n in rows]).int()
    slots = torch.cat([torch.full((n,), slot) for slot, (_, n) in enumerate(rows)]).int()
    return Case(torch.randn(len(positions), heads * dim), caches, positions, slots, table, dense)
