"""The routed MLP of experts.py with quantized experts: the matrices of all experts stacked, as one.

Weights are the left operand of the product, as in linear_quantized.py: they come from memory through registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.linear_quantized import add_tile, row_scales, scaled, tiles_of
from slipstream.runners.cuda.kernels.moe.experts import FEW_TOKENS, block_of, blocks_of
from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options
from slipstream.runners.cuda.kernels.quant.quantize import QuantizedMatrix

MIN_TOKENS = 4  # up to here the experts in use are too few to occupy all processors


class _Tiles(NamedTuple):
    pairs: int  # a block
    up_rows: int  # of gate and of up each
    down_rows: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_tokens"])
def _experts(
    x, words, scales, out, expert, positions, block_experts, block_pairs, num_tokens, stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """N of an expert's ROWS rows times a block of its pairs.

    GATED: silu(gate) * up, of rows of tokens, gate's rows before up's; otherwise of rows of pairs.
    """
    launch_dependents_and_wait()
    own, pairs = block_of(expert, positions, block_experts, block_pairs, num_tokens, ACTIVE, WIDE, FEW, M)
    if own < 0:
        return
    dtype: tl.constexpr = out.dtype.element_ty
    num_out: tl.constexpr = ROWS // 2 if GATED else ROWS
    step: tl.constexpr = K if BITS == 4 else K // 2  # columns of activations at once
    used = pairs >= 0
    first = own * ROWS + tl.program_id(1) * N
    rows = tl.program_id(1) * N + tl.arange(0, N)
    sources = (pairs // ACTIVE if GATED else pairs).to(tl.int64)
    columns = tl.arange(0, step)
    values = x + sources[:, None] * stride + columns[None, :]
    total = tl.zeros([N, M], tl.float32)
    up = tl.zeros([N, M], tl.float32)
    for tile in range((WIDTH + K - 1) // K):
        near = tl.load(values + tile * K, mask=used[:, None] & (columns < WIDTH - tile * K)[None, :], other=0.0)
        far = near
        if BITS == 8:
            far_inside = used[:, None] & (columns < WIDTH - tile * K - step)[None, :]
            far = tl.load(values + tile * K + step, mask=far_inside, other=0.0)
        total = add_tile(total, words, scales, first, tile, near, far, dtype, K, BITS, FP8)
        if GATED:
            up = add_tile(up, words, scales, first + num_out, tile, near, far, dtype, K, BITS, FP8)
    inside = rows < num_out
    total = scaled(total, row_scales(scales, own * ROWS + rows, inside, BITS, FP8), dtype)
    if GATED:
        up = scaled(up, row_scales(scales, own * ROWS + num_out + rows, inside, BITS, FP8), dtype)
        total = total * tl.sigmoid(total) * up
    target = out + pairs.to(tl.int64)[None, :] * num_out + rows[:, None]
    tl.store(target, total.to(dtype), mask=inside[:, None] & used[None, :])


def quantized_expert_pairs(
    x: Tensor,  # [tokens, hidden]; rows may lie apart
    gate_up: QuantizedMatrix,  # [experts * 2 * inner, hidden]: of each expert the gate's rows, then the up rows
    down: QuantizedMatrix,  # [experts * hidden, inner]
    expert: Tensor,  # int32 [tokens, active]
    positions: Tensor,  # int32 [tokens]; -1: padding, its pairs are not written
) -> Tensor:
    """Each active expert's MLP of its token. [tokens, active, hidden]"""
    (num_tokens, num_active), hidden, inner = expert.shape, gate_up.width, down.width
    num_experts = down.num_rows // hidden
    assert x.stride(1) == 1
    assert gate_up.num_rows == num_experts * 2 * inner
    tiles = _tiles(num_tokens, num_tokens * num_active / num_experts, gate_up, x.dtype)
    blocks = blocks_of(expert, positions, num_experts, tiles.pairs)

    def multiply(matrix: QuantizedMatrix, source: Tensor, num_out: int, num_rows: int, gated: bool) -> Tensor:
        out = torch.empty((num_tokens * num_active, num_out), dtype=x.dtype, device=x.device)
        _experts[(blocks.number, triton.cdiv(num_out, num_rows))](
            source, tiles_of(matrix.words, num_rows, matrix.tile * matrix.bits // 16), matrix.kernel_scales(num_rows),
            out, *blocks.arguments, source.stride(0),
            ROWS=matrix.num_rows // num_experts, WIDTH=matrix.width, **blocks.constants,
            M=tiles.pairs, N=num_rows, K=matrix.tile, BITS=matrix.bits, FP8=matrix.fp8_layout, GATED=gated,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **pdl_options(x.device),
        )  # fmt: skip
        return out

    activated = multiply(gate_up, x, inner, tiles.up_rows, gated=True)
    return multiply(down, activated, hidden, tiles.down_rows, gated=False).view(num_tokens, num_active, hidden)


def _tiles(num_tokens: int, pairs_per_expert: float, matrix: QuantizedMatrix, dtype: torch.dtype) -> _Tiles:
    """From a sweep on an H200 up to 8 pairs an expert: narrow tiles for few programs, then for few instructions.

    Source: log 124; beyond 8 pairs an expert not in the log.
    """
    narrow = 64 if matrix.kind == "fp8" else 32  # factors of FP8 come for at least 64 rows
    if dtype == torch.float32:  # without tensor cores
        return _Tiles(16, narrow, narrow, 4, 2)
    if not gpu(matrix.words.device).multiplies_from_shared:  # so that few registers spill, as compiled
        return _Tiles(16 if num_tokens <= FEW_TOKENS or pairs_per_expert <= 12 else 32, 64, 64, 8, 3)
    if num_tokens <= MIN_TOKENS:
        return _Tiles(16, narrow, 32 if matrix.kind == "int8" else 64, 2, 4 if matrix.kind == "fp8" else 6)
    if num_tokens <= FEW_TOKENS or pairs_per_expert <= 12:
        return _Tiles(16, 64, 64, 2 if matrix.bits == 4 else 4, 3)
    if pairs_per_expert <= 24:
        return _Tiles(32, 64, 128, 4, 3)
    if pairs_per_expert <= 96:
        return _Tiles(64, 64, 64, 4, 3 if matrix.bits == 8 else 2)
    return _Tiles(128, 64, 128, 8, 2)
