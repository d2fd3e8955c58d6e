"""A stack of decoder layers as one call into the C kernels: no Python between the kernels of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.runners.cpu.bindings import Kernels, caches, coded
from slipstream.runners.cpu.experts import PackedExperts
from slipstream.runners.cpu.gdn import GdnLayer, row_table
from slipstream.runners.cpu.packed import PackedWeight
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.ops import HeadShape, Rotary

_POINTERS = (
    *("mixer_norm", "mlp_norm", "entry", "out", "gate_up", "down", "router"),
    *("entry_bias", "out_bias", "q_norm", "k_norm", "k_cache", "v_cache", "gdn", "moe"),
)

_CACHES = ("k_cache", "v_cache")


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer and its caches. Norm weights as they are applied (1 + w where a family does so)."""

    mixer_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    entry: PackedWeight  # rows: queries, keys, values, gate; or the inputs of Gated DeltaNet
    out: PackedWeight
    gate_up: PackedWeight  # rows: gate, up; of the dense MLP or the shared expert
    down: PackedWeight
    k_cache: Tensor | None = None  # [num_blocks, Hkv, block_size, D], floats or codes
    v_cache: Tensor | None = None
    entry_bias: Tensor | None = None
    out_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None
    gdn: GdnLayer | None = None  # instead of attention and its caches
    router: PackedWeight | None = None  # rows: experts, the shared expert's gate
    experts: PackedExperts | None = None
    num_active: int = 0

    @property
    def moe(self) -> int | None:
        return None if self.experts is None else self.experts.address(self.num_active)


@dataclass(frozen=True, slots=True)
class StackShape:
    """Shared by the layers of a stack."""

    heads: HeadShape
    rotary: Rotary
    eps: float


class _Layer(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _POINTERS)


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "positions", "rope_positions", "token_slot", "block_table")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "rows")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_rows", "num_heads", "num_kv_heads", "dim", "rot")),
        *((name, ctypes.c_int32) for name in ("block_size", "max_blocks", "coded_kv")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class LayerStack:
    """Consecutive layers, with their rotary tables. Same bits as the single operations."""

    def __init__(self, kernels: Kernels, layers: Sequence[Layer], shape: StackShape) -> None:
        self._kernels, self._layers, self._shape = kernels, tuple(layers), shape
        self._structs = (_Layer * len(layers))(*(_Layer(*(_address(layer, n) for n in _POINTERS)) for layer in layers))
        keys = [layer.k_cache for layer in layers if layer.k_cache is not None]
        self._block_size = keys[0].shape[2] if keys else 1
        self._coded_kv = bool(keys) and coded(keys[0])
        for layer in layers:
            self._check(layer)
        assert len({(cache.shape, cache.dtype) for cache in keys}) <= 1

    def _check(self, layer: Layer) -> None:
        hidden, heads = layer.entry.cols, self._shape.heads
        assert layer.mixer_norm.shape == layer.mlp_norm.shape == (hidden,)
        assert layer.out.rows == layer.down.rows == hidden
        assert (layer.gate_up.cols, layer.gate_up.rows) == (hidden, 2 * layer.down.cols)
        assert (layer.q_norm is None) == (layer.k_norm is None)
        if layer.experts is not None:
            assert layer.router is not None
            assert (layer.router.cols, layer.experts.hidden) == (hidden, hidden)
        if layer.gdn is not None:
            assert (layer.entry.rows, layer.out.cols) == (layer.gdn.num_in, layer.gdn.num_out)
            return
        assert layer.k_cache is not None
        assert layer.v_cache is not None
        assert (layer.k_cache.shape[1], layer.k_cache.shape[3]) == (heads.num_kv, heads.dim)
        assert layer.entry.rows - heads.qkv_width in (0, heads.num_q * heads.dim)  # the gate
        assert layer.out.cols == heads.num_q * heads.dim

    def run(
        self,
        x: Tensor,  # [T, hidden], changed in place
        positions: Tensor,  # int32 [T]: in the cache
        rope_positions: Tensor,  # int32 [T]: of the rotation
        token_slot: Tensor,  # int32 [T]
        block_table: Tensor,  # int32 [slots, max_blocks]
        rows: Sequence[RowSpan] = (),  # for recurrence
    ) -> Tensor:
        num_tokens = x.shape[0]
        heads, rotary = self._shape.heads, self._shape.rotary
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        assert x.shape[1] == self._layers[0].entry.cols
        for index in (positions, rope_positions, token_slot, block_table):
            assert index.dtype == torch.int32
            assert index.is_contiguous()
        assert positions.shape == rope_positions.shape == token_slot.shape == (num_tokens,)
        table = row_table(rows)
        step = _Step(
            x.data_ptr(), positions.data_ptr(), rope_positions.data_ptr(), token_slot.data_ptr(),
            block_table.data_ptr(), rotary.cos.data_ptr(), rotary.sin.data_ptr(), table.data_ptr(),
            num_tokens, len(rows), heads.num_q, heads.num_kv, heads.dim,
            2 * rotary.cos.shape[1], self._block_size, block_table.shape[1], self._coded_kv,
            self._shape.eps, heads.dim**-0.5,
        )  # fmt: skip
        self._kernels.run_layers(ctypes.addressof(self._structs), len(self._layers), ctypes.addressof(step))
        return x


def _address(layer: Layer, name: str) -> int | None:
    value: Tensor | PackedWeight | GdnLayer | int | None = getattr(layer, name)
    if name in _CACHES and layer.k_cache is not None and layer.v_cache is not None:
        return caches(layer.k_cache, layer.v_cache)[_CACHES.index(name)]
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, PackedWeight | GdnLayer):
        return value.address
    assert value.dtype == torch.float32
    assert value.is_contiguous()
    return value.data_ptr()
