"""A stack of Llama-like decoder layers as one call into the C kernels: no Python between the kernels of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.runners.torch.cpu.ops import Kernels, PackedWeight, Tensor

_POINTERS = (
    *("attention_norm", "mlp_norm", "qkv", "o", "gate_up", "down"),
    *("qkv_bias", "o_bias", "q_norm", "k_norm", "k_cache", "v_cache"),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer and its caches. Norm weights as they are applied (1 + w where a family does so)."""

    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    qkv: PackedWeight  # rows: all queries, all keys, all values
    o: PackedWeight
    gate_up: PackedWeight  # rows: gate, up
    down: PackedWeight
    k_cache: Tensor  # [num_blocks, Hkv, block_size, D]
    v_cache: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None


class _Layer(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _POINTERS)


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "positions", "token_slot", "block_table", "cos", "sin")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_heads", "num_kv_heads", "dim", "rot")),
        *((name, ctypes.c_int32) for name in ("block_size", "max_blocks")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class LayerStack:
    """Consecutive layers of one shape, with their rotary tables. Same bits as the single operations."""

    def __init__(self, kernels: Kernels, layers: Sequence[Layer], cos: Tensor, sin: Tensor, eps: float, scale: float):
        self._kernels, self._layers, self._tables = kernels, tuple(layers), (cos, sin)
        self._eps, self._scale = eps, scale
        self._structs = (_Layer * len(layers))(*(_Layer(*(_address(layer, n) for n in _POINTERS)) for layer in layers))
        _, self._kv_heads, self._block_size, self._dim = layers[0].k_cache.shape
        self._heads = layers[0].o.cols // self._dim
        self._check()

    def _check(self) -> None:
        cos, sin = self._tables
        assert cos.shape == sin.shape
        assert self._heads % self._kv_heads == 0
        for layer in self._layers:
            hidden = layer.qkv.cols
            assert layer.k_cache.shape == layer.v_cache.shape == self._layers[0].k_cache.shape
            assert layer.attention_norm.shape == layer.mlp_norm.shape == (hidden,)
            assert layer.qkv.rows == (self._heads + 2 * self._kv_heads) * self._dim
            assert (layer.o.cols, layer.o.rows) == (self._heads * self._dim, hidden)
            assert (layer.gate_up.cols, layer.gate_up.rows) == (hidden, 2 * layer.down.cols)
            assert layer.down.rows == hidden
            assert (layer.q_norm is None) == (layer.k_norm is None)

    def run(self, x: Tensor, positions: Tensor, token_slot: Tensor, block_table: Tensor) -> Tensor:
        """x: [T, hidden], changed in place; the rest int32: [T], [T], [slots, max_blocks]."""
        num_tokens = x.shape[0]
        cos, sin = self._tables
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        assert x.shape[1] == self._layers[0].qkv.cols
        for index in (positions, token_slot, block_table):
            assert index.dtype == torch.int32
            assert index.is_contiguous()
        assert positions.shape == token_slot.shape == (num_tokens,)
        step = _Step(
            x.data_ptr(), positions.data_ptr(), token_slot.data_ptr(), block_table.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), num_tokens, self._heads, self._kv_heads, self._dim,
            2 * cos.shape[1], self._block_size, block_table.shape[1], self._eps, self._scale,
        )  # fmt: skip
        self._kernels.run_layers(ctypes.addressof(self._structs), len(self._layers), ctypes.addressof(step))
        return x


def _address(layer: Layer, name: str) -> int | None:
    value: Tensor | PackedWeight | None = getattr(layer, name)
    if value is None or isinstance(value, PackedWeight):
        return value.address if value is not None else None
    assert value.dtype == torch.float32
    assert value.is_contiguous()
    return value.data_ptr()
