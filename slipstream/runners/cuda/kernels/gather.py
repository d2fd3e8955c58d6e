"""Rows of a matrix by number: an embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options

BLOCK = 1024


@triton.jit
def _gather_kernel(table, ids, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    tl.store(out + place * WIDTH + cols, tl.load(table + row * stride + cols, mask=mask), mask=mask)


def gather_rows(table: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """table: [rows, width], ids: integers [n] -> [n, width], contiguous: ``out`` if there is one."""
    (num_ids,), width = ids.shape, table.shape[1]
    assert table.stride(1) == 1
    assert ids.is_contiguous()
    if out is None:
        out = torch.empty((num_ids, width), dtype=table.dtype, device=table.device)
    assert out.shape == (num_ids, width)
    assert out.dtype == table.dtype
    assert out.is_contiguous()
    grid = (num_ids, triton.cdiv(width, BLOCK))
    _gather_kernel[grid](
        table, ids, out, table.stride(0), WIDTH=width, BLOCK=BLOCK, num_warps=4, **pdl_options(table.device)
    )
    return out
