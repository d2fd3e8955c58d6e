"""Gated DeltaNet in C: a layer's weights and caches as the kernel takes them, and the rows of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engine.contract import MAX_KEEPS
from slipstream.load.spec import GdnSpec
from slipstream.runners.cpu.bindings import Kernels, floats
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.caches import GdnLayerCache
from slipstream.runners.torch.ops import GdnWeights

MAX_DIM = 256  # of a head; as in gdn.h
MAX_KERNEL = 8  # of the conv
MAX_DRAFTS = 64  # of a row in a step

_POINTERS = ("conv", "decay_scale", "dt_bias", "norm", "state", "window", "tape_conv", "tape_gates")
_SIZES = ("num_k_heads", "num_v_heads", "k_dim", "v_dim", "kernel", "depth", "tiled")


def fits(gdn: GdnSpec) -> bool:
    """Whether the kernel takes heads of this size. The published models' have 128."""
    return max(gdn.k_dim, gdn.v_dim) <= MAX_DIM and gdn.conv_kernel <= MAX_KERNEL


class _GdnLayer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _SIZES),
        ("eps", ctypes.c_float),
    )


class GdnLayer:
    """Holds the tensors that the C struct points to."""

    def __init__(self, weights: GdnWeights, cache: GdnLayerCache) -> None:
        gdn = weights.spec
        depth = cache.tape_conv.shape[1]
        assert fits(gdn)
        assert depth <= MAX_DRAFTS
        assert gdn.num_v_heads % gdn.num_k_heads == 0
        assert weights.conv.shape == (gdn.conv_kernel, gdn.conv_channels)
        self._kept = (weights, cache)
        self.num_in = gdn.conv_channels + gdn.num_v_heads * (gdn.v_dim + 2)
        self.num_out = gdn.num_v_heads * gdn.v_dim
        own = (weights.conv, weights.decay_scale, weights.dt_bias, weights.norm)
        caches = (cache.state, cache.window, cache.tape_conv, cache.tape_gates)
        self._struct = _GdnLayer(
            *(floats(tensor) for tensor in (*own, *caches)),
            gdn.num_k_heads, gdn.num_v_heads, gdn.k_dim, gdn.v_dim, gdn.conv_kernel, depth, gdn.tiled,
            weights.eps,
        )  # fmt: skip
        self.address = ctypes.addressof(self._struct)

    def run(self, kernels: Kernels, mixed: Tensor, rows: Sequence[RowSpan]) -> Tensor:
        """mixed: [tokens, conv channels, z, b, a] -> [tokens, v heads * v dim]; commits as ``gdn_mix`` does."""
        assert mixed.shape[1] == self.num_in
        assert sum(row.num_fed for row in rows) == mixed.shape[0]
        return kernels.gdn(self.address, mixed, row_table(rows), torch.empty(mixed.shape[0], self.num_out))


def row_table(rows: Sequence[RowSpan]) -> Tensor:
    """The rows of a step as gdn.h has them. int32 [rows, 6 + 2 * MAX_KEEPS]"""
    return torch.tensor([_row_fields(row) for row in rows], dtype=torch.int32)


def _row_fields(row: RowSpan) -> list[int]:
    kept = row.kept_states
    padding = [0] * (MAX_KEEPS - len(kept))
    sizes = [row.slot, row.offset, row.num_committed, row.num_drafts, row.num_replay, len(kept)]
    return [*sizes, *(count for count, _ in kept), *padding, *(slot for _, slot in kept), *padding]
