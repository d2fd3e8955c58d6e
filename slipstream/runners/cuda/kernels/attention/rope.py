"""From the mixed projection to attention in one launch: per-head norms, rotary, the write to the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.attention.kv_codes import check_layout, encoded
from slipstream.runners.cuda.kernels.pdl import launch_dependents, pdl_options, wait_for_previous
from slipstream.runners.cuda.kernels.views import TokenPositions
from slipstream.runners.torch.caches import LayerKv
from slipstream.runners.torch.ops import HeadShape, Rotary


@triton.jit
def _rotated(source, positions, mask, cols, cos_table, sin_table, weight, eps, DIM: tl.constexpr, HALF: tl.constexpr):
    """One head of some tokens, normalised if there is a weight, then rotated. source: [tokens, 1] pointers.

    Waits for the previous kernel before it reads the projection: tables and weights may be read earlier.
    """
    rotates = cols < 2 * HALF
    partners = tl.where(cols < HALF, cols + HALF, tl.where(rotates, cols - HALF, cols))
    angles = positions[:, None] * HALF + tl.where(cols < HALF, cols, cols - HALF)[None, :]
    rotated = mask & rotates[None, :]
    cos = tl.load(cos_table + angles, mask=rotated, other=1.0)
    sin = tl.load(sin_table + angles, mask=rotated, other=0.0)
    if weight is not None:
        inside = cols < DIM
        own = tl.load(weight + cols, mask=inside, other=0.0)[None, :]
        others = tl.load(weight + partners, mask=inside, other=0.0)[None, :]
    wait_for_previous()
    x = tl.load(source + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(source + partners[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        x = x * scale * own
        partner = partner * scale * others
    return x * cos + tl.where(cols < HALF, -partner, partner) * sin


@triton.jit
def _store(x, cache, scales, target, at_scale, mask, written):
    """Some tokens of one head into a cache of floats or, with scales, of codes."""
    if scales is None:
        tl.store(cache + target, x.to(cache.dtype.element_ty), mask=mask)
    else:
        codes, own = encoded(x.to(tl.float32))
        tl.store(cache + target, codes, mask=mask)
        tl.store(scales + at_scale, own, mask=written)


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_store_kernel(
    mixed,
    positions,
    rope_positions,  # None: as positions
    token_slots,
    block_table,
    cos_table,
    sin_table,
    weight_q,
    weight_k,
    q_out,
    k_cache,
    v_cache,
    k_scales,  # None: the caches hold floats
    v_scales,
    num_tokens, stride_mixed, stride_table, stride_block, eps,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for one head (of q, then k, then v) of some tokens."""
    launch_dependents()
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = (cols < DIM)[None, :]
    real = tokens < num_tokens
    position = tl.load(positions + tokens, mask=real, other=-1)
    written = position >= 0
    position = tl.maximum(position, 0)  # padding is rotated too, so that its q is finite
    angle = position
    if rope_positions is not None:
        angle = tl.maximum(tl.load(rope_positions + tokens, mask=real, other=0), 0)
    source = mixed + (tokens.to(tl.int64) * stride_mixed)[:, None] + head * DIM
    if head < NUM_Q:
        mask = real[:, None] & inside
        q = _rotated(source, angle, mask, cols, cos_table, sin_table, weight_q, eps, DIM, HALF)
        target = tokens.to(tl.int64)[:, None] * (NUM_Q * DIM) + head * DIM + cols[None, :]
        tl.store(q_out + target, q.to(q_out.dtype.element_ty), mask=mask)
    else:
        mask = written[:, None] & inside
        slot = tl.load(token_slots + tokens, mask=written, other=0).to(tl.int64)
        block = tl.load(block_table + slot * stride_table + position // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        kv_head = (head - NUM_Q) % NUM_KV
        at_row = block * stride_block + (kv_head * BLOCK_SIZE + position % BLOCK_SIZE) * DIM
        target = at_row[:, None] + cols[None, :]
        at_scale = block * (stride_block // 2) + kv_head * BLOCK_SIZE + position % BLOCK_SIZE  # of two bytes
        if head < NUM_Q + NUM_KV:
            k = _rotated(source, angle, mask, cols, cos_table, sin_table, weight_k, eps, DIM, HALF)
            _store(k, k_cache, k_scales, target, at_scale, mask, written)
        else:
            wait_for_previous()
            v = tl.load(source + cols[None, :], mask=mask, other=0.0)
            _store(v, v_cache, v_scales, target, at_scale, mask, written)


def rope_store(
    mixed: Tensor,  # [tokens, qkv_width or more]: q, k, v; rows may lie apart
    heads: HeadShape,
    rotary: Rotary,
    kv: LayerKv,
    batch: TokenPositions,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """Normalise (if asked) and rotate q and k, write k and v into the cache; returns q [tokens, q width]."""
    num_tokens = mixed.shape[0]
    half, block_size = rotary.cos.shape[1], kv.k.shape[2]
    assert mixed.stride(1) == 1
    assert mixed.shape[1] >= heads.qkv_width
    check_layout(kv, heads)
    assert rotary.cos.stride() == rotary.sin.stride() == (half, 1)
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    q = torch.empty((num_tokens, heads.num_q * heads.dim), dtype=mixed.dtype, device=mixed.device)
    weight_q, weight_k, eps = norms if norms is not None else (None, None, 0.0)
    block = triton.next_power_of_2(heads.dim)
    tokens_each = 1 if num_tokens <= 256 else max(1, 1024 // block)
    _rope_store_kernel[(triton.cdiv(num_tokens, tokens_each), heads.num_q + 2 * heads.num_kv)](
        mixed,
        batch.positions,
        None if batch.rope_positions is batch.positions else batch.rope_positions,
        batch.token_slots,
        batch.block_table,
        rotary.cos,
        rotary.sin,
        weight_q,
        weight_k,
        q,
        kv.k,
        kv.v,
        kv.k_scale,
        kv.v_scale,
        num_tokens,
        mixed.stride(0),
        batch.block_table.stride(0),
        kv.k.stride(0),
        eps,
        NUM_Q=heads.num_q,
        NUM_KV=heads.num_kv,
        DIM=heads.dim,
        HALF=half,
        BLOCK_SIZE=block_size,
        TOKENS=tokens_each,
        BLOCK=block,
        num_warps=min(4, max(1, tokens_each * block // 256)),
        **pdl_options(mixed.device),
    )
    return q
