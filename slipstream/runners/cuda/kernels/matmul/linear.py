"""Matrix products for few tokens, bound by reading the weights: up to ``MAX_TOKENS`` tokens cost little more than one.

For more tokens, and for most narrow matrices beyond ``FEW_TOKENS``, the library's product is faster. Tiles come through
descriptors (the copy engine of Hopper GPUs; older ones get plain loads). A narrow matrix is also split along its inner
side (split-K), so that enough programs read at once; the last program to finish adds the partial sums, always in the
same order.

Operations around a product are fused into it: the gated activation of an MLP, and both halves of a norm between two
products. The first product adds the residual, multiplies with the norm's weights and stores the sums of squares; the
second one scales its own sums, since the scale of a token is the same for all its columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.runners.cuda.kernels.gpus import Gpu
from slipstream.runners.cuda.kernels.matmul.product import INTERLEAVE_ROWS, epilogue, product, store_part
from slipstream.runners.cuda.kernels.pdl import launch_dependents, pdl_options, wait_for_previous

FEW_TOKENS = 16
FEW = tl.constexpr(FEW_TOKENS)
MAX_TOKENS = 64
WIDE = 5120  # columns of a matrix: from here on more than FEW_TOKENS are worth a kernel of our own
PROCESSORS = 132  # of the GPU that the tilings were measured on


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny(
    x, squares, weight, out, add, norm, normed, normed_squares, partial, arrived,
    num_tokens, num_out, width, num_squares, eps,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, SQUARES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    part = tl.program_id(1)
    steps = width // K
    wait_for_previous()
    if M > FEW:  # measured: early is better there
        launch_dependents()
    tokens = tl.arange(0, M)
    found = None
    if squares is not None:  # loaded while the weights are read
        which = tl.arange(0, SQUARES)[:, None]
        found = tl.load(squares + which * M + tokens[None, :], mask=which < num_squares, other=0.0)
    total = tl.zeros([N, M], tl.float32)
    for step in range(steps * part // SPLIT, steps * (part + 1) // SPLIT):
        total = product(weight.load([block * N, step * K]), x.load([0, step * K]).T, total)
    launch_dependents()
    if SPLIT > 1:
        if not store_part(total, partial, arrived, block, part, SPLIT, N, M):
            return
        in_tile = tl.arange(0, N)[:, None] * M + tokens[None, :]
        base = partial + block.to(tl.int64) * (SPLIT * N * M)
        total = tl.zeros([N, M], tl.float32)
        for other in tl.static_range(SPLIT):
            total += tl.load(base + other * (N * M) + in_tile, cache_modifier=".cg")
        tl.store(arrived + block, 0)
    epilogue(
        total, found, block * N, num_out, tokens, num_tokens, num_out, width, eps,
        out, add, None, norm, normed, None if norm is None else normed_squares + block * M, N, M, GATED,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How a product is divided among programs."""

    rows: int  # of the weight, per program
    inner: int  # columns per step
    stages: int  # steps in flight
    split: int = 1  # programs that share a row block's columns
    warps: int = 4
    prefetch: bool = False  # load the first steps before the wait for the previous kernel: linear_prefetch.py


def padded(num_tokens: int) -> int:
    """The number of tokens that a product of ``num_tokens`` is compiled for; 0: the library's product."""
    return max(FEW_TOKENS, triton.next_power_of_2(num_tokens)) if num_tokens <= MAX_TOKENS else 0


