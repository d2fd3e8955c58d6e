"""Gated DeltaNet for a ragged batch in one kernel: conv, gated delta rule, replay of accepted drafts, gated norm.

A program owns one head of one row. It reads the committed state, replays the drafts that the last step accepted from
the ring, runs over the row's certain tokens, stores the state once, and goes on over the drafts. The ring holds the raw
inputs by position: like the KV cache, what was written beyond the cursor is overwritten before it is read.
State is kept as [v dim, k dim], so that sums over k stay inside a warp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.load.spec import GdnSpec
from slipstream.runners.torch.cuda.batch import DeviceBatch


@triton.jit
def _taps(x0, x1, x2, x3, conv, channel, channels, inside):
    """One token of the causal conv over four, and its SiLU."""
    y = x3 * tl.load(conv + channel, mask=inside, other=0.0).to(tl.float32)
    y += x2 * tl.load(conv + channels + channel, mask=inside, other=0.0).to(tl.float32)
    y += x1 * tl.load(conv + 2 * channels + channel, mask=inside, other=0.0).to(tl.float32)
    y += x0 * tl.load(conv + 3 * channels + channel, mask=inside, other=0.0).to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def _before(ring, slot, position, channel, inside, size, width):
    """A raw input that lies on the ring; zero before the row's beginning."""
    base = ring + (slot.to(tl.int64) * size + position % size) * width
    return tl.load(base + channel, mask=inside & (position >= 0), other=0.0).to(tl.float32)


@triton.jit
def _recall(state, q, k, v, decay, beta):
    """One step of the gated delta rule. state [V, K], q and k [K], v [V]."""
    state = state * decay
    recalled = tl.sum(state * k[None, :], axis=1)
    delta = (v - recalled) * beta
    state = state + delta[:, None] * k[None, :]
    return state, tl.sum(state * q[None, :], axis=1)


