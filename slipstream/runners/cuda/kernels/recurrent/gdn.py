"""Gated DeltaNet for a ragged batch: causal conv, gated delta rule, replay of committed tokens, gated norm.

The ring holds the raw inputs by position: as in the KV cache, entries beyond the cursor are overwritten before they are
read. Three kernels. The conv runs over every token that the recurrence will see: the fed ones, and from the ring those
that the stored state lacks. In the recurrence a program is one warp that owns some columns of one head's state in one
row, so that all sums over the keys stay inside the warp: it reads the state, replays what it lacks, runs over the
committed tokens, stores the state, and goes on over the drafts. It reads each token's vectors one token ahead: a turn
to L2 takes as long as a token's arithmetic. Where prompts are read, long rows go in chunks instead (gdn_chunks.py). The
norm needs whole heads.

A state lacks the drafts that were accepted last step. To store it takes as long as to read it: so in large steps rows
without drafts store it every few tokens only, each at its own time, and it lacks the tokens since then (decision 25).

States are computed in float32 and may be stored in 16 bits (decision 23). The recurrence then rounds after every token,
a draft's as well: the state after a token does not depend on where a step ended.

A row may keep its state at some positions, for other rows to start from: in the step whose committed tokens or replays
reach the position, the recurrence stores the state into the state slot as well, and the conv the inputs before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.load.spec import GdnSpec
from slipstream.runners.cuda.batch import DeviceBatch
from slipstream.runners.cuda.kernels.pdl import launch_dependents, pdl_options, uses_pdl, wait_for_previous
from slipstream.runners.cuda.kernels.recurrent.gdn_chunks import (
    as_stored,
    is_long,
    key_head,
    next_keep,
    recur_in_chunks,
)
from slipstream.runners.torch.caches import DEFERRED

CONV_HEADS = 2  # of a program
BYTES_OF_WARP = 512  # that a warp loads at once
# Columns of a state that a program of the recurrence owns, and the registers of a thread: they decide how many programs
# share a multiprocessor. The best for any number of rows (log 242).
STATE_COLUMNS, REGISTERS = 32, 255
# In steps padded to so many rows (from 9 on) those without drafts do not store their states each time. Source: log 248.
DEFERRING_ROWS = 16


def max_deferred(num_rows: int) -> int:
    """How many committed tokens a state may lack after a step without drafts. With few rows latency is the bottleneck,
    and a replayed token takes longer than storing."""
    return DEFERRED if num_rows >= DEFERRING_ROWS else 0


@triton.jit
def _kept(rings, position, start, ring_size, ring_width, channel, along, size):
    """A raw input of the row from the ring: zero where it is fed in this step, and before the row's beginning."""
    source = rings + (tl.maximum(position, 0) % ring_size) * ring_width
    mask = along < tl.where((position >= 0) & (position < start), size, 0)
    return tl.load(source + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _fed(row, position, start, mixed_stride, channel, along, size):
    """A raw input of the row that is fed in this step, or zero. row: its first one"""
    source = row + tl.maximum(position - start, 0).to(tl.int64) * mixed_stride
    return tl.load(source + channel, mask=along < tl.where(position >= start, size, 0), other=0.0).to(tl.float32)


@triton.jit
def _two(source, value, num_v_heads, wanted):
    """b and a of some value heads; zeros if they are not wanted."""
    mask = (value >= 0) & (value < tl.where(wanted, num_v_heads, 0))
    b = tl.load(source + value, mask=mask, other=0.0).to(tl.float32)
    return b, tl.load(source + num_v_heads + value, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _log_decay(a, scale, bias):
    """scale * softplus(a + bias)"""
    rate = a + bias
    return scale * tl.where(rate > 20.0, rate, tl.log(1.0 + tl.exp(tl.minimum(rate, 20.0))))


@triton.jit
def _keep_input(rings, position, x, ring_size, ring_width, channel, inside):
    """Store a raw input into a ring."""
    tl.store(rings + (position % ring_size) * ring_width + channel, x.to(rings.dtype.element_ty), mask=inside)


@triton.jit
def _conv(
    mixed, ring, conv, decay_scale, dt_bias, convolved, gates,
    positions, token_rows, row_slots, row_offsets, row_starts, row_committed, row_replay, keep_positions, keep_states,
    num_tokens, mixed_stride, ring_size, num_k_heads, num_v_heads, k_dim, v_dim, scale,
    DEPTH: tl.constexpr, H: tl.constexpr, D: tl.constexpr, STORE_RING: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Conv, SiLU, unit q and k, gates, for H heads of one token. Fed tokens come first, then each row's replays."""
    launch_dependents()
    entry = tl.program_id(0)
    if entry < num_tokens:
        position = tl.load(positions + entry)
        row = tl.load(token_rows + entry)
    else:
        row = (entry - num_tokens) // DEPTH
        i = (entry - num_tokens) % DEPTH
        count = tl.load(row_replay + row)
        position = tl.where(i < count, tl.load(row_starts + row) - count + i, -1)
    if not uses_pdl():  # noqa: SIM102 (decided when it is compiled)
        if position < 0:
            return
    start = tl.load(row_starts + row)
    offset = tl.load(row_offsets + row)
    key_width = num_k_heads * k_dim
    channels = 2 * key_width + num_v_heads * v_dim
    ring_width = channels + 2 * num_v_heads
    rings = ring + tl.load(row_slots + row).to(tl.int64) * ring_size * ring_width
    if KEEPS > 0:
        end = tl.minimum(position + 1, start + tl.load(row_committed + row))
        keep_at, kept = next_keep(keep_positions, keep_states, row, position, end, KEEPS)
        kept = tl.where(keep_at == position + 1, kept.to(tl.int32), -1)
    head = (tl.program_id(1) * H + tl.arange(0, H))[:, None]
    value = head - 2 * num_k_heads
    size = tl.where(value >= 0, v_dim, k_dim)
    size = tl.where((value < num_v_heads) & (position >= 0), size, 0)
    along = tl.arange(0, D)[None, :]
    channel = tl.where(value >= 0, 2 * key_width + value * v_dim, head * k_dim) + along
    inside = along < size
    # The four inputs up to this token, the newest last.
    w3 = tl.load(conv + channel, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(conv + channels + channel, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(conv + 2 * channels + channel, mask=inside, other=0.0).to(tl.float32)
    w0 = tl.load(conv + 3 * channels + channel, mask=inside, other=0.0).to(tl.float32)
    x3 = _kept(rings, position - 3, start, ring_size, ring_width, channel, along, size)
    x2 = _kept(rings, position - 2, start, ring_size, ring_width, channel, along, size)
    x1 = _kept(rings, position - 1, start, ring_size, ring_width, channel, along, size)
    x0 = _kept(rings, position, start, ring_size, ring_width, channel, along, size)
    at_ring = rings + (tl.maximum(position, 0) % ring_size) * ring_width
    gate = tl.program_id(1) * H + tl.arange(0, H) - 2 * num_k_heads  # value heads
    is_gate = (gate >= 0) & (gate < num_v_heads)
    is_fed = entry < num_tokens
    kept_b, kept_a = _two(at_ring + channels, gate, num_v_heads, (entry >= num_tokens) & (position >= 0))
    rate = tl.load(decay_scale + gate, mask=is_gate, other=0.0)
    bias = tl.load(dt_bias + gate, mask=is_gate, other=0.0)
    wait_for_previous()
    if position < 0:
        return
    fed = mixed + offset.to(tl.int64) * mixed_stride
    x3 += _fed(fed, position - 3, start, mixed_stride, channel, along, size)
    x2 += _fed(fed, position - 2, start, mixed_stride, channel, along, size)
    x1 += _fed(fed, position - 1, start, mixed_stride, channel, along, size)
    x0 += _fed(fed, position, start, mixed_stride, channel, along, size)
    token = mixed + entry.to(tl.int64) * mixed_stride + channels + num_v_heads * v_dim
    fed_b, fed_a = _two(token, gate, num_v_heads, is_fed)
    y = x3 * w3 + x2 * w2 + x1 * w1 + x0 * w0
    y = y * tl.sigmoid(y)
    unit = tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)[:, None]
    unit = tl.where(head < num_k_heads, unit * scale, unit)
    y = tl.where(value >= 0, y, y * unit)
    tl.store(convolved + entry.to(tl.int64) * channels + channel, y, mask=inside)
    at_gates = gates + entry.to(tl.int64) * (2 * num_v_heads) + gate
    tl.store(at_gates, _log_decay(kept_a + fed_a, rate, bias), mask=is_gate)
    tl.store(at_gates + num_v_heads, tl.sigmoid(kept_b + fed_b), mask=is_gate)
    if STORE_RING and is_fed:
        tl.store(at_ring + channel, x0.to(ring.dtype.element_ty), mask=inside)
        tl.store(at_ring + channels + gate, fed_b.to(ring.dtype.element_ty), mask=is_gate)
        tl.store(at_ring + channels + num_v_heads + gate, fed_a.to(ring.dtype.element_ty), mask=is_gate)
    if KEEPS > 0:  # noqa: SIM102 (decided when it is compiled)
        if kept >= 0:  # nothing will be replayed from there, so b and a are not needed
            kept_rings = ring + kept.to(tl.int64) * ring_size * ring_width
            _keep_input(kept_rings, position, x0, ring_size, ring_width, channel, inside)
            _keep_input(kept_rings, position - 1, x1, ring_size, ring_width, channel, inside)
            _keep_input(kept_rings, position - 2, x2, ring_size, ring_width, channel, inside)


@triton.jit
def _token(source, gates, entry, channels, at_k, at_q, in_k, at_v, in_v, head, num_v_heads):
    """What the recurrence reads of a token: k, q, v, log decay, beta."""
    token = source + entry * channels
    at_gates = gates + entry * (2 * num_v_heads) + head
    k = tl.load(token + at_k, mask=in_k, other=0.0)
    q = tl.load(token + at_q, mask=in_k, other=0.0)
    v = tl.load(token + at_v, mask=in_v, other=0.0)
    return k, q, v, tl.load(at_gates), tl.load(at_gates + num_v_heads)


@triton.jit
def _recur(
    convolved, gates, out, state,
    row_slots, row_offsets, row_starts, row_fed, row_committed, row_replay, row_stores, keep_positions, keep_states,
    num_tokens, num_k_heads, num_v_heads, k_dim: tl.constexpr, v_dim: tl.constexpr,
    DEPTH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr, SKIP_LONG: tl.constexpr,
    KEEPS: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """LANES rows of a tile are what a warp loads at once, so [LANES, V] lies in threads as the sums over the keys do
    before the last shuffles: v joins them, and y leaves, without a turn through shared memory."""
    launch_dependents()
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    fed = tl.load(row_fed + row)
    if not uses_pdl():  # noqa: SIM102 (decided when it is compiled)
        if fed == 0:
            return
    slot = tl.load(row_slots + row).to(tl.int64)
    offset = tl.load(row_offsets + row)
    committed = tl.load(row_committed + row)
    replay = tl.load(row_replay + row)
    base = tl.load(row_starts + row) - replay  # tokens that the state stands for
    total = replay + fed
    num_committed = replay + committed
    stored_at = tl.where(tl.load(row_stores + row) != 0, num_committed, 0)
    if KEEPS > 0:
        keep_at, kept = next_keep(keep_positions, keep_states, row, base, base + num_committed, KEEPS)

    key_width = num_k_heads * k_dim
    channels = 2 * key_width + num_v_heads * v_dim
    along_k = tl.arange(0, K)
    along_v = block * V + tl.arange(0, V)
    in_k = along_k < k_dim
    in_v = along_v < v_dim
    if v_dim % V == 0:  # the compiler then sees that no mask is needed
        in_v = tl.arange(0, V) < V
    at_q = key_head(head, num_k_heads, num_v_heads, TILED) * k_dim + along_k
    first = tl.arange(0, LANES)[:, None] == 0
    at_v = tl.zeros([LANES, 1], tl.int32) + (head * v_dim + along_v)[None, :]
    in_v_once = first & in_v[None, :]
    at_state = state + (slot * num_v_heads + head) * (k_dim * v_dim)
    at_state += along_k.to(tl.int64)[:, None] * v_dim + along_v.to(tl.int64)[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    has_state = tl.zeros([1, V], tl.int32) + base > 0  # at the beginning another stream's may still lie there
    memory = tl.load(at_state, mask=in_tile & has_state, other=0.0).to(tl.float32)
    wait_for_previous()
    if fed == 0:
        return
    if SKIP_LONG and is_long(fed, committed):
        return

    entry = tl.where(replay > 0, num_tokens + row * DEPTH, offset).to(tl.int64)
    k, q, v, fade, beta = _token(
        convolved, gates, entry, channels, key_width + at_q, at_q, in_k, 2 * key_width + at_v, in_v_once,
        head, num_v_heads,
    )  # fmt: skip
    for i in range(total):
        # The next token is read while this one is computed.
        j = tl.minimum(i + 1, total - 1)
        next_entry = tl.where(j < replay, num_tokens + row * DEPTH + j, offset + j - replay).to(tl.int64)
        next_k, next_q, next_v, next_fade, next_beta = _token(
            convolved, gates, next_entry, channels, key_width + at_q, at_q, in_k, 2 * key_width + at_v, in_v_once,
            head, num_v_heads,
        )  # fmt: skip
        # One step of the gated delta rule.
        memory = memory * tl.exp(fade)
        recalled = tl.sum(tl.reshape(memory * k[:, None], [K // LANES, LANES, V]), axis=0)
        delta = tl.sum(v - recalled, axis=0) * beta
        memory = memory + k[:, None] * delta[None, :]
        if i >= replay:
            y = tl.sum(memory * q[:, None], axis=0)
            at_out = out + entry * (num_v_heads * v_dim) + at_v
            tl.store(at_out, tl.broadcast_to(y[None, :], LANES, V).to(out.dtype.element_ty), mask=in_v_once)
        memory = as_stored(memory, state)
        if i + 1 == stored_at:
            tl.store(at_state, memory.to(state.dtype.element_ty), mask=in_tile)
        if KEEPS > 0:  # noqa: SIM102 (decided when it is compiled)
            if base + i + 1 == keep_at:
                at_kept = at_state + (kept - slot) * (num_v_heads * k_dim * v_dim)
                tl.store(at_kept, memory.to(state.dtype.element_ty), mask=in_tile)
                keep_at, kept = next_keep(keep_positions, keep_states, row, keep_at, base + num_committed, KEEPS)
        entry, k, q, v, fade, beta = next_entry, next_k, next_q, next_v, next_fade, next_beta


@triton.jit
def _gated_norm(
    y, mixed, out, norm, positions, first_z, mixed_stride, num_heads, v_dim, eps, V: tl.constexpr, H: tl.constexpr
):
    """RMSNorm of each head, times silu(z). Zeros for padding: it has no value."""
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    along = tl.arange(0, V)
    at_head = head[:, None] * v_dim + along[None, :]
    inside = (head[:, None] < num_heads) & (along[None, :] < v_dim)
    counts = (along[None, :] < tl.where(tl.load(positions + token) >= 0, v_dim, 0)) & (head[:, None] < num_heads)
    weight = tl.load(norm + along, mask=along < v_dim, other=0.0)
    wait_for_previous()
    values = tl.load(y + token * (num_heads * v_dim) + at_head, mask=counts, other=0.0).to(tl.float32)
    z = tl.load(mixed + token * mixed_stride + first_z + at_head, mask=inside, other=0.0).to(tl.float32)
    size = tl.rsqrt(tl.sum(values * values, axis=1) / v_dim + eps)
    gated = values * size[:, None] * weight[None, :] * z * tl.sigmoid(z)
    tl.store(out + token * (num_heads * v_dim) + at_head, gated.to(out.dtype.element_ty), mask=inside)


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
        at_ring = ring + (slot.to(tl.int64) * ring_size + (start + j) % ring_size) * width
        tl.store(at_ring + column, raw.to(ring.dtype.element_ty), mask=column < width)


def gdn_mix(
    mixed: Tensor,  # [tokens, conv channels + v heads * v dim + 2 * v heads]: q, k, v, z, b, a
    conv: Tensor,  # [4, conv channels]
    decay_scale: Tensor,  # float32 [v heads]
    dt_bias: Tensor,  # float32 [v heads]
    norm: Tensor,  # float32 [v dim]
    eps: float,
    gdn: GdnSpec,
    state: Tensor,  # [slots and state slots, v heads, k dim, v dim]
    ring: Tensor,  # [slots and state slots, ring size, conv channels + 2 * v heads]
    batch: DeviceBatch,
) -> Tensor:
    """The normed and gated output [tokens, v heads * v dim]; stores the states of rows that are to, up to their last
    committed token, and keeps those that the batch names."""
    assert ring.dtype == mixed.dtype
    num_tokens, num_rows, device = mixed.shape[0], batch.num_rows, mixed.device
    pdl = pdl_options(device)
    depth = max(1, batch.max_replay)
    entries = num_tokens + num_rows * depth
    convolved = torch.empty(entries, gdn.conv_channels, device=device, dtype=torch.float32)
    gates = torch.empty(entries, 2, gdn.num_v_heads, device=device, dtype=torch.float32)
    wide_k, wide_v = triton.next_power_of_2(gdn.k_dim), triton.next_power_of_2(gdn.v_dim)
    heads = (gdn.num_k_heads, gdn.num_v_heads, gdn.k_dim, gdn.v_dim)
    rows = (batch.row_slots, batch.row_offsets, batch.row_starts)
    keeps = (batch.keep_positions, batch.keep_states)
    _conv[(entries, triton.cdiv(2 * gdn.num_k_heads + gdn.num_v_heads, CONV_HEADS))](
        mixed, ring, conv, decay_scale, dt_bias, convolved, gates,
        batch.positions, batch.token_rows, *rows, batch.row_committed, batch.row_replay, *keeps,
        num_tokens, mixed.stride(0), ring.shape[1], *heads, gdn.k_dim**-0.5,
        DEPTH=depth, H=CONV_HEADS, D=max(wide_k, wide_v), STORE_RING=not batch.has_prompts, KEEPS=batch.max_keeps,
        num_warps=1, **pdl,
    )  # fmt: skip
    y = torch.empty(num_tokens, gdn.num_v_heads * gdn.v_dim, device=device, dtype=mixed.dtype)
    columns = min(STATE_COLUMNS, wide_v)
    lanes = min(BYTES_OF_WARP // (columns * state.element_size()), wide_k)
    _recur[(triton.cdiv(gdn.v_dim, columns), gdn.num_v_heads, num_rows)](
        convolved, gates, y, state,
        *rows, batch.row_fed, batch.row_committed, batch.row_replay, batch.row_stores, *keeps,
        num_tokens, *heads, DEPTH=depth, K=wide_k, V=columns, LANES=lanes,
        SKIP_LONG=batch.has_prompts, KEEPS=batch.max_keeps, TILED=gdn.tiled, num_warps=1, maxnreg=REGISTERS, **pdl,
    )  # fmt: skip
    if batch.has_prompts:
        recur_in_chunks(convolved, gates, y, state, gdn, batch, depth)
        width = ring.shape[2]
        _store_ring[(triton.cdiv(width, 1024), num_rows)](
            mixed, ring, *rows, batch.row_fed,
            mixed.stride(0), ring.shape[1], gdn.conv_channels, gdn.num_v_heads * gdn.v_dim, 2 * gdn.num_v_heads,
            KEEP=ring.shape[1], BLOCK=1024, num_warps=4,
        )  # fmt: skip
    out = torch.empty_like(y)
    together = 8
    _gated_norm[(num_tokens, triton.cdiv(gdn.num_v_heads, together))](
        y, mixed, out, norm, batch.positions, gdn.conv_channels, mixed.stride(0), gdn.num_v_heads, gdn.v_dim, eps,
        V=wide_v, H=together, num_warps=4, **pdl,
    )  # fmt: skip
    return out
