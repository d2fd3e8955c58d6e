"""Matrix products inside kernels, the same on the GPU and in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
INTERLEAVE_ROWS = 8  # of gate, then as many of up, and so on: a thread has both in its registers
INTERLEAVE = tl.constexpr(INTERLEAVE_ROWS)
# Two numbers in one instruction: of conversions to bfloat16 the compiler makes one for each, at a fraction of the rate.
_SPLIT = tl.constexpr("""{
    .reg .b32 high, low, first, second;
    cvt.rn.bf16x2.f32 high, $3, $2;
    shl.b32 first, high, 16;
    and.b32 second, high, 0xffff0000;
    sub.rn.f32 first, $2, first;
    sub.rn.f32 second, $3, second;
    cvt.rn.bf16x2.f32 low, second, first;
    mov.b32 $0, high;
    mov.b32 $1, low;
}""")


@triton.jit
def product(a, b, total):
    """total + a b, summed in float32; exact products of float32 inputs."""
    if INTERPRETED:  # it would multiply the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def store_part(total, partial, arrived, block, part, split, N: tl.constexpr, M: tl.constexpr):
    """Split-K: store a program's part of a block's sums. Returns whether it is the block's last of ``split`` parts."""
    in_tile = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    base = partial + block.to(tl.int64) * split * (N * M)
    tl.store(base + part * (N * M) + in_tile, total)
    tl.debug_barrier()
    return tl.atomic_add(arrived + block, 1, sem="acq_rel") == split - 1


@triton.jit
def sum_of_parts(partial, arrived, block, split, N: tl.constexpr, M: tl.constexpr):
    """What all programs of the block stored. [N, M]"""
    in_tile = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    base = partial + block.to(tl.int64) * split * (N * M)
    total = tl.zeros([N, M], tl.float32)
    for part in range(split):
        total += tl.load(base + part * (N * M) + in_tile, cache_modifier=".cg")
    tl.store(arrived + block, 0)
    return total


@triton.jit
def epilogue(
    total, found, first_row, end_row, tokens, num_tokens, num_out, width, eps,
    out, add, bias, norm, normed, normed_squares,
    N: tl.constexpr, M: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The fused end of a product: scale, activation, bias, residual and norm, for rows ``first_row`` to ``end_row``.

    ``found``: squares of the activations, if their norm is not scaled yet. ``normed_squares``: this program's output.
    total: [N, M]
    """
    if found is not None:
        total *= tl.rsqrt(tl.sum(found, axis=0) / width + eps)[None, :]
    if GATED:
        gate, up = gate_and_up(total, N, M)
        total = gate * tl.sigmoid(gate) * up
        num_out = num_out // 2
        end_row = end_row // 2
        rows = first_row // 2 + tl.arange(0, N // 2)
    else:
        rows = first_row + tl.arange(0, N)
    where = tokens[None, :].to(tl.int64) * num_out + rows[:, None]
    inside = (rows[:, None] < end_row) & (tokens[None, :] < num_tokens)
    if bias is not None:
        total += tl.load(bias + rows, mask=rows < end_row, other=0.0).to(tl.float32)[:, None]
    if add is not None:
        total += tl.load(add + where, mask=inside, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + where, result, mask=inside)
    if norm is not None:
        result = tl.where(inside, result.to(tl.float32), 0.0)
        scaled = result * tl.load(norm + rows, mask=rows < end_row, other=0.0)[:, None]
        tl.store(normed + where, scaled.to(out.dtype.element_ty), mask=inside)
        tl.store(normed_squares + tokens, tl.sum(result * result, axis=0))


@triton.jit
def gate_and_up(total, N: tl.constexpr, M: tl.constexpr):
    """Of interleaved rows. total: [N, M] -> two of [N / 2, M]"""
    apart = total.reshape(N // (2 * INTERLEAVE), 2, INTERLEAVE, M).permute(0, 2, 3, 1)
    gate, up = tl.split(apart)
    return gate.reshape(N // 2, M), up.reshape(N // 2, M)


@triton.jit
def split(x):
    """Two bfloat16 that add up to a float32 but for its last 8 bits.

    Said to be impure: what is pure is computed again for each way in which a product wants it to lie in threads.
    """
    return tl.inline_asm_elementwise(_SPLIT, "=r,=r,r,r", [x], dtype=(tl.bfloat16, tl.bfloat16), is_pure=False, pack=2)


@triton.jit
def split_product(a_high, a_low, b_high, b_low, total):
    """total + a b of split matrices: float32 but for the last bits, at a third of the speed of bfloat16."""
    total = product(a_high, b_low, total)
    total = product(a_low, b_high, total)
    return product(a_high, b_high, total)
