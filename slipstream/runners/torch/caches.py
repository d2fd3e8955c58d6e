"""The caches of a stream on the device: paged KV, and for recurrent layers one committed state and a tape.

Buffers are allocated once and never move. A KV write beyond a row's cursor is harmless: it is overwritten before it is
read. A recurrent layer cannot forget, so its state stands after the last *committed* token and the raw inputs of the
drafts after it lie on a tape; the next step replays those that were accepted. Knows slots, not requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.load.spec import GdnSpec, ModelSpec

# Keys and values may be FP8 (e4m3) codes, a byte each, and one scale for those of a head at a position. It makes 256 of
# the largest magnitude: codes reach 448, so none is cut off. It depends on nothing but these numbers themselves, so a
# token has the same codes whatever runs beside it. It has 8 significant bits and a code has 4: their product is exact
# in float32. Decision 21 has the reasons; the kernels of cpu/ and cuda/ have the same codes.

FP8 = torch.float8_e4m3fn
SCALE = torch.bfloat16
LARGEST = 256.0  # what the largest magnitude becomes
LEAST_SCALE = 2.0**-126  # of numbers that are all zero, or nearly so


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """values: [..., dim] -> codes, uint8 [..., dim]; scales, bfloat16 [...]"""
    values = values.float()
    scale = (values.abs().amax(-1) / LARGEST).to(SCALE).clamp(min=LEAST_SCALE)
    return (values / scale.float()[..., None]).to(FP8).view(torch.uint8), scale


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., dim]"""
    return codes.view(FP8).float() * scale.float()[..., None]


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's share of the paged cache: floats, or codes and a scale for those of a head at a position."""

    k: Tensor  # [blocks, kv heads, block size, head dim]
    v: Tensor  # [blocks, kv heads, block size, head dim]
    k_scale: Tensor | None = None  # bfloat16 [blocks, kv heads, block size], beside codes
    v_scale: Tensor | None = None

    def write(self, block: Tensor, at: Tensor, k: Tensor, v: Tensor) -> None:
        """block, at: int64 [tokens]: their blocks, and where in them; k, v: [tokens, kv heads, head dim]"""
        for values, codes, scale in ((k, self.k, self.k_scale), (v, self.v, self.v_scale)):
            if scale is None:
                codes[block, :, at] = values
            else:
                codes[block, :, at], scale[block, :, at] = encode(values)

    def read(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of these blocks. [blocks, kv heads, block size, head dim] each"""
        if self.k_scale is None or self.v_scale is None:
            return self.k[blocks], self.v[blocks]
        k, v = decode(self.k[blocks], self.k_scale[blocks]), decode(self.v[blocks], self.v_scale[blocks])
        return k.to(dtype), v.to(dtype)


class PagedKv:
    """One buffer for all attention layers, the draft head's layer included."""

    def __init__(
        self,
        spec: ModelSpec,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """``dtype``: FP8: codes, and after those of a block their scales, so that a block is one piece of memory."""
        sizes = (spec.num_kv_heads, block_size, spec.head_dim)
        coded = dtype == FP8
        block = (kv_bytes(spec.num_kv_heads * block_size, spec.head_dim, FP8),) if coded else sizes
        shape = (num_layers, 2, num_blocks, *block)
        # Filled, not merely reserved: the memory plan is true from the first second, and no masked value is NaN.
        self.buffer = torch.empty(shape, device=device, dtype=torch.uint8 if coded else dtype).zero_()
        self.layers = [coded_layer(layer, sizes) if coded else LayerKv(k=layer[0], v=layer[1]) for layer in self.buffer]

    def copy(self, source: int, target: int) -> None:
        """One block's content to another, in all layers."""
        self.buffer[:, :, target] = self.buffer[:, :, source]


def coded_layer(blocks: Tensor, sizes: tuple[int, int, int]) -> LayerKv:
    """blocks: uint8 [keys and values, blocks, bytes of a block]"""
    num_codes = math.prod(sizes)
    codes = blocks[..., :num_codes].unflatten(-1, sizes)
    scales = blocks[..., num_codes:].view(SCALE).unflatten(-1, sizes[:2])
    return LayerKv(codes[0], codes[1], scales[0], scales[1])


def kv_bytes(num_rows: int, dim: int, dtype: torch.dtype) -> int:
    """Of keys or values. ``num_rows``: heads times positions."""
    return num_rows * (dim * dtype.itemsize + (SCALE.itemsize if dtype == FP8 else 0))


@dataclass(frozen=True, slots=True)
class GdnLayerCache:
    state: Tensor  # [slots and state slots, v heads, k dim, v dim], float32: after the last committed token
    window: Tensor  # [slots and state slots, conv kernel - 1, channels]: conv inputs before the next token
    tape_conv: Tensor  # [slots, max depth, channels]: raw conv inputs of the last step's drafts
    tape_gates: Tensor  # [slots, max depth, 2, v heads], float32: their decay and beta

    def copy(self, source: int, target: int) -> None:
        """For a slot that has no drafts to replay."""
        self.state[target] = self.state[source]
        self.window[target] = self.window[source]


class GdnCache:
    def __init__(
        self,
        gdn: GdnSpec,
        num_layers: int,
        num_slots: int,
        num_states: int,
        max_depth: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """``num_states``: state slots, numbered after the rows' own."""
        wide = torch.promote_types(dtype, torch.float32)
        depth, slots = max(1, max_depth), (num_layers, num_slots + num_states)
        zeros = partial(torch.zeros, device=device)
        states = zeros(*slots, gdn.num_v_heads, gdn.k_dim, gdn.v_dim, dtype=wide)
        windows = zeros(*slots, gdn.conv_kernel - 1, gdn.conv_channels, dtype=dtype)
        self.kept = (states, windows)  # [layers, slots and state slots, ...] each: what a row continues from
        self.layers = [
            GdnLayerCache(
                state=state,
                window=window,
                tape_conv=zeros(num_slots, depth, gdn.conv_channels, dtype=dtype),
                tape_gates=zeros(num_slots, depth, 2, gdn.num_v_heads, dtype=wide),
            )
            for state, window in zip(states, windows, strict=True)
        ]

    def reset(self, slot: int) -> None:
        for values in self.kept:
            values[:, slot].zero_()

    def copy(self, source: int, target: int) -> None:
        for values in self.kept:
            values[:, target] = values[:, source]


# On a GPU window and tape are one ring of raw inputs by position. Like the KV cache it is written ahead and is
# overwritten before it is read, so a slot needs no reset: a row at position 0 starts from zeros by itself.

CONV_KERNEL = 4  # the size that the kernel is written for
DEFERRED = 3  # steps of one token that a state may be stored late. Source: log 248


@dataclass(frozen=True, slots=True)
class GdnRingLayer:
    state: Tensor  # [slots and state slots, v heads, k dim, v dim]: lacks as many committed tokens as a row replays
    ring: Tensor  # [slots and state slots, ring size, conv channels + 2 * v heads]: raw q, k, v, b, a by position


def max_replay(max_depth: int) -> int:
    """How many committed tokens a state may lack: accepted drafts, or tokens after which it was not stored."""
    return max(max_depth, DEFERRED)


def ring_size(max_depth: int) -> int:
    """A step reads the window and replayed tokens, and writes a token and its drafts: all in distinct entries."""
    needed = (CONV_KERNEL - 1) + max_replay(max_depth) + (1 + max_depth)
    return 1 << (needed - 1).bit_length()


class GdnRings:
    def __init__(
        self,
        gdn: GdnSpec,
        num_layers: int,
        num_slots: int,
        num_states: int,
        max_depth: int,
        device: torch.device,
        dtype: torch.dtype,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        """``num_states``: state slots, numbered after the rows' own. ``dtype``: of the ring."""
        assert gdn.conv_kernel == CONV_KERNEL
        slots = (num_layers, num_slots + num_states)
        sizes = (gdn.num_v_heads, gdn.k_dim, gdn.v_dim)
        states = torch.zeros(*slots, *sizes, device=device, dtype=state_dtype)
        width = gdn.conv_channels + 2 * gdn.num_v_heads
        rings = torch.zeros(*slots, ring_size(max_depth), width, device=device, dtype=dtype)
        self.kept = (states, rings)  # [layers, slots and state slots, ...] each: what a row continues from
        self.layers = [GdnRingLayer(state, ring) for state, ring in zip(states, rings, strict=True)]

    def copy(self, source: int, target: int) -> None:
        """A slot begins as a copy of another."""
        for values in self.kept:
            values[:, target] = values[:, source]


def ring_bytes(gdn: GdnSpec, num_layers: int, max_depth: int, item: int, state_item: int) -> int:
    """Of one slot, all layers. ``item``: bytes of a number in the ring"""
    state = gdn.num_v_heads * gdn.v_dim * gdn.k_dim * state_item
    return num_layers * (state + ring_size(max_depth) * (gdn.conv_channels + 2 * gdn.num_v_heads) * item)


RecurrentCache = GdnLayerCache | GdnRingLayer
LayerCache = LayerKv | RecurrentCache
