"""Causal attention of ragged rows over the paged cache: one kernel for decoding and for prompts.

A program takes one KV head and some (token, query head) pairs that share it, so each cached row is read once for all of
them. Few rows leave most of the machine idle: then the context is split too, and a second kernel merges the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.attention.kv_codes import check_layout, decoded, loaded_scales
from slipstream.runners.cuda.kernels.attention.tiles import (
    LONG_CONTEXT,
    PROMPT_TILE,
    SHORTEST_SPLIT,
    Blocks,
    even_split_count,
    num_busy_programs,
    plan_blocks,
    split_count,
    with_codes,
)
from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.product import product
from slipstream.runners.cuda.kernels.pdl import launch_dependents, pdl_options, wait_for_previous
from slipstream.runners.cuda.kernels.views import TiledRows
from slipstream.runners.torch.caches import LayerKv
from slipstream.runners.torch.ops import HeadShape

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _split_length(length, num_splits, BLOCK_N: tl.constexpr):
    """Positions each split of a row covers: the same answer in both kernels."""
    even = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    return tl.maximum(even, SHORTEST_SPLIT)


@triton.jit
def _clear_padding(
    out,
    positions,
    num_tokens,
    first,
    head,
    GROUP: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Zeros for the padding among some tokens, in the columns of one KV head."""
    tokens = first + tl.arange(0, TOKENS)
    cols = tl.arange(0, BLOCK_D)
    padding = (tl.load(positions + tokens, mask=tokens < num_tokens, other=0) < 0)[:, None] & (cols < DIM)[None, :]
    targets = tokens.to(tl.int64)[:, None] * (NUM_KV * GROUP * DIM) + head * GROUP * DIM + cols[None, :]
    for i in tl.static_range(GROUP):
        tl.store(out + targets + i * DIM, tl.zeros([TOKENS, BLOCK_D], out.dtype.element_ty), mask=padding)


