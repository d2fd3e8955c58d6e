"""The gated delta rule over long rows, CHUNK tokens at a time, as matrix products.

With G the cumulative log decay inside a chunk and S the state before it:
    (I + A) delta = beta (v - e^G k S), where A[t, s < t] = beta_t e^(G_t - G_s) k_t.k_s
    out = e^G q S + M delta, where M[t, s <= t] = e^(G_t - G_s) q_t.k_s
    S' = e^G_last S + k^T (e^(G_last - G) delta)
All terms without S are computed for all chunks at once (`_within`); then a program takes some columns of a head's state
through the chunks of its row (`_across`), the products transposed: each of its warps has 16 columns as rows, and the
threads that have a product's result have it as the next one's left factor. Only k, q, A and M come by shared memory.
Float32 factors are split into two bfloat16, so that tensor cores multiply them and the state keeps 16 bits of each.

A state that is stored in 16 bits is rounded after each chunk, kept or not: a row that starts from it goes on as the one
that kept it.

Chunks end at multiples of CHUNK of the position, wherever a step begins: there a state may be kept for other rows. The
first chunk of a row then begins with places before the row, as its last one may end with places after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.load.spec import GdnSpec
from slipstream.runners.cuda.batch import DeviceBatch
from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.product import split, split_product

CHUNK = tl.constexpr(32)  # with 64, Triton 3.6 on a Hopper GPU reads beyond its shared memory (log 33)
LEVELS = tl.constexpr(5)  # CHUNK = 2 ** LEVELS
LONG = tl.constexpr(32)  # a row that feeds more committed tokens goes in chunks
ROWS = tl.constexpr(128)  # looked at together
NEVER = tl.constexpr(1 << 30)  # no row is so long
LARGEST = tl.constexpr(65504.0)  # of float16
# Two numbers in one instruction; of a conversion and back the compiler makes one for each.
_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 two;
    cvt.rn.bf16x2.f32 two, $3, $2;
    shl.b32 $0, two, 16;
    and.b32 $1, two, 0xffff0000;
}""")
COLUMNS = 64  # of a state, per program, 16 for each of its warps: as many rows of products as Hopper multiplies at once


@triton.jit
def is_long(fed, committed):
    """Whether a row goes in chunks. One with drafts does not: its state is committed before its end."""
    return (committed > LONG) & (committed == fed)


@triton.jit
def key_head(head, num_k_heads, num_v_heads, TILED: tl.constexpr):
    """The key head of a value head: GdnSpec.tiled."""
    return head % num_k_heads if TILED else head // (num_v_heads // num_k_heads)