@triton.jit
def _gdn(
    mixed,
    out,
    state,
    ring,
    conv,
    decay_scale,
    dt_bias,
    norm,
    row_slots,
    row_offsets,
    row_starts,
    row_fed,
    row_certain,
    row_replay,
    mixed_stride,
    ring_size,
    num_k_heads,
    num_v_heads,
    k_dim,
    v_dim,
    scale,
    eps,
    K: tl.constexpr,
    V: tl.constexpr,
    STORE_RING: tl.constexpr,
):
    row = tl.program_id(1)
    head = tl.program_id(0)
    fed = tl.load(row_fed + row)
    if fed == 0:
        return
    slot = tl.load(row_slots + row)
    start = tl.load(row_starts + row)
    offset = tl.load(row_offsets + row)
    certain = tl.load(row_certain + row)
    replay = tl.load(row_replay + row)

    key_width = num_k_heads * k_dim
    channels = 2 * key_width + num_v_heads * v_dim
    ring_width = channels + 2 * num_v_heads
    group = num_v_heads // num_k_heads
    along_k = tl.arange(0, K)
    along_v = tl.arange(0, V)
    in_k = along_k < k_dim
    in_v = along_v < v_dim
    at_q = (head // group) * k_dim + along_k
    at_k = key_width + at_q
    at_v = 2 * key_width + head * v_dim + along_v
    at_z = channels + head * v_dim + along_v
    at_b = channels + num_v_heads * v_dim + head
    at_a = at_b + num_v_heads

    tile = along_v[:, None] * k_dim + along_k[None, :]
    in_tile = in_v[:, None] & in_k[None, :]
    at_state = state + (slot.to(tl.int64) * num_v_heads + head) * (v_dim * k_dim) + tile
    first = start - replay
    memory = tl.load(at_state, mask=in_tile & (first > 0), other=0.0)

    q1 = _before(ring, slot, first - 1, at_q, in_k, ring_size, ring_width)
    q2 = _before(ring, slot, first - 2, at_q, in_k, ring_size, ring_width)
    q3 = _before(ring, slot, first - 3, at_q, in_k, ring_size, ring_width)
    k1 = _before(ring, slot, first - 1, at_k, in_k, ring_size, ring_width)
    k2 = _before(ring, slot, first - 2, at_k, in_k, ring_size, ring_width)
    k3 = _before(ring, slot, first - 3, at_k, in_k, ring_size, ring_width)
    v1 = _before(ring, slot, first - 1, at_v, in_v, ring_size, ring_width)
    v2 = _before(ring, slot, first - 2, at_v, in_v, ring_size, ring_width)
    v3 = _before(ring, slot, first - 3, at_v, in_v, ring_size, ring_width)

    a_scale = tl.load(decay_scale + head)
    a_bias = tl.load(dt_bias + head)
    norm_weight = tl.load(norm + along_v, mask=in_v, other=0.0)

    total = replay + fed
    keep = replay + certain
    for i in range(total):
        if i == keep:
            tl.store(at_state, memory, mask=in_tile)
        position = first + i
        taped = i < replay
        from_ring = ring + (slot.to(tl.int64) * ring_size + position % ring_size) * ring_width
        from_mixed = mixed + (offset + i - replay).to(tl.int64) * mixed_stride
        if taped:
            q0 = tl.load(from_ring + at_q, mask=in_k, other=0.0).to(tl.float32)
            k0 = tl.load(from_ring + at_k, mask=in_k, other=0.0).to(tl.float32)
            v0 = tl.load(from_ring + at_v, mask=in_v, other=0.0).to(tl.float32)
            b = tl.load(from_ring + channels + head).to(tl.float32)
            a = tl.load(from_ring + channels + num_v_heads + head).to(tl.float32)
        else:
            q0 = tl.load(from_mixed + at_q, mask=in_k, other=0.0).to(tl.float32)
            k0 = tl.load(from_mixed + at_k, mask=in_k, other=0.0).to(tl.float32)
            v0 = tl.load(from_mixed + at_v, mask=in_v, other=0.0).to(tl.float32)
            b = tl.load(from_mixed + at_b).to(tl.float32)
            a = tl.load(from_mixed + at_a).to(tl.float32)
        q = _taps(q0, q1, q2, q3, conv, at_q, channels, in_k)
        k = _taps(k0, k1, k2, k3, conv, at_k, channels, in_k)
        v = _taps(v0, v1, v2, v3, conv, at_v, channels, in_v)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        rate = a + a_bias
        rate = tl.where(rate > 20.0, rate, tl.log(1.0 + tl.exp(tl.minimum(rate, 20.0))))
        memory, y = _recall(memory, q, k, v, tl.exp(a_scale * rate), tl.sigmoid(b))
        if not taped:
            y = y * (tl.rsqrt(tl.sum(y * y, axis=0) / v_dim + eps)) * norm_weight
            z = tl.load(from_mixed + at_z, mask=in_v, other=0.0).to(tl.float32)
            y = y * z * tl.sigmoid(z)
            at_out = out + (offset + i - replay).to(tl.int64) * (num_v_heads * v_dim) + head * v_dim + along_v
            tl.store(at_out, y.to(out.dtype.element_ty), mask=in_v)
            if STORE_RING:
                to_ring = from_ring
                if head % group == 0:
                    tl.store(to_ring + at_q, q0.to(ring.dtype.element_ty), mask=in_k)
                    tl.store(to_ring + at_k, k0.to(ring.dtype.element_ty), mask=in_k)
                tl.store(to_ring + at_v, v0.to(ring.dtype.element_ty), mask=in_v)
                tl.store(to_ring + channels + head, b.to(ring.dtype.element_ty))
                tl.store(to_ring + channels + num_v_heads + head, a.to(ring.dtype.element_ty))
        q3, q2, q1 = q2, q1, q0
        k3, k2, k1 = k2, k1, k0
        v3, v2, v1 = v2, v1, v0
    if keep == total:
        tl.store(at_state, memory, mask=in_tile)


@triton.jit
def _store_ring(
    mixed,
    ring,
    row_slots,
    row_offsets,
    row_starts,
    row_fed,
    mixed_stride,
    ring_size,
    channels,
    value_width,
    gates,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last KEEP raw inputs of a row, where rows may be longer than the ring."""
    row = tl.program_id(1)
    fed = tl.load(row_fed + row)
    slot = tl.load(row_slots + row)
    start = tl.load(row_starts + row)
    offset = tl.load(row_offsets + row)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    width = channels + gates
    source = tl.where(column < channels, column, column + value_width)
    for j in range(tl.maximum(0, fed - KEEP), fed):
        raw = tl.load(mixed + (offset + j).to(tl.int64) * mixed_stride + source, mask=column < width, other=0.0)
        place = ring + (slot.to(tl.int64) * ring_size + (start + j) % ring_size) * width
        tl.store(place + column, raw.to(ring.dtype.element_ty), mask=column < width)


def gdn_mix(
    mixed: Tensor,  # [tokens, conv channels + v heads * v dim + 2 * v heads]: q, k, v, z, b, a
    conv: Tensor,  # [4, conv channels]
    decay_scale: Tensor,  # float32 [v heads]
    dt_bias: Tensor,  # float32 [v heads]
    norm: Tensor,  # float32 [v dim]
    eps: float,
    gdn: GdnSpec,
    state: Tensor,  # float32 [slots, v heads, v dim, k dim]
    ring: Tensor,  # [slots, ring size, conv channels + 2 * v heads]
    batch: DeviceBatch,
) -> Tensor:
    """The normed and gated output [tokens, v heads * v dim]; commits each row's state up to its last certain token."""
    out = torch.empty(mixed.shape[0], gdn.num_v_heads * gdn.v_dim, device=mixed.device, dtype=mixed.dtype)
    rows = (batch.row_slots, batch.row_offsets, batch.row_starts, batch.row_fed)
    _gdn[(gdn.num_v_heads, batch.num_rows)](
        mixed,
        out,
        state,
        ring,
        conv,
        decay_scale,
        dt_bias,
        norm,
        *rows,
        batch.row_certain,
        batch.row_replay,
        mixed.stride(0),
        ring.shape[1],
        gdn.num_k_heads,
        gdn.num_v_heads,
        gdn.k_dim,
        gdn.v_dim,
        gdn.k_dim**-0.5,
        eps,
        K=triton.next_power_of_2(gdn.k_dim),
        V=triton.next_power_of_2(gdn.v_dim),
        STORE_RING=not batch.has_prompts,
        num_warps=8,
    )
    if batch.has_prompts:
        width = ring.shape[2]
        _store_ring[(triton.cdiv(width, 1024), batch.num_rows)](
            mixed,
            ring,
            *rows,
            mixed.stride(0),
            ring.shape[1],
            gdn.conv_channels,
            gdn.num_v_heads * gdn.v_dim,
            2 * gdn.num_v_heads,
            KEEP=ring.shape[1],
            BLOCK=1024,
            num_warps=4,
        )
    return out
