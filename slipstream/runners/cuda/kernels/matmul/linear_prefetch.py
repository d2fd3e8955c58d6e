"""The product of linear.py with its first weights prefetched before the wait for the previous kernel.

Worth it for short products: the next product's weights fill the time in which a kernel starts and drains. Triton's own
pipelines cannot begin before a wait, so this one is written out, in Gluon: for compute capability 9 alone, and no
interpreter runs it (tests/runners/cuda/gluon_on_cpu.py does). Everything but the order of its loads is as in linear.py,
which documents the arguments.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.runners.cuda.kernels.matmul.product import INTERLEAVE
from slipstream.runners.cuda.kernels.pdl import pdl_options

# Names differ between Triton's versions.
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_previous():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["num_tokens"])
def skinny_prefetch(
    x, squares, weight, out, add, norm, normed, normed_squares, partial, arrived,
    num_tokens, num_out, width, num_squares, eps,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SPLIT: gl.constexpr, SQUARES: gl.constexpr,
    GATED: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    block = gl.program_id(0)
    part = gl.program_id(1)
    first = width // K * part // SPLIT
    count = width // K * (part + 1) // SPLIT - first
    tile_bytes: gl.constexpr = (N + M) * K * 2
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, N, K], weight.layout)
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, M, K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.expect(ready.index(i), tile_bytes, pred=i < count)
        fetch(weight, [block * N, (first + i) * K], ready.index(i), weights.index(i), pred=i < count)
    if PDL:
        wait_for_previous()
        launch_dependents()
    for i in gl.static_range(STAGES):
        fetch(x, [0, (first + i) * K], ready.index(i), inputs.index(i), pred=i < count)
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    if squares is not None:
        spread: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
        which = gl.arange(0, SQUARES, gl.SliceLayout(1, spread))[:, None]
        token = gl.arange(0, M, gl.SliceLayout(0, spread))[None, :]
        found = gl.load(squares + which * M + token, mask=which < num_squares, other=0.0)
    total = gl.zeros([N, M], gl.float32, layout)
    stage = 0
    phase = 0
    for i in range(count):
        mbarrier.wait(ready.index(stage), phase)
        adding = warpgroup_mma(weights.index(stage), inputs.index(stage).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(adding,))
        more = i + STAGES < count
        mbarrier.expect(ready.index(stage), tile_bytes, pred=more)
        fetch(weight, [block * N, (first + i + STAGES) * K], ready.index(stage), weights.index(stage), pred=more)
        fetch(x, [0, (first + i + STAGES) * K], ready.index(stage), inputs.index(stage), pred=more)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    row = gl.arange(0, N, gl.SliceLayout(1, layout))
    tokens = gl.arange(0, M, gl.SliceLayout(0, layout))
    if SPLIT > 1:
        in_tile = row[:, None] * M + tokens[None, :]
        base = partial + block.to(gl.int64) * (SPLIT * N * M)
        gl.store(base + part * (N * M) + in_tile, total)
        barrier()
        before = gl.atomic_add(arrived + block, 1, sem="acq_rel")
        if before < SPLIT - 1:
            return
        total = gl.zeros([N, M], gl.float32, layout)
        for other in gl.static_range(SPLIT):
            total += gl.load(base + other * (N * M) + in_tile, cache_modifier=".cg")
        gl.store(arrived + block, 0)
    if squares is not None:
        scale = gl.rsqrt(gl.sum(found, 0) / width + eps)
        total *= gl.convert_layout(scale, gl.SliceLayout(0, layout))[None, :]
    if GATED:
        apart = total.reshape([N // (2 * INTERLEAVE), 2, INTERLEAVE, M]).permute((0, 2, 3, 1))
        gate, up = apart.split()
        activated = (gate / (1.0 + gl.exp(-gate)) * up).reshape([N // 2, M]).to(out.dtype.element_ty)
        columns: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
        rows = block * (N // 2) + gl.arange(0, N // 2, gl.SliceLayout(1, columns))
        tokens = gl.arange(0, M, gl.SliceLayout(0, columns))
        where = tokens[None, :].to(gl.int64) * (num_out // 2) + rows[:, None]
        inside = (rows[:, None] < num_out // 2) & (tokens[None, :] < num_tokens)
        gl.store(out + where, gl.convert_layout(activated, columns), mask=inside)
    else:
        rows = block * N + row
        where = tokens[None, :].to(gl.int64) * num_out + rows[:, None]
        inside = (rows[:, None] < num_out) & (tokens[None, :] < num_tokens)
        if add is not None:
            total += gl.load(add + where, mask=inside, other=0.0).to(gl.float32)
        result = total.to(out.dtype.element_ty)
        gl.store(out + where, result, mask=inside)
        if norm is not None:
            result = gl.where(inside, result.to(gl.float32), 0.0)
            scaled = result * gl.load(norm + rows, mask=rows < num_out, other=0.0)[:, None]
            gl.store(normed + where, scaled.to(out.dtype.element_ty), mask=inside)
            gl.store(normed_squares + block * M + tokens, gl.sum(result * result, 0))


def launch_prefetch(
    grid: tuple[int, int],
    x: Tensor,  # [tokens, width]
    squares: Tensor | None,
    weight: Tensor,  # [num_out, width]
    others: tuple[Any, ...],
    sizes: dict[str, Any],
    num_stages: int,
) -> None:
    """``others`` and ``sizes``: the kernel's arguments after ``weight``, and its constants, as in linear.py."""
    tiles = _tiles(x, [sizes["M"], sizes["K"]]), squares, _tiles(weight, [sizes["N"], sizes["K"]])
    pdl = pdl_options(x.device)
    skinny_prefetch[grid](*tiles, *others, **sizes, STAGES=num_stages, PDL=bool(pdl), num_warps=4, **pdl)


def _tiles(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], block, layout)
