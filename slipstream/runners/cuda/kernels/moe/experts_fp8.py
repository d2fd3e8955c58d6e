"""The routed MLP of experts_quantized.py by the FP8 tensor cores: see matmul/linear_fp8.py.

A token's activations are rounded once for all its experts; those between an expert's two products, a pair at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.linear_fp8 import factors_of, matrix_tile, promoted
from slipstream.runners.cuda.kernels.matmul.linear_quantized import tiles_of
from slipstream.runners.cuda.kernels.matmul.product import product
from slipstream.runners.cuda.kernels.moe.experts import FEW_TOKENS, ExpertTiles, block_of, blocks_of
from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options
from slipstream.runners.cuda.kernels.quant.activations import Fp8Activations, quantized_activations
from slipstream.runners.cuda.kernels.quant.fp8 import TILE, Fp8Matrix


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_experts(
    codes, scales, weights, factors, out, expert, positions, block_experts, block_pairs,
    num_tokens, scale_stride, factor_stride, num_rows,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """N of an expert's ROWS rows times a block of its pairs, as ``_experts`` in experts_quantized.py."""
    launch_dependents_and_wait()
    own, pairs = block_of(expert, positions, block_experts, block_pairs, num_tokens, ACTIVE, WIDE, FEW, M)
    if own < 0:
        return
    num_out: tl.constexpr = ROWS // 2 if GATED else ROWS
    num_tiles: tl.constexpr = WIDTH // K
    used = pairs >= 0
    rows = tl.program_id(1) * N + tl.arange(0, N)
    inside = rows < num_out
    first = own * ROWS + tl.program_id(1) * N
    mine = own * ROWS + rows
    sources = (pairs // ACTIVE if GATED else pairs).to(tl.int64)
    values = codes + sources[:, None] * WIDTH + tl.arange(0, K)[None, :]
    total = tl.zeros([N, M], tl.float32)
    up = tl.zeros([N, M], tl.float32)
    token_scales = tl.load(scales + sources, mask=used, other=0.0)
    row_factors = factors_of(factors, 0, factor_stride, mine, inside)
    up_factors = row_factors
    if GATED:
        up_factors = factors_of(factors, 0, factor_stride, mine + num_out, inside)
    for tile in range(num_tiles):
        following = tl.minimum(tile + 1, num_tiles - 1)  # scales are read a tile early, as in linear_fp8.py
        next_scales = tl.load(scales + following * scale_stride + sources, mask=used, other=0.0)
        next_factors = factors_of(factors, following, factor_stride, mine, inside)
        b = tl.load(values + tile * K, mask=used[:, None], other=0.0).T
        a = matrix_tile(weights, first, tile * K, WIDTH, num_rows, N, K, POINTERS)
        total = promoted(total, product(a, b, tl.zeros([N, M], tl.float32)), row_factors, token_scales)
        if GATED:
            next_up = factors_of(factors, following, factor_stride, mine + num_out, inside)
            a = matrix_tile(weights, first + num_out, tile * K, WIDTH, num_rows, N, K, POINTERS)
            up = promoted(up, product(a, b, tl.zeros([N, M], tl.float32)), up_factors, token_scales)
            up_factors = next_up
        token_scales = next_scales
        row_factors = next_factors
    if GATED:
        total = total * tl.sigmoid(total) * up
    target = out + pairs.to(tl.int64)[None, :] * num_out + rows[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & used[None, :])


def fp8_expert_pairs(
    x: Tensor,  # [tokens, hidden]; rows may lie apart
    gate_up: Fp8Matrix,  # [experts * 2 * inner, hidden]: of each expert the gate's rows, then the up rows
    down: Fp8Matrix,  # [experts * hidden, inner]
    expert: Tensor,  # int32 [tokens, active]
    positions: Tensor,  # int32 [tokens]; -1: padding, its pairs are not written
    tiles: ExpertTiles | None = None,  # None: as usual
) -> Tensor:
    """Each active expert's MLP of its token. [tokens, active, hidden]"""
    (num_tokens, num_active), hidden, inner = expert.shape, gate_up.width, down.width
    num_experts = down.num_rows // hidden
    assert gate_up.num_rows == num_experts * 2 * inner
    pointers = not gpu(x.device).multiplies_from_shared
    tiles = tiles or expert_tiles(num_tokens, num_tokens * num_active / num_experts)
    blocks = blocks_of(expert, positions, num_experts, tiles.pairs)

    def multiply(matrix: Fp8Matrix, source: Fp8Activations, num_out: int, gated: bool) -> Tensor:
        out = torch.empty((num_tokens * num_active, num_out), dtype=x.dtype, device=x.device)
        codes = matrix.codes
        _fp8_experts[(blocks.number, triton.cdiv(num_out, tiles.num_rows))](
            source.codes, source.scales, codes if pointers else tiles_of(codes, tiles.num_rows, TILE), matrix.factors,
            out, *blocks.arguments, source.scales.stride(0), matrix.factors.stride(0), matrix.num_rows,
            ROWS=matrix.num_rows // num_experts, WIDTH=matrix.width, **blocks.constants,
            M=tiles.pairs, N=tiles.num_rows, K=TILE, GATED=gated, POINTERS=pointers,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **pdl_options(x.device),
        )  # fmt: skip
        return out

    activated = multiply(gate_up, quantized_activations(x), inner, gated=True)
    made = multiply(down, quantized_activations(activated), hidden, gated=False)
    return made.view(num_tokens, num_active, hidden)


def expert_tiles(num_tokens: int, pairs_per_expert: float) -> ExpertTiles:
    """By registers and bytes read: no GPU has timed these yet (tests/runners/cuda/fp8_report.py does)."""
    if num_tokens <= FEW_TOKENS or pairs_per_expert <= 12:
        return ExpertTiles(16, 64, 4, 4)
    if pairs_per_expert <= 24:
        return ExpertTiles(32, 64, 4, 3)
    if pairs_per_expert <= 96:
        return ExpertTiles(64, 64, 8, 3)
    return ExpertTiles(128, 64, 8, 2)
