"""The routed MLP of experts.py with experts in the codes of quantised files: see quant/coded.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.elementwise import silu_mul
from slipstream.runners.cuda.kernels.gpus import Gpu, gpu
from slipstream.runners.cuda.kernels.matmul.linear_coded import add_coded_tile, code_tiles, load_step
from slipstream.runners.cuda.kernels.moe.experts import FEW_TOKENS, ExpertTiles, block_of, blocks_of
from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options
from slipstream.runners.cuda.kernels.quant.code_layout import TILE
from slipstream.runners.cuda.kernels.quant.coded import CodedMatrix


@triton.jit(do_not_specialize=["num_tokens"])
def _coded_experts(
    x, words, high, scales, minimums, steps, out, expert, positions, block_experts, block_pairs,
    num_tokens, num_rows, stride, out_stride, scale_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr,
    OF_TOKENS: tl.constexpr, GATED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, GROUPS: tl.constexpr, FACTORS: tl.constexpr,
    MINIMUM: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """N of an expert's ROWS rows times a block of its pairs: of rows of tokens, or of pairs.

    GATED: silu(gate) * up, gate's rows before up's.
    """
    launch_dependents_and_wait()
    own, pairs = block_of(expert, positions, block_experts, block_pairs, num_tokens, ACTIVE, WIDE, FEW, M)
    if own < 0:
        return
    dtype: tl.constexpr = out.dtype.element_ty
    num_out: tl.constexpr = ROWS // 2 if GATED else ROWS
    TILES: tl.constexpr = (WIDTH + K - 1) // K
    used = pairs >= 0
    row = own * ROWS + tl.program_id(1) * N
    rows = tl.program_id(1) * N + tl.arange(0, N)
    inside = rows < num_out
    sources = (pairs // ACTIVE if OF_TOKENS else pairs).to(tl.int64)
    columns = tl.arange(0, K)
    values = x + sources[:, None] * stride + columns[None, :]
    own_rows = own * ROWS + rows
    total = tl.zeros([N, M], tl.float32)
    up = tl.zeros([N, M], tl.float32)
    for tile in range(TILES):
        near = tl.load(values + tile * K, mask=used[:, None] & (columns < WIDTH - tile * K)[None, :], other=0.0)
        total = add_coded_tile(
            total,
            load_step(steps, scale_stride, own_rows, inside, tile, TILES, MINIMUM, 0),
            load_step(steps, scale_stride, own_rows, inside, tile, TILES, MINIMUM, 1),
            words, high, scales, minimums, scale_stride, num_rows, TILES, row, tile, near, dtype,
            K, BITS, OFFSET, TABLE, GROUPS, FACTORS, MINIMUM, POINTERS,
        )  # fmt: skip
        if GATED:
            up = add_coded_tile(
                up,
                load_step(steps, scale_stride, own_rows + num_out, inside, tile, TILES, MINIMUM, 0),
                load_step(steps, scale_stride, own_rows + num_out, inside, tile, TILES, MINIMUM, 1),
                words, high, scales, minimums, scale_stride, num_rows, TILES, row + num_out, tile, near, dtype,
                K, BITS, OFFSET, TABLE, GROUPS, FACTORS, MINIMUM, POINTERS,
            )  # fmt: skip
    if GATED:
        total = total * tl.sigmoid(total) * up
    target = out + pairs.to(tl.int64)[None, :] * out_stride + rows[:, None]
    tl.store(target, total.to(dtype), mask=inside[:, None] & used[None, :])


def coded_expert_pairs(
    x: Tensor,  # [tokens, hidden]; rows may lie apart
    gate_up: Sequence[CodedMatrix],  # [experts * 2 * inner, hidden], the gate's rows first, or gate and up apart
    down: CodedMatrix,  # [experts * hidden, inner]
    expert: Tensor,  # int32 [tokens, active]
    positions: Tensor,  # int32 [tokens]; -1: padding, its pairs are not written
) -> Tensor:
    """Each active expert's MLP of its token. [tokens, active, hidden]"""
    (num_tokens, num_active), hidden, inner = expert.shape, x.shape[1], down.width
    num_experts = down.num_rows // hidden
    assert x.stride(1) == 1
    assert sum(matrix.num_rows for matrix in gate_up) == num_experts * 2 * inner
    has_descriptors = gpu(x.device).multiplies_from_shared
    tiles = _tiles(num_tokens, num_tokens * num_active / num_experts, x.dtype, gpu(x.device))
    blocks = blocks_of(expert, positions, num_experts, tiles.pairs)

    def multiply(matrix: CodedMatrix, source: Tensor, out: Tensor, of_tokens: bool, gated: bool = False) -> None:
        _coded_experts[(blocks.number, triton.cdiv(out.shape[1], tiles.num_rows))](
            source, *code_tiles(matrix, tiles.num_rows, not has_descriptors), out, *blocks.arguments,
            matrix.num_rows, source.stride(0), out.stride(0), matrix.scales.stride(0),
            ROWS=matrix.num_rows // num_experts, WIDTH=matrix.width, **blocks.constants,
            OF_TOKENS=of_tokens, GATED=gated,
            M=tiles.pairs, N=tiles.num_rows, K=TILE, **matrix.constants, POINTERS=not has_descriptors,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **pdl_options(x.device),
        )  # fmt: skip

    num_pairs = num_tokens * num_active
    if len(gate_up) == 1:
        activated = x.new_empty(num_pairs, inner)
        multiply(gate_up[0], x, activated, True, gated=True)
    else:
        both = x.new_zeros(num_pairs, 2 * inner)  # pairs of padding are not written
        for matrix, half in zip(gate_up, both.chunk(2, dim=1), strict=True):
            multiply(matrix, x, half, True)
        activated = silu_mul(both)
    out = x.new_empty(num_pairs, hidden)
    multiply(down, activated, out, False)
    return out.view(num_tokens, num_active, hidden)


def _tiles(num_tokens: int, pairs_per_expert: float, dtype: torch.dtype, device: Gpu) -> ExpertTiles:
    """Narrow enough for registers: two products are under way at once. Source: compiled, not measured."""
    if dtype == torch.float32:  # without tensor cores
        return ExpertTiles(16, 64, 4, 2)
    if num_tokens <= FEW_TOKENS or pairs_per_expert <= 12:
        return ExpertTiles(16, 64, 4, 3)
    few_pairs = pairs_per_expert <= 24 or not device.multiplies_from_shared
    return ExpertTiles(32, 64, 4, 3) if few_pairs else ExpertTiles(64, 64, 8, 2)