@triton.jit
def _attend_positions(
    queries, k_head, v_head, k_scales, v_scales, blocks, stride_block, low, high, sees, best, total, mix, scale,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax over positions ``low`` to ``high``. Not MASKED: whole blocks that every query sees."""
    cols = tl.arange(0, BLOCK_D)
    inside = cols < DIM
    for at in tl.range(low, high, BLOCK_N):
        seen = at + tl.arange(0, BLOCK_N)
        stored = tl.minimum(seen, high - 1) if MASKED else seen  # past the end: the last row again, with weight 0
        block = tl.load(blocks + stored // BLOCK_SIZE).to(tl.int64)
        at_row = block * stride_block + (stored % BLOCK_SIZE) * DIM
        if DIM == BLOCK_D:
            k = tl.load(k_head + at_row[:, None] + cols[None, :])
            v = tl.load(v_head + at_row[:, None] + cols[None, :])
        else:
            k = tl.load(k_head + at_row[:, None] + cols[None, :], mask=inside[None, :], other=0.0)
            v = tl.load(v_head + at_row[:, None] + cols[None, :], mask=inside[None, :], other=0.0)
        if k_scales is not None:  # codes, and scales of two bytes
            at_scale = block * (stride_block // 2) + stored % BLOCK_SIZE
            k = decoded(k, queries.dtype)
        scores = product(queries, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale
        if k_scales is not None:
            scores *= loaded_scales(k_scales + at_scale)[None, :]
        if MASKED:
            scores = tl.where((seen[None, :] <= sees[:, None]) & (seen < high)[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # A token may see nothing of this split.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, axis=1)
        if k_scales is not None:
            weights *= loaded_scales(v_scales + at_scale)[None, :]
            v = decoded(v, queries.dtype)
        mix = product(weights.to(v.dtype), v, mix * fade[:, None])
        best = new_best
    return best, total, mix


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _attend_kernel(
    q,
    gate,
    k_cache,
    v_cache,
    k_scales,  # None: the caches hold floats
    v_scales,
    positions,
    row_slots,
    row_offsets,
    row_starts,
    row_fed,
    tile_rows,
    tile_firsts,
    block_table,
    out,  # with splits: float32 [splits, tokens, query heads, dim], not yet divided
    scales,  # with splits: float32 [2, splits, tokens, query heads]: log2 of the largest weight, sum of weights
    num_tokens,
    num_tiles,
    stride_q,
    stride_gate,
    stride_table,
    stride_block,
    scale,
    GROUP: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    launch_dependents()
    tile = tl.program_id(0)
    head = tl.program_id(1) % NUM_KV
    part = tl.program_id(1) // NUM_KV  # of the tile's (token, query head) pairs
    if tile >= num_tiles:
        wait_for_previous()
        if part == 0:
            _clear_padding(out, positions, num_tokens, (tile - num_tiles) * 16, head, GROUP, NUM_KV, DIM, 16, BLOCK_D)
        return
    row = tl.load(tile_rows + tile)
    there = row >= 0
    fed = tl.load(row_fed + row, mask=there, other=0)
    start = tl.load(row_starts + row, mask=there, other=0)
    offset = tl.load(row_offsets + row, mask=there, other=0)
    blocks = block_table + tl.load(row_slots + row, mask=there, other=0).to(tl.int64) * stride_table
    pairs = part * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.load(tile_firsts + tile)
    wait_for_previous()
    tokens = first + pairs // GROUP  # within the row
    if first + part * BLOCK_M // GROUP >= fed:
        return
    end = first + tl.minimum((part * BLOCK_M + BLOCK_M - 1) // GROUP + 1, TILE)
    low = 0
    high = start + tl.minimum(end, fed)  # the context of the last of these tokens
    if SPLIT:
        length = _split_length(start + fed, tl.num_programs(2), BLOCK_N)
        low = tl.program_id(2) * length
        if low >= start + fed:
            return
        high = tl.minimum(high, low + length)
    real = (pairs < TILE * GROUP) & (tokens < fed)
    flat = (offset + tokens).to(tl.int64)
    column = (head * GROUP + pairs % GROUP) * DIM
    cols = tl.arange(0, BLOCK_D)
    inside = cols < DIM
    mask = real[:, None] & inside[None, :]
    # [BLOCK_M, BLOCK_D]
    queries = tl.load(q + (flat * stride_q + column)[:, None] + cols[None, :], mask=mask, other=0.0)
    sees = tl.where(real, start + tokens, -1)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mix = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_head = k_cache + head * (BLOCK_SIZE * DIM)
    v_head = v_cache + head * (BLOCK_SIZE * DIM)
    if k_scales is not None:
        k_scales += head * BLOCK_SIZE
        v_scales += head * BLOCK_SIZE
    if WIDE:  # most positions are seen by every query: no masks there
        whole = tl.minimum(start + first + part * BLOCK_M // GROUP + 1, high) - low
        whole = low + tl.maximum(whole, 0) // BLOCK_N * BLOCK_N
        best, total, mix = _attend_positions(
            queries, k_head, v_head, k_scales, v_scales, blocks, stride_block, low, whole, sees, best, total, mix,
            scale, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, False,
        )  # fmt: skip
        low = whole
    best, total, mix = _attend_positions(
        queries, k_head, v_head, k_scales, v_scales, blocks, stride_block, low, high, sees, best, total, mix, scale,
        DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip

    if SPLIT:
        pair = (tl.program_id(2) * num_tokens + flat) * (NUM_KV * GROUP) + head * GROUP + pairs % GROUP
        tl.store(out + pair[:, None] * DIM + cols[None, :], mix, mask=mask)
        tl.store(scales + pair, best, mask=real)
        tl.store(scales + tl.num_programs(2).to(tl.int64) * num_tokens * (NUM_KV * GROUP) + pair, total, mask=real)
    else:
        mix = mix / tl.where(real, total, 1.0)[:, None]
        if gate is not None:
            opened = tl.load(gate + (flat * stride_gate + column)[:, None] + cols[None, :], mask=mask, other=0.0)
            mix = mix * tl.sigmoid(opened.to(tl.float32))
        target = (flat * (NUM_KV * GROUP * DIM) + column)[:, None] + cols[None, :]
        tl.store(out + target, mix.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _merge_kernel(
    parts,
    scales,
    gate,
    positions,
    token_rows,
    row_starts,
    row_fed,
    out,
    num_tokens,
    num_splits,
    stride_gate,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One query head of one token: its parts by weight, then the gate. Zeros for padding."""
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK_D)
    inside = cols < DIM
    merged = tl.zeros([BLOCK_D], tl.float32)
    position = tl.load(positions + token)
    row = tl.load(token_rows + token)
    length = tl.load(row_starts + row) + tl.load(row_fed + row)
    wait_for_previous()
    if position >= 0:
        num_parts = tl.cdiv(length, _split_length(length, num_splits, BLOCK_N))
        splits = tl.arange(0, BLOCK_S)
        pairs = (splits * num_tokens + token) * NUM_HEADS + head
        best = tl.load(scales + pairs, mask=splits < num_parts, other=float("-inf"))
        sums = scales + num_splits.to(tl.int64) * num_tokens * NUM_HEADS
        total = tl.load(sums + pairs, mask=splits < num_parts, other=0.0)
        top = tl.max(best, axis=0)
        divisor = tl.sum(tl.exp2(best - top) * total, axis=0)
        for first in tl.range(0, num_parts, CHUNK):
            some = first + tl.arange(0, CHUNK)
            there = some < num_parts
            pair = (some * num_tokens + token) * NUM_HEADS + head
            weight = tl.exp2(tl.load(scales + pair, mask=there, other=float("-inf")) - top)
            mask = there[:, None] & inside[None, :]
            part = tl.load(parts + pair[:, None] * DIM + cols[None, :], mask=mask, other=0.0)
            merged += tl.sum(weight[:, None] * part, axis=0)
        merged = merged / divisor
        if gate is not None:
            opened = tl.load(gate + token * stride_gate + head * DIM + cols, mask=inside, other=0.0)
            merged = merged * tl.sigmoid(opened.to(tl.float32))
    tl.store(out + (token * NUM_HEADS + head) * DIM + cols, merged.to(out.dtype.element_ty), mask=inside)