def tile_config(num_out: int, width: int, num_tokens: int) -> TileConfig | None:
    """Tiles of a product with up to FEW_TOKENS or MAX_TOKENS, measured on an H200; None: the library is better.

    Source: log 24, 28, 36 and 37; prefetch: log 112.
    """
    if width % 128 or width < 512 or num_out < 16 or num_tokens > MAX_TOKENS:
        return None
    few = num_tokens <= FEW_TOKENS
    blocks = triton.cdiv(num_out, 64)
    if not few and (width < WIDE or blocks < 64):
        return None
    if num_out > 100_000:
        return TileConfig(128, 128, 6 if few else 4)
    if not few:
        return TileConfig(128, 128, 4) if PROCESSORS < blocks <= 2 * PROCESSORS else TileConfig(64, 128, 6)
    if num_out > 24_000 and width % 256 == 0:
        return TileConfig(64, 256, 5)
    prefetch = num_out <= 24_000 and width < 10_000  # short products; longer ones lose by it
    if blocks > 2 * PROCESSORS:  # three stages leave room for three programs on a processor: all run at once
        return TileConfig(64, 128, 3, prefetch=prefetch)
    if blocks > PROCESSORS:
        return TileConfig(64, 128, 4, prefetch=prefetch)
    return TileConfig(64, 128, 6, split=max(1, min(PROCESSORS // blocks, width // 512, 8)), prefetch=prefetch)


def fitted(
    config: TileConfig, num_tokens: int, item_bytes: int, device: Gpu, weight_bytes: float | None = None
) -> TileConfig | None:
    """With no more stages than a program's shared memory holds; None: it does not hold two.

    ``weight_bytes``: of a weight, where it is not stored as activations are.
    """
    column_bytes = config.rows * (weight_bytes or item_bytes) + num_tokens * item_bytes
    stages = int((device.shared_bytes - 1024) // (column_bytes * config.inner))
    stages += not device.multiplies_from_shared  # one of them is in registers
    return replace(config, stages=min(config.stages, stages)) if stages >= 2 else None


class Scratch:
    """Split-K partial sums and counters, and a matrix unpacked for the library: one for all matrices of a device, since
    products run one by one."""

    def __init__(
        self, device: torch.device, num_floats: int = PROCESSORS * 64 * FEW_TOKENS, num_counters: int = PROCESSORS
    ) -> None:
        self.partial = torch.empty(num_floats, device=device, dtype=torch.float32)
        self.arrived = torch.zeros(num_counters, device=device, dtype=torch.int32)
        self._unpacked: Tensor | None = None

    def unpacked(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Room for a matrix. To be asked for at load: captured steps, and others, then all use the same."""
        size = num_rows * width
        if self._unpacked is None or self._unpacked.numel() < size or self._unpacked.dtype != dtype:
            self._unpacked = None  # before a larger one
            self._unpacked = torch.empty(size, device=self.partial.device, dtype=dtype)
        return self._unpacked[:size].view(num_rows, width)


@dataclass(frozen=True, slots=True)
class Unscaled:
    """Activations after a norm, without the scale of each token: the next product scales its own result."""

    values: Tensor  # [tokens, width]: times the norm's weights
    squares: Tensor  # float32 [parts, tokens as padded]: parts of each token's sum of squares
    eps: float

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


Norm = tuple[Tensor, Tensor, Tensor]  # weights of the norm after a product, and buffers for its values and squares
NoNorm = tuple[None, None, None]
NO_NORM: NoNorm = (None, None, None)


def values_of(x: Tensor | Unscaled) -> Tensor:
    return x.values if isinstance(x, Unscaled) else x


def unscaled_like(x: Tensor, config: TileConfig, eps: float) -> Unscaled:
    """Room for the norm of a product that is shaped like ``x``."""
    num_tokens, num_out = x.shape
    squares = torch.empty(triton.cdiv(num_out, config.rows), padded(num_tokens), device=x.device, dtype=torch.float32)
    return Unscaled(torch.empty_like(x), squares, eps)


def skinny_linear(
    x: Tensor | Unscaled,  # [tokens <= MAX_TOKENS, width], contiguous
    weight: Tensor,  # [num_out, width], contiguous
    config: TileConfig,
    scratch: Scratch,
    add: Tensor | None = None,  # [tokens, num_out], contiguous
) -> Tensor:
    out = values_of(x).new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, config, scratch, out, add)
    return out


def skinny_gated(x: Tensor | Unscaled, weight: Tensor, config: TileConfig, scratch: Scratch) -> Tensor:
    """silu(gate) * up, of a weight whose rows lie as ``interleaved_rows`` says. [tokens, num_out / 2]"""
    out = values_of(x).new_empty(x.shape[0], weight.shape[0] // 2)
    _launch(x, weight, config, scratch, out, gated=True)
    return out


def skinny_normed(
    x: Tensor, weight: Tensor, config: TileConfig, scratch: Scratch, add: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Unscaled]:
    """The product, and the product normalised."""
    assert norm.shape == (add.shape[1],)
    out, normed = torch.empty_like(add), unscaled_like(add, config, eps)
    _launch(x, weight, config, scratch, out, add, norm=(norm, normed.values, normed.squares))
    return out, normed


def interleaved_rows(num_out: int, device: torch.device) -> Tensor:
    """Row numbers that interleave gate and up, INTERLEAVE_ROWS of each at a time; in the matrix gate comes first."""
    assert num_out % (2 * INTERLEAVE_ROWS) == 0
    return torch.arange(num_out, device=device).view(2, -1, INTERLEAVE_ROWS).transpose(0, 1).flatten()


def _launch(
    x: Tensor | Unscaled,
    weight: Tensor,
    config: TileConfig,
    scratch: Scratch,
    out: Tensor,
    add: Tensor | None = None,
    *,
    gated: bool = False,
    norm: Norm | NoNorm = NO_NORM,
) -> None:
    values, squares, eps = (x.values, x.squares, x.eps) if isinstance(x, Unscaled) else (x, None, 0.0)
    num_tokens, width = values.shape
    num_out = weight.shape[0]
    blocks = triton.cdiv(num_out, config.rows)
    padded_tokens = padded(num_tokens)
    num_squares = 0 if squares is None else squares.shape[0]
    assert padded_tokens
    assert values.is_contiguous()
    assert add is None or add.is_contiguous()
    assert squares is None or squares.shape[1] == padded_tokens
    assert config.split == 1 or blocks * config.split * config.rows * padded_tokens <= scratch.partial.numel()
    grid = (blocks, config.split)
    others = (out, add, *norm, scratch.partial, scratch.arrived, num_tokens, num_out, width, num_squares, eps)
    sizes = {"M": padded_tokens, "N": config.rows, "K": config.inner, "SPLIT": config.split, "GATED": gated}
    sizes["SQUARES"] = triton.next_power_of_2(max(1, num_squares))
    if config.prefetch:
        from slipstream.runners.cuda.kernels.matmul.linear_prefetch import launch_prefetch  # no interpreter knows Gluon

        launch_prefetch(grid, values, squares, weight, others, sizes, config.stages)
        return
    _skinny[grid](
        TensorDescriptor(values, [num_tokens, width], [width, 1], [padded_tokens, config.inner]), squares,
        TensorDescriptor(weight, [num_out, width], [width, 1], [config.rows, config.inner]), *others,
        **sizes, num_stages=config.stages, num_warps=config.warps, **pdl_options(out.device),
    )  # fmt: skip
