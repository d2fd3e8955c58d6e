"""Matrix products for few tokens, bound by reading the weights: up to ``MAX_TOKENS`` tokens cost little more than one.

For more tokens, and for most narrow matrices beyond ``FEW_TOKENS``, the library's product is faster. Tiles come through
descriptors (the copy engine of Hopper GPUs; older ones get plain loads). A narrow matrix is split along its inner side
as well, so that enough programs read at once; the parts meet in memory and are added by the last to arrive, always in
the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.runners.torch.cuda.kernels.product import product
from slipstream.runners.torch.cuda.kernels.turns import IN_TURN, let_next_in, wait_for_last

FEW_TOKENS = 16
FEW = tl.constexpr(FEW_TOKENS)
MAX_TOKENS = 64
WIDE = 5120  # columns of a matrix, from which on more than FEW_TOKENS are worth a kernel of our own
PROCESSORS = 132  # of the GPU that the tilings were measured on


@triton.jit
def _skinny(
    x, weight, out, add, partial, arrived, num_tokens, num_out, width,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    part = tl.program_id(1)
    steps = width // K
    if M > FEW:  # measured: early is better there
        let_next_in()
    wait_for_last()
    total = tl.zeros([N, M], tl.float32)
    for step in range(steps * part // SPLIT, steps * (part + 1) // SPLIT):
        total = product(weight.load([block * N, step * K]), x.load([0, step * K]).T, total)
    let_next_in()
    rows = block * N + tl.arange(0, N)
    tokens = tl.arange(0, M)
    where = tokens[None, :].to(tl.int64) * num_out + rows[:, None]
    inside = (rows[:, None] < num_out) & (tokens[None, :] < num_tokens)
    if SPLIT > 1:
        place = tl.arange(0, N)[:, None] * M + tokens[None, :]
        base = partial + block.to(tl.int64) * (SPLIT * N * M)
        tl.store(base + part * (N * M) + place, total)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + block, 1, sem="acq_rel")
        if before < SPLIT - 1:
            return
        total = tl.zeros([N, M], tl.float32)
        for other in tl.static_range(SPLIT):
            total += tl.load(base + other * (N * M) + place, cache_modifier=".cg")
        tl.store(arrived + block, 0)
    if ADD:
        total += tl.load(add + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int  # of the weight, per program
    inner: int  # columns per step
    stages: int  # steps in flight
    split: int = 1  # programs that share a row block's columns
    warps: int = 4


def padded(num_tokens: int) -> int:
    """How many tokens the product for so many is made for; 0: the library's."""
    return max(FEW_TOKENS, triton.next_power_of_2(num_tokens)) if num_tokens <= MAX_TOKENS else 0


def tiling(num_out: int, width: int, num_tokens: int) -> Tiling | None:
    """How to cut a matrix for up to FEW_TOKENS or MAX_TOKENS, measured on an H200; None: the library is better."""
    if width % 128 or width < 512 or num_out < 16 or num_tokens > MAX_TOKENS:
        return None
    few = num_tokens <= FEW_TOKENS
    blocks = triton.cdiv(num_out, 64)
    if not few and (width < WIDE or blocks < 64):
        return None
    if num_out > 100_000:
        return Tiling(128, 128, 6 if few else 4)
    if not few:
        return Tiling(128, 128, 4) if PROCESSORS < blocks <= 2 * PROCESSORS else Tiling(64, 128, 6)
    if num_out > 24_000 and width % 256 == 0:
        return Tiling(64, 256, 5)
    if blocks > 2 * PROCESSORS:  # three stages leave room for three programs on a processor: all run at once
        return Tiling(64, 128, 3)
    if blocks > PROCESSORS:
        return Tiling(64, 128, 4)
    return Tiling(64, 128, 6, split=max(1, min(PROCESSORS // blocks, width // 512, 8)))


def fitted(
    cut: Tiling, num_tokens: int, item_bytes: int, shared_bytes: int, weight_bytes: float | None = None
) -> Tiling | None:
    """With no more stages than a program's shared memory holds; None: it does not hold two.

    ``weight_bytes``: of a weight, where it is not stored as activations are.
    """
    column_bytes = cut.rows * (weight_bytes or item_bytes) + num_tokens * item_bytes
    stages = int((shared_bytes - 1024) // (column_bytes * cut.inner))
    return replace(cut, stages=min(cut.stages, stages)) if stages >= 2 else None


class Scratch:
    """Where the parts of split products meet: one for all matrices of a device, since kernels run one by one."""

    def __init__(self, device: torch.device, num_floats: int = PROCESSORS * 64 * FEW_TOKENS) -> None:
        self.partial = torch.empty(num_floats, device=device, dtype=torch.float32)
        self.arrived = torch.zeros(PROCESSORS, device=device, dtype=torch.int32)


def skinny_linear(
    x: Tensor,  # [tokens <= MAX_TOKENS, width], contiguous
    weight: Tensor,  # [num_out, width], contiguous
    cut: Tiling,
    scratch: Scratch,
    add: Tensor | None = None,  # [tokens, num_out], contiguous
) -> Tensor:
    num_tokens, width = x.shape
    num_out = weight.shape[0]
    blocks = triton.cdiv(num_out, cut.rows)
    made_for = padded(num_tokens)
    assert made_for
    assert x.is_contiguous()
    assert add is None or add.is_contiguous()
    assert cut.split == 1 or blocks * cut.split * cut.rows * made_for <= scratch.partial.numel()
    out = torch.empty(num_tokens, num_out, device=x.device, dtype=x.dtype)
    _skinny[(blocks, cut.split)](
        TensorDescriptor(x, [num_tokens, width], [width, 1], [made_for, cut.inner]),
        TensorDescriptor(weight, [num_out, width], [width, 1], [cut.rows, cut.inner]),
        out, x if add is None else add, scratch.partial, scratch.arrived, num_tokens, num_out, width,
        M=made_for, N=cut.rows, K=cut.inner, SPLIT=cut.split, ADD=add is not None, num_stages=cut.stages,
        num_warps=cut.warps, **IN_TURN,
    )  # fmt: skip
    return out