def attend(q: Tensor, heads: HeadShape, kv: LayerKv, batch: TiledRows, gate: Tensor | None = None) -> Tensor:
    """Each token over its row's positions up to its own, all written already. q, gate: [tokens, q width] -> the same.

    With a gate, the result is multiplied by its sigmoid. Zeros for padding tokens.
    """
    num_tokens, num_tiles = q.shape[0], batch.tile_rows.shape[0]
    group = heads.num_q // heads.num_kv
    assert q.stride(1) == 1
    assert gate is None or gate.stride(1) == 1
    check_layout(kv, heads)
    processors = gpu(q.device).num_processors
    few = 4 * num_tiles * heads.num_kv <= processors and batch.context_hint < LONG_CONTEXT
    plan = plan_blocks(batch.tile_size * group, heads.dim, q.element_size(), few, gpu(q.device).shared_bytes)
    if kv.k_scale is not None:
        plan = with_codes(plan, q.element_size())
    num_parts = triton.cdiv(batch.tile_size * group, plan.block_m)
    if batch.tile_size == PROMPT_TILE:
        num_programs = heads.num_kv * num_busy_programs(num_tokens, num_tiles, num_parts)
    else:
        num_programs = heads.num_kv * num_tiles * num_parts
    if plan.wide:
        num_splits = even_split_count(num_programs, batch.context_hint, processors, num_tokens)
    else:
        num_splits = split_count(num_programs, batch.context_hint, processors)
    out = torch.empty((num_tokens, heads.num_q * heads.dim), dtype=q.dtype, device=q.device)
    split = num_splits > 1
    target, scales = out, None
    if split:
        target = torch.empty((num_splits, num_tokens, heads.num_q, heads.dim), dtype=torch.float32, device=q.device)
        scales = torch.empty((2, num_splits, num_tokens, heads.num_q), dtype=torch.float32, device=q.device)
    num_items = num_tiles if split else num_tiles + triton.cdiv(num_tokens, 16)
    _attend_kernel[(num_items, heads.num_kv * num_parts, num_splits)](
        q, None if split else gate, kv.k, kv.v, kv.k_scale, kv.v_scale,
        batch.positions, batch.row_slots, batch.row_offsets, batch.row_starts, batch.row_fed,
        batch.tile_rows, batch.tile_firsts, batch.block_table, target, scales, num_tokens, num_tiles,
        q.stride(0), 0 if gate is None else gate.stride(0), batch.block_table.stride(0), kv.k.stride(0),
        heads.dim**-0.5 * LOG2_E.value,
        GROUP=group, NUM_KV=heads.num_kv, DIM=heads.dim, BLOCK_SIZE=kv.k.shape[2], TILE=batch.tile_size,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_D=plan.block_d, WIDE=plan.wide, SPLIT=split,
        num_warps=plan.num_warps, num_stages=plan.num_stages, **pdl_options(q.device),
    )  # fmt: skip
    if scales is not None:
        _merge(target, scales, gate, heads, batch, plan, out)
    return out


def _merge(
    parts: Tensor, scales: Tensor, gate: Tensor | None, heads: HeadShape, batch: TiledRows, plan: Blocks, out: Tensor
) -> None:
    num_splits, num_tokens = parts.shape[:2]
    _merge_kernel[(num_tokens, heads.num_q)](
        parts,
        scales,
        gate,
        batch.positions,
        batch.token_rows,
        batch.row_starts,
        batch.row_fed,
        out,
        num_tokens,
        num_splits,
        0 if gate is None else gate.stride(0),
        NUM_HEADS=heads.num_q,
        DIM=heads.dim,
        BLOCK_N=plan.block_n,
        BLOCK_S=triton.next_power_of_2(num_splits),
        CHUNK=8,
        BLOCK_D=plan.block_d,
        num_warps=2,
        **pdl_options(out.device),
    )
