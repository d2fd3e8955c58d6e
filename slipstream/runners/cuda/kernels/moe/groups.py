"""Pairs of a token and one of its experts, grouped by expert: a block of the routed MLP reads its matrices once.

Pairs are numbered token * active + rank (0: the token's best expert). Everything is found on the device; the number of
blocks is an upper bound that depends on padded sizes only.
Padding tokens are in no block, so no weights are read for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options

_NO_PAIR: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_SCAN = 1024


class Groups(NamedTuple):
    num_blocks: int
    block_size: int
    experts: Tensor  # int32 [blocks]: the expert of each block, -1 for blocks without work
    pairs: Tensor  # int32 [blocks, block size]: its pairs, ascending, then -1; unset for blocks without work


@triton.jit
def first_and_rows(pair, expert, positions, num_tokens, ACTIVE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """For up to BLOCK tokens: the first pair of an expert stands for it, and no grouping pass is needed.

    Gives the expert (-1: another pair stands for it, or padding) and, for each token, its pair of that expert or -1.
    """
    own = tl.load(expert + pair)
    tokens = tl.arange(0, BLOCK)
    ranks = tl.arange(0, WIDE)
    valid = (tl.load(positions + tokens, mask=tokens < num_tokens, other=-1) >= 0)[:, None] & (ranks < ACTIVE)[None, :]
    numbers = tokens[:, None] * ACTIVE + ranks[None, :]
    same = valid & (tl.load(expert + numbers, mask=valid, other=-1) == own)
    rows = tl.min(tl.where(same, numbers, _NO_PAIR), axis=1)
    leads = tl.min(rows, axis=0) == pair
    return tl.where(leads, own, -1), tl.where(rows == _NO_PAIR, -1, rows)


@triton.jit
def _pairs_at(start, expert, positions, num_pairs, ACTIVE: tl.constexpr, SCAN: tl.constexpr):
    """SCAN pairs and their experts; -1 for padding."""
    pairs = start + tl.arange(0, SCAN)
    inside = pairs < num_pairs
    valid = tl.load(positions + pairs // ACTIVE, mask=inside, other=-1) >= 0
    return pairs, tl.load(expert + pairs, mask=valid, other=-1)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _group_kernel(
    expert,
    positions,
    block_experts,
    block_pairs,
    num_pairs,
    num_blocks,
    ACTIVE: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """One program an expert: counts all experts' pairs, to know where its own blocks lie, and stores its own pairs."""
    launch_dependents_and_wait()
    own = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, SCAN):
        _, found = _pairs_at(start, expert, positions, num_pairs, ACTIVE, SCAN)
        counts += tl.histogram(tl.where(found < 0, BINS - 1, found), BINS)  # no expert has the last bin
    bins = tl.arange(0, BINS)
    blocks = tl.where(bins < tl.num_programs(0), (counts + BLOCK - 1) // BLOCK, 0)
    first = tl.sum(tl.where(bins < own, blocks, 0), axis=0)
    own_count = tl.sum(tl.where(bins == own, counts, 0), axis=0)
    own_blocks = tl.sum(tl.where(bins == own, blocks, 0), axis=0)

    lanes = tl.arange(0, BLOCK)
    for i in range(own_blocks):
        tl.store(block_experts + first + i, own)
        spare = i * BLOCK + lanes >= own_count
        tl.store(block_pairs + (first + i) * BLOCK + lanes, tl.full([BLOCK], -1, tl.int32), mask=spare)
    if own == tl.num_programs(0) - 1:
        for start in range(first + own_blocks, num_blocks, BINS):
            rest = start + bins
            tl.store(block_experts + rest, tl.full([BINS], -1, tl.int32), mask=rest < num_blocks)
    if own_count > 0:
        placed = 0
        for start in range(0, num_pairs, SCAN):
            pairs, found = _pairs_at(start, expert, positions, num_pairs, ACTIVE, SCAN)
            mine = (found == own).to(tl.int32)
            ranks = placed + tl.cumsum(mine, axis=0) - 1
            tl.store(block_pairs + first * BLOCK + ranks, pairs, mask=mine != 0)
            placed += tl.sum(mine, axis=0)


def group(expert: Tensor, positions: Tensor, num_experts: int, block_size: int) -> Groups:
    """expert: int32 [tokens, active], contiguous; positions: int32 [tokens], -1 for padding."""
    num_pairs = expert.numel()
    num_blocks = min(num_pairs, num_experts + num_pairs // block_size)
    table = torch.empty((num_blocks, block_size + 1), dtype=torch.int32, device=expert.device).view(-1)
    groups = Groups(num_blocks, block_size, table[:num_blocks], table[num_blocks:])
    _group_kernel[(num_experts,)](
        expert,
        positions,
        groups.experts,
        groups.pairs,
        num_pairs,
        num_blocks,
        ACTIVE=expert.shape[1],
        BINS=max(64, triton.next_power_of_2(num_experts + 1)),
        BLOCK=block_size,
        SCAN=_SCAN,
        num_warps=4,
        **pdl_options(expert.device),
    )
    return groups