@triton.jit
def is_first_of_key(head, num_k_heads, num_v_heads, TILED: tl.constexpr):
    """Whether a value head is the first one of its key head."""
    return head < num_k_heads if TILED else head % (num_v_heads // num_k_heads) == 0


@triton.jit
def next_keep(keep_positions, keep_states, row, after, end, KEEPS: tl.constexpr):
    """The row's first position after one, up to an end, at which its state is kept, and the state slot; -1: none."""
    at = row * KEEPS + tl.arange(0, KEEPS)
    positions = tl.load(keep_positions + at)
    positions = tl.where((positions > after) & (positions <= end), positions, NEVER)
    first = tl.min(positions, axis=0)
    state = tl.max(tl.where(positions == first, tl.load(keep_states + at), 0), axis=0)
    return tl.where(first == NEVER, -1, first), state.to(tl.int64)


@triton.jit
def as_stored(memory, state):
    """A state as it will be read again, still in float32. state: pointer to stored ones

    Float16 ends at 65504: larger numbers become that, not infinite.
    """
    dtype: tl.constexpr = state.dtype.element_ty
    if dtype == tl.float16:
        memory = tl.clamp(memory, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.bfloat16:
        rounded = tl.inline_asm_elementwise(_TO_BFLOAT16, "=r,=r,r,r", [memory], dtype=tl.float32, is_pure=True, pack=2)
    else:
        rounded = memory.to(dtype).to(tl.float32)
    return rounded


@triton.jit
def _num_chunks(row_starts, row_fed, row_committed, row_replay, row, num_rows):
    """How many chunks each of these rows has."""
    real = row < num_rows
    start = tl.load(row_starts + row, mask=real, other=0)
    fed = tl.load(row_fed + row, mask=real, other=0)
    committed = tl.load(row_committed + row, mask=real, other=0)
    replay = tl.load(row_replay + row, mask=real, other=0)
    num_places = (start - replay) % CHUNK + replay + fed
    return tl.where(is_long(fed, committed), (num_places + CHUNK - 1) // CHUNK, 0)


@triton.jit
def _find(row_starts, row_fed, row_committed, row_replay, num_rows, chunk):
    """The row a chunk belongs to, that row's first chunk, and the number of chunks of all rows."""
    row = 0
    first = 0
    total = 0
    for base in range(0, num_rows, ROWS):
        rows = base + tl.arange(0, ROWS)
        counts = _num_chunks(row_starts, row_fed, row_committed, row_replay, rows, num_rows)
        ends = total + tl.cumsum(counts, axis=0)
        row += tl.sum((ends <= chunk).to(tl.int32), axis=0)
        first = tl.maximum(first, tl.max(tl.where(ends <= chunk, ends, 0), axis=0))
        total += tl.sum(counts, axis=0)
    return row, first, total


@triton.jit
def _first_chunk(row_starts, row_fed, row_committed, row_replay, row):
    first = 0
    for base in range(0, row, ROWS):
        rows = base + tl.arange(0, ROWS)
        first += tl.sum(_num_chunks(row_starts, row_fed, row_committed, row_replay, rows, row), axis=0)
    return first


@triton.jit
def _entry(i, row, offset, replay, num_tokens, DEPTH: tl.constexpr):
    """Index of the row's i-th token among the conv's outputs: replays follow all fed tokens."""
    return tl.where(i < replay, num_tokens + row * DEPTH + i, offset + i - replay).to(tl.int64)


@triton.jit
def _values(values, i, length, row, offset, replay, num_tokens, channels, in_v, DEPTH: tl.constexpr):
    """Of the row's i-th tokens; zeros outside the row. [CHUNK, V]"""
    entry = _entry(i, row, offset, replay, num_tokens, DEPTH)
    inside = (i >= 0) & (i < length)
    return tl.load(values + entry[:, None] * channels, mask=inside[:, None] & in_v[None, :], other=0.0)


@triton.jit
def _inverse(lower, t, s):
    """(I + lower)^-1: of blocks of 2, then from two blocks' inverses that of the block they make up."""
    inverse = tl.where(t == s, 1.0, 0.0) - tl.where((t >> 1) == (s >> 1), lower, 0.0)
    for level in range(1, LEVELS):
        corner = ((t >> level) != (s >> level)) & ((t >> (level + 1)) == (s >> (level + 1)))
        high, low = split(inverse)
        corner_high, corner_low = split(tl.where(corner, lower, 0.0))
        zero = tl.zeros([CHUNK, CHUNK], tl.float32)
        left_high, left_low = split(split_product(high, low, corner_high, corner_low, zero))
        inverse -= split_product(left_high, left_low, high, low, zero)
    return inverse


@triton.jit(do_not_specialize=["num_rows"])
def _within(
    convolved, gates, keys, squares, fades,
    row_offsets, row_starts, row_fed, row_committed, row_replay,
    num_rows, num_tokens, num_k_heads, num_v_heads, k_dim, v_dim,
    DEPTH: tl.constexpr, K: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """One head of one chunk: k and q split, (I + A)^-1 beta, M and G."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    row, first, total = _find(row_starts, row_fed, row_committed, row_replay, num_rows, chunk)
    if chunk >= total:
        return
    replay = tl.load(row_replay + row)
    before = (tl.load(row_starts + row) - replay) % CHUNK
    place = (chunk - first) * CHUNK + tl.arange(0, CHUNK)
    inside = (place >= before) & (place < before + replay + tl.load(row_fed + row))
    i = place - before
    entry = _entry(i, row, tl.load(row_offsets + row), replay, num_tokens, DEPTH)

    # Outside the row nothing decays and nothing is learned.
    at_gates = gates + entry * (2 * num_v_heads) + head
    fade = tl.cumsum(tl.load(at_gates, mask=inside, other=0.0), axis=0)
    beta = tl.load(at_gates + num_v_heads, mask=inside, other=0.0)
    key = key_head(head, num_k_heads, num_v_heads, TILED)
    along = tl.arange(0, K)
    in_tile = inside[:, None] & (along < k_dim)[None, :]
    channels = 2 * num_k_heads * k_dim + num_v_heads * v_dim
    at_q = convolved + entry[:, None] * channels + key * k_dim + along[None, :]
    k, k_low = split(tl.load(at_q + num_k_heads * k_dim, mask=in_tile, other=0.0))
    wide = chunk.to(tl.int64)
    token = tl.arange(0, CHUNK)
    tl.store(fades + (wide * num_v_heads + head) * CHUNK + token, fade)
    at_keys = keys + (wide * num_k_heads + key) * (4 * CHUNK * K)
    at_keys += token[:, None] * K + along[None, :]
    is_first = is_first_of_key(head, num_k_heads, num_v_heads, TILED)  # stores for all heads that share the key
    if is_first:
        tl.store(at_keys, k)
        tl.store(at_keys + CHUNK * K, k_low)
    t = token[:, None]
    s = token[None, :]
    between = tl.exp(tl.where(t >= s, fade[:, None] - fade[None, :], 0.0))
    zero = tl.zeros([CHUNK, CHUNK], tl.float32)
    alike = split_product(k, k_low, tl.trans(k), tl.trans(k_low), zero)

    q, q_low = split(tl.load(at_q, mask=in_tile, other=0.0))
    if is_first:
        tl.store(at_keys + 2 * CHUNK * K, q)
        tl.store(at_keys + 3 * CHUNK * K, q_low)
    asked = split_product(q, q_low, tl.trans(k), tl.trans(k_low), zero)
    at_squares = squares + (wide * num_v_heads + head) * (4 * CHUNK * CHUNK) + t * CHUNK + s
    high, low = split(tl.where(t >= s, between * asked, 0.0))
    tl.store(at_squares + 2 * CHUNK * CHUNK, high)
    tl.store(at_squares + 3 * CHUNK * CHUNK, low)

    inverse = _inverse(tl.where(t > s, beta[:, None] * between * alike, 0.0), t, s)
    high, low = split(inverse * beta[None, :])
    tl.store(at_squares, high)
    tl.store(at_squares + CHUNK * CHUNK, low)


@triton.jit
def _across(
    convolved, keys, squares, fades, out, state,
    row_slots, row_offsets, row_starts, row_fed, row_committed, row_replay, keep_positions, keep_states,
    num_tokens, num_k_heads, num_v_heads, k_dim: tl.constexpr, v_dim: tl.constexpr,
    DEPTH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEEPS: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """V columns of one head's state, through all chunks of one row. KEEPS: of a row; 0: none in any step"""
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    fed = tl.load(row_fed + row)
    if not is_long(fed, tl.load(row_committed + row)):
        return
    offset = tl.load(row_offsets + row)
    replay = tl.load(row_replay + row)
    length = replay + fed
    base = tl.load(row_starts + row) - replay  # tokens that the state stands for
    first = _first_chunk(row_starts, row_fed, row_committed, row_replay, row).to(tl.int64)

    token = tl.arange(0, CHUNK)
    along_k = tl.arange(0, K)
    along_v = block * V + tl.arange(0, V)
    in_v = along_v < v_dim
    in_state = (along_k < k_dim)[:, None] & in_v[None, :]
    slot = tl.load(row_slots + row).to(tl.int64)
    at_state = state + (slot * num_v_heads + head) * (k_dim * v_dim) + along_k[:, None] * v_dim + along_v[None, :]
    memory = tl.load(at_state, mask=in_state, other=0.0).to(tl.float32)
    memory = tl.trans(tl.where(base == 0, 0.0, memory))  # another stream's may still lie there

    channels = 2 * num_k_heads * k_dim + num_v_heads * v_dim
    values = convolved + 2 * num_k_heads * k_dim + head * v_dim + along_v[None, :]
    outs = out + head * v_dim + along_v[None, :]
    key = key_head(head, num_k_heads, num_v_heads, TILED)
    at_keys = keys + (first * num_k_heads + key) * (4 * CHUNK * K)
    at_squares = squares + (first * num_v_heads + head) * (4 * CHUNK * CHUNK)
    tile = token[:, None] * K + along_k[None, :]
    square = token[:, None] * CHUNK + token[None, :]
    at_fades = fades + (first * num_v_heads + head) * CHUNK
    if KEEPS > 0:
        keep_at, kept = next_keep(keep_positions, keep_states, row, base, base + length, KEEPS)
    # A chunk ahead, in registers: no factor of a product, it would come to shared memory in pieces of 4 bytes.
    v = _values(values, token - base % CHUNK, length, row, offset, replay, num_tokens, channels, in_v, DEPTH)
    for start in range(-(base % CHUNK), length, CHUNK):
        i = start + token
        fade = tl.load(at_fades + token)[None, :]
        last = tl.load(at_fades + CHUNK - 1)
        faded = tl.exp(fade)
        zero = tl.zeros([V, CHUNK], tl.float32)
        k = tl.load(at_keys + tile)
        k_low = tl.load(at_keys + CHUNK * K + tile)
        high, low = split(memory)
        recalled = split_product(high, low, tl.trans(k), tl.trans(k_low), zero)
        q = tl.load(at_keys + 2 * CHUNK * K + tile)
        q_low = tl.load(at_keys + 3 * CHUNK * K + tile)
        y = split_product(high, low, tl.trans(q), tl.trans(q_low), zero) * faded
        solve = tl.load(at_squares + square)
        solve_low = tl.load(at_squares + CHUNK * CHUNK + square)
        high, low = split(tl.trans(v) - faded * recalled)
        v = _values(values, i + CHUNK, length, row, offset, replay, num_tokens, channels, in_v, DEPTH)
        delta = split_product(high, low, tl.trans(solve), tl.trans(solve_low), zero)
        mix = tl.load(at_squares + 2 * CHUNK * CHUNK + square)
        mix_low = tl.load(at_squares + 3 * CHUNK * CHUNK + square)
        high, low = split(delta * tl.exp(last - fade))
        memory = split_product(high, low, k, k_low, memory * tl.exp(last))
        high, low = split(delta)
        y = split_product(high, low, tl.trans(mix), tl.trans(mix_low), y)
        at_out = outs + (offset + i - replay).to(tl.int64)[:, None] * (num_v_heads * v_dim)
        to_store = ((i >= replay) & (i < length))[:, None] & in_v[None, :]
        tl.store(at_out, tl.trans(y.to(out.dtype.element_ty)), mask=to_store)
        memory = as_stored(memory, state)  # also where nobody stores it: a row may start from here
        at_keys += num_k_heads * (4 * CHUNK * K)
        at_squares += num_v_heads * (4 * CHUNK * CHUNK)
        at_fades += num_v_heads * CHUNK
        if KEEPS > 0:  # noqa: SIM102 (decided when it is compiled)
            if base + start + CHUNK == keep_at:
                at_kept = at_state + (kept - slot) * (num_v_heads * k_dim * v_dim)
                tl.store(at_kept, tl.trans(memory.to(state.dtype.element_ty)), mask=in_state)
                keep_at, kept = next_keep(keep_positions, keep_states, row, keep_at, base + length, KEEPS)
    tl.store(at_state, tl.trans(memory.to(state.dtype.element_ty)), mask=in_state)


def max_chunks(num_rows: int, num_tokens: int, depth: int) -> int:
    """Upper bound of the chunks of a step of this size."""
    num_long = min(num_rows, num_tokens // (LONG.value + 1))
    return (num_tokens + num_long * (depth + 2 * (CHUNK.value - 1))) // CHUNK.value if num_long else 0


def recur_in_chunks(
    convolved: Tensor,  # float32 [tokens + rows * depth, conv channels]: fed tokens, then each row's replays
    gates: Tensor,  # float32 [tokens + rows * depth, 2, v heads]: log decay and beta
    out: Tensor,  # [tokens, v heads * v dim]
    state: Tensor,  # [slots and state slots, v heads, k dim, v dim]
    gdn: GdnSpec,
    batch: DeviceBatch,
    depth: int,
) -> None:
    """The outputs and new states of all long rows; the others are left alone."""
    num_tokens = out.shape[0]
    num_chunks = max_chunks(batch.num_rows, num_tokens, depth)
    if num_chunks == 0:
        return
    size, device = CHUNK.value, out.device
    # Of two stages none is ahead: a chunk is fetched when the one before it has ended. Three take 128 KiB.
    stages = 3 if gpu(device).multiplies_from_shared else 2
    wide_k = max(16, triton.next_power_of_2(gdn.k_dim))
    columns = min(COLUMNS, max(16, triton.next_power_of_2(gdn.v_dim)))
    keys = torch.empty(num_chunks, gdn.num_k_heads, 4, size, wide_k, device=device, dtype=torch.bfloat16)
    squares = torch.empty(num_chunks, gdn.num_v_heads, 4, size, size, device=device, dtype=torch.bfloat16)
    fades = torch.empty(num_chunks, gdn.num_v_heads, size, device=device, dtype=torch.float32)
    heads = (gdn.num_k_heads, gdn.num_v_heads, gdn.k_dim, gdn.v_dim)
    spans = (batch.row_offsets, batch.row_starts, batch.row_fed, batch.row_committed, batch.row_replay)
    _within[(gdn.num_v_heads, num_chunks)](
        convolved, gates, keys, squares, fades, *spans,
        batch.num_rows, num_tokens, *heads, DEPTH=depth, K=wide_k, TILED=gdn.tiled, num_warps=2, num_stages=1,
    )  # fmt: skip
    _across[(triton.cdiv(gdn.v_dim, columns), gdn.num_v_heads, batch.num_rows)](
        convolved, keys, squares, fades, out, state, batch.row_slots, *spans, batch.keep_positions, batch.keep_states,
        num_tokens, *heads, DEPTH=depth, K=wide_k, V=columns, KEEPS=batch.max_keeps, TILED=gdn.tiled,
        num_warps=4, num_stages=stages,
    )  # fmt: skip
