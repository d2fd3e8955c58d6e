"""The routed MLP: router, the active experts' matrices, and their weighted sum with the shared expert.

Bound by reading weights: each expert in use is read once per block of its pairs, by programs split over the output
columns. No float is added atomically: each pair's result is stored and summed in the order of the routing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.matmul.product import product
from slipstream.runners.cuda.kernels.moe.groups import first_and_rows, group
from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options

FEW_TOKENS = 16  # up to here a block holds all tokens and no grouping is needed


class Blocks(NamedTuple):
    """All pairs in blocks of one expert each, by ``block_of``."""

    number: int
    arguments: tuple[Any, ...]
    constants: dict[str, int | bool]


def blocks_of(expert: Tensor, positions: Tensor, num_experts: int, num_pairs: int) -> Blocks:
    """``num_pairs``: of a block; up to FEW_TOKENS there are as many blocks as pairs, and most have nothing to do."""
    num_tokens, num_active = expert.shape
    few = num_tokens <= FEW_TOKENS
    groups = None if few else group(expert, positions, num_experts, num_pairs)
    arguments = (expert, positions, groups and groups.experts, groups and groups.pairs, num_tokens)
    constants = {"ACTIVE": num_active, "WIDE": triton.next_power_of_2(num_active), "FEW": few}
    return Blocks(groups.num_blocks if groups else expert.numel(), arguments, constants)


class ExpertTiles(NamedTuple):
    """Of products that have a tile for both matrices."""

    pairs: int  # a block
    num_rows: int
    num_warps: int
    num_stages: int


class _Tiles(NamedTuple):
    pairs: int  # a block
    up_cols: int  # of gate and of up each
    down_cols: int
    depth_bytes: int  # of a row, a stage
    num_warps: int
    num_stages: int


@triton.jit
def _route_kernel(
    scores,
    expert,
    share,
    stride,
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    WIDE_EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    launch_dependents_and_wait()
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, WIDE_EXPERTS)
    inside = experts < EXPERTS
    left = tl.load(scores + token * stride + experts, mask=inside, other=float("-inf")).to(tl.float32)
    ranks = tl.arange(0, WIDE)
    chosen = tl.zeros([WIDE], tl.int32)
    weights = tl.zeros([WIDE], tl.float32)
    peak = tl.max(left, axis=0)
    for rank in tl.static_range(ACTIVE):
        best = tl.max(left, axis=0)
        # Scores that are no numbers must still name an expert.
        lowest = tl.minimum(tl.min(tl.where(left == best, experts, WIDE_EXPERTS), axis=0), EXPERTS - 1)
        chosen = tl.where(ranks == rank, lowest, chosen)
        weights = tl.where(ranks == rank, tl.exp(best - peak), weights)
        left = tl.where(experts == lowest, float("-inf"), left)
    # The softmax over all experts, normalised over the chosen: its denominator cancels.
    weights = weights / tl.sum(weights, axis=0)
    tl.store(expert + token * ACTIVE + ranks, chosen, mask=ranks < ACTIVE)
    tl.store(share + token * ACTIVE + ranks, weights, mask=ranks < ACTIVE)


@triton.jit
def block_of(
    expert,
    positions,
    block_experts,
    block_pairs,
    num_tokens,
    ACTIVE: tl.constexpr,
    WIDE: tl.constexpr,
    FEW: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """This program's expert (-1: nothing to do) and pairs (-1: none). int32, int32 [PAIRS]"""
    block = tl.program_id(0)
    if FEW:
        own, pairs = first_and_rows(block, expert, positions, num_tokens, ACTIVE, WIDE, PAIRS)
    else:
        own = tl.load(block_experts + block)
        pairs = tl.load(block_pairs + block * PAIRS + tl.arange(0, PAIRS))
    return own, pairs


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    x,
    weight,
    out,
    expert,
    positions,
    block_experts,
    block_pairs,
    num_tokens,
    stride,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ACTIVE: tl.constexpr,
    WIDE: tl.constexpr,
    FEW: tl.constexpr,
    PAIRS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """silu(gate) * up of a block of pairs, COLS columns. out: [pairs, inner]"""
    launch_dependents_and_wait()
    own, pairs = block_of(expert, positions, block_experts, block_pairs, num_tokens, ACTIVE, WIDE, FEW, PAIRS)
    if own < 0:
        return
    used = pairs >= 0
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ks = tl.arange(0, DEPTH)
    rows = x + (pairs // ACTIVE).to(tl.int64)[:, None] * stride + ks[None, :]
    gates = weight + own.to(tl.int64) * (2 * INNER * HIDDEN) + cols[None, :] * HIDDEN + ks[:, None]
    gate = tl.zeros([PAIRS, COLS], tl.float32)
    up = tl.zeros([PAIRS, COLS], tl.float32)
    for k in range(0, HIDDEN, DEPTH):
        inside = ks < HIDDEN - k
        values = tl.load(rows + k, mask=used[:, None] & inside[None, :], other=0.0)
        mask = (cols < INNER)[None, :] & inside[:, None]
        gate = product(values, tl.load(gates + k, mask=mask, other=0.0), gate)
        up = product(values, tl.load(gates + INNER * HIDDEN + k, mask=mask, other=0.0), up)
    target = out + pairs.to(tl.int64)[:, None] * INNER + cols[None, :]
    result = gate * tl.sigmoid(gate) * up
    tl.store(target, result.to(out.dtype.element_ty), mask=used[:, None] & (cols < INNER)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    inner,
    weight,
    out,
    expert,
    positions,
    block_experts,
    block_pairs,
    num_tokens,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ACTIVE: tl.constexpr,
    WIDE: tl.constexpr,
    FEW: tl.constexpr,
    PAIRS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The second matrix of a block of pairs, COLS columns. inner: [pairs, inner], out: [pairs, hidden]"""
    launch_dependents_and_wait()
    own, pairs = block_of(expert, positions, block_experts, block_pairs, num_tokens, ACTIVE, WIDE, FEW, PAIRS)
    if own < 0:
        return
    used = pairs >= 0
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ks = tl.arange(0, DEPTH)
    rows = inner + pairs.to(tl.int64)[:, None] * INNER + ks[None, :]
    columns = weight + own.to(tl.int64) * (HIDDEN * INNER) + cols[None, :] * INNER + ks[:, None]
    sums = tl.zeros([PAIRS, COLS], tl.float32)
    for k in range(0, INNER, DEPTH):
        inside = ks < INNER - k
        values = tl.load(rows + k, mask=used[:, None] & inside[None, :], other=0.0)
        weights = tl.load(columns + k, mask=(cols < HIDDEN)[None, :] & inside[:, None], other=0.0)
        sums = product(values, weights, sums)
    target = out + pairs.to(tl.int64)[:, None] * HIDDEN + cols[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=used[:, None] & (cols < HIDDEN)[None, :])


@triton.jit
def _combine_kernel(
    pairs,
    share,
    positions,
    shared_out,
    shared_gate,
    add,
    out,
    shared_stride,
    gate_stride,
    add_stride,
    HIDDEN: tl.constexpr,
    ACTIVE: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents_and_wait()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    real = cols < tl.where(tl.load(positions + token) < 0, 0, HIDDEN)  # a padding token's pairs were never written
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(ACTIVE):
        pair = token * ACTIVE + rank
        total += tl.load(share + pair) * tl.load(pairs + pair * HIDDEN + cols, mask=real, other=0.0).to(tl.float32)
    if SHARED:
        gate = tl.sigmoid(tl.load(shared_gate + token * gate_stride).to(tl.float32))
        shared = tl.load(shared_out + token * shared_stride + cols, mask=real, other=0.0).to(tl.float32)
        total += tl.load(add + token * add_stride + cols, mask=real, other=0.0).to(tl.float32) + gate * shared
    tl.store(out + token * HIDDEN + cols, tl.where(real, total, 0.0).to(out.dtype.element_ty), mask=mask)


def route(scores: Tensor, num_active: int) -> tuple[Tensor, Tensor]:
    """The best experts of each token, best first (of equals the lowest), and their shares, which sum to 1.

    scores: [tokens, experts], rows may lie apart -> int32 [tokens, active], float32 [tokens, active]
    """
    num_tokens, num_experts = scores.shape
    assert scores.stride(1) == 1
    assert num_active <= num_experts
    expert = torch.empty((num_tokens, num_active), dtype=torch.int32, device=scores.device)
    share = torch.empty((num_tokens, num_active), dtype=torch.float32, device=scores.device)
    _route_kernel[(num_tokens,)](
        scores,
        expert,
        share,
        scores.stride(0),
        EXPERTS=num_experts,
        ACTIVE=num_active,
        WIDE_EXPERTS=triton.next_power_of_2(num_experts),
        WIDE=triton.next_power_of_2(num_active),
        num_warps=1,
        **pdl_options(scores.device),
    )
    return expert, share


def expert_pairs(
    x: Tensor,  # [tokens, hidden]; rows may lie apart
    gate_up: Tensor,  # [experts, 2 * inner, hidden]: the gate's rows, then the up rows
    down: Tensor,  # [experts, hidden, inner]
    expert: Tensor,  # int32 [tokens, active]
    positions: Tensor,  # int32 [tokens]; -1: padding, its pairs are not written
) -> Tensor:
    """Each active expert's MLP of its token. [tokens, active, hidden]"""
    (num_tokens, num_active), (num_experts, hidden, inner) = expert.shape, down.shape
    assert x.stride(1) == 1
    assert gate_up.shape == (num_experts, 2 * inner, hidden)
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    tiles = _tiles(num_tokens, num_tokens * num_active / num_experts, x.dtype)
    blocks = blocks_of(expert, positions, num_experts, tiles.pairs)
    sizes = {
        "HIDDEN": hidden,
        "INNER": inner,
        **blocks.constants,
        "PAIRS": tiles.pairs,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    activated = torch.empty((num_tokens * num_active, inner), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(blocks.number, triton.cdiv(inner, tiles.up_cols))](
        x,
        gate_up,
        activated,
        *blocks.arguments,
        x.stride(0),
        **sizes,
        COLS=tiles.up_cols,
        DEPTH=_depth(tiles, hidden, x),
        **pdl_options(x.device),
    )
    out = torch.empty((num_tokens, num_active, hidden), dtype=x.dtype, device=x.device)
    _down_kernel[(blocks.number, triton.cdiv(hidden, tiles.down_cols))](
        activated,
        down,
        out,
        *blocks.arguments,
        **sizes,
        COLS=tiles.down_cols,
        DEPTH=_depth(tiles, inner, x),
        **pdl_options(x.device),
    )
    return out


def experts_mlp(x: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor, share: Tensor, positions: Tensor) -> Tensor:
    """The sum over the active experts of share * expert(x). Padding tokens give 0. [tokens, hidden]"""
    return _combine(expert_pairs(x, gate_up, down, expert, positions), share, positions, None, None, None)


def combine(
    pairs: Tensor,  # [tokens, active, hidden], of expert_pairs
    share: Tensor,  # float32 [tokens, active]
    positions: Tensor,  # int32 [tokens]; -1: padding, gives 0
    shared_out: Tensor,  # [tokens, hidden]; rows may lie apart, as those of the next two
    shared_gate: Tensor,  # [tokens, 1], before the sigmoid
    add: Tensor,  # [tokens, hidden]
) -> Tensor:
    """add + sigmoid(shared_gate) * shared_out + the pairs' sum by share. [tokens, hidden]"""
    return _combine(pairs, share, positions, shared_out, shared_gate, add)


def _combine(
    pairs: Tensor,
    share: Tensor,
    positions: Tensor,
    shared_out: Tensor | None,
    shared_gate: Tensor | None,
    add: Tensor | None,
) -> Tensor:
    num_tokens, num_active, hidden = pairs.shape
    out = torch.empty((num_tokens, hidden), dtype=pairs.dtype, device=pairs.device)
    block, num_warps = (256, 1) if num_tokens <= FEW_TOKENS else (1024, 4)
    _combine_kernel[(num_tokens, triton.cdiv(hidden, block))](
        pairs,
        share,
        positions,
        shared_out,
        shared_gate,
        add,
        out,
        0 if shared_out is None else shared_out.stride(0),
        0 if shared_gate is None else shared_gate.stride(0),
        0 if add is None else add.stride(0),
        HIDDEN=hidden,
        ACTIVE=num_active,
        SHARED=add is not None,
        BLOCK=block,
        num_warps=num_warps,
        **pdl_options(out.device),
    )
    return out


def _tiles(num_tokens: int, pairs_per_expert: float, dtype: torch.dtype) -> _Tiles:
    """Few pairs an expert: narrow tiles, so that many programs read weights. Many: tiles for the tensor cores.

    Source: not in the log.
    """
    if num_tokens <= FEW_TOKENS or pairs_per_expert <= 4:
        return _Tiles(16, 32, 64, 256, 4, 4)
    if pairs_per_expert <= 24 or dtype == torch.float32:
        return _Tiles(32, 32, 64, 256, 4, 4)
    if pairs_per_expert <= 96:
        return _Tiles(64, 64, 128, 128, 4, 4)
    return _Tiles(128, 128, 128, 128, 8, 3)


def _depth(tiles: _Tiles, width: int, x: Tensor) -> int:
    return int(max(16, min(tiles.depth_bytes // x.element_size(), triton.next_power_of_2(width))))
