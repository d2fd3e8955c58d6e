"""RMSNorm over rows of any stride, alone and as the entry of the MTP head (two norms side by side)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.pdl import launch_dependents, pdl_options, wait_for_previous


@triton.jit
def _normalised(x, factors, eps, WIDTH: tl.constexpr):
    """x: [rows, block] float32, zero beyond WIDTH. factors: [block]"""
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    return x * scale[:, None] * factors[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    weight,
    out,
    num_rows,
    stride_outer,
    stride_inner,
    eps,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    mask = (rows < num_rows)[:, None] & inside[None, :]
    factors = tl.load(weight + cols, mask=inside, other=0.0)
    wait_for_previous()
    source = (rows // INNER).to(tl.int64) * stride_outer + (rows % INNER) * stride_inner
    values = tl.load(x + source[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    normed = _normalised(values, factors, eps, WIDTH)
    target = rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(out + target, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _concat_norm_kernel(
    a, weight_a, b, weight_b, out, stride_a, stride_b, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a token and side."""
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    source, weight = a + token * stride_a, weight_a
    if side == 1:
        source, weight = b + token * stride_b, weight_b
    factors = tl.load(weight + cols, mask=mask, other=0.0)
    wait_for_previous()
    values = tl.load(source + cols[None, :], mask=mask[None, :], other=0.0).to(tl.float32)
    normed = _normalised(values, factors, eps, WIDTH)
    target = out + (2 * token + side) * WIDTH
    tl.store(target + cols[None, :], normed.to(out.dtype.element_ty), mask=mask[None, :])


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x: [..., width], its last dimension contiguous; rows may lie apart (a slice of a wider matrix).

    ``out``: where the result goes, contiguous.
    """
    width = x.shape[-1]
    rows = x if x.dim() == 3 else x[:, None] if x.dim() == 2 else x.view(-1, 1, width)  # [outer, inner, width]
    num_outer, num_inner, _ = rows.shape
    assert rows.stride(2) == 1
    assert weight.shape == (width,)
    assert weight.is_contiguous()
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert out.is_contiguous()
    block = triton.next_power_of_2(width)
    rows_each = max(1, 1024 // block)
    _rms_norm_kernel[(triton.cdiv(num_outer * num_inner, rows_each),)](
        rows,
        weight,
        out,
        num_outer * num_inner,
        rows.stride(0),
        rows.stride(1),
        eps,
        INNER=num_inner,
        WIDTH=width,
        ROWS=rows_each,
        BLOCK=block,
        num_warps=_num_warps(rows_each * block),
        **pdl_options(x.device),
    )
    return out


def concat_norm(a: Tensor, weight_a: Tensor, b: Tensor, weight_b: Tensor, eps: float) -> Tensor:
    """Both normalised, side by side. a, b: [tokens, width] -> [tokens, 2 * width]"""
    num_tokens, width = a.shape
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert a.stride(1) == 1
    assert b.stride(1) == 1
    assert weight_a.shape == weight_b.shape == (width,)
    out = torch.empty((num_tokens, 2 * width), dtype=a.dtype, device=a.device)
    block = triton.next_power_of_2(width)
    _concat_norm_kernel[(num_tokens, 2)](
        a,
        weight_a,
        b,
        weight_b,
        out,
        a.stride(0),
        b.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=_num_warps(block),
        **pdl_options(a.device),
    )
    return out


def _num_warps(num_values: int) -> int:
    """Eight values a thread, as far as a program has warps."""
    return min(16, max(1, num_values // 256))
