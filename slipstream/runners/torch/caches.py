"""The caches of a stream on the device: paged KV, and for recurrent layers one committed state and a tape.

Buffers are allocated once and never move. A KV write beyond a row's cursor is harmless: it is overwritten before it is
read. A recurrent layer cannot forget, so its state stands after the last *committed* token and the raw inputs of the
drafts after it lie on a tape; the next step replays those that were accepted. Knows slots, not requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.load.spec import GdnSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's share of the paged cache."""

    k: Tensor  # [blocks, kv heads, block size, head dim]
    v: Tensor  # [blocks, kv heads, block size, head dim]


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
        shape = (num_layers, 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        # Filled, not merely reserved: the memory plan is true from the first second, and no masked value is NaN.
        self.buffer = torch.empty(shape, device=device, dtype=dtype).zero_()
        self.layers = [LayerKv(k=layer[0], v=layer[1]) for layer in self.buffer]

    def copy(self, source: int, target: int) -> None:
        """One block's content to another, in all layers."""
        self.buffer[:, :, target] = self.buffer[:, :, source]


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


@dataclass(frozen=True, slots=True)
class GdnRingLayer:
    state: Tensor  # float32 [slots and state slots, v heads, k dim, v dim]: after the last committed token
    ring: Tensor  # [slots and state slots, ring size, conv channels + 2 * v heads]: raw q, k, v, b, a by position


def ring_size(max_depth: int) -> int:
    """A step reads the window and replayed drafts, and writes a token and its drafts: all in distinct entries."""
    needed = (CONV_KERNEL - 1) + max_depth + (1 + max_depth)
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
    ) -> None:
        """``num_states``: state slots, numbered after the rows' own."""
        assert gdn.conv_kernel == CONV_KERNEL
        slots = (num_layers, num_slots + num_states)
        sizes = (gdn.num_v_heads, gdn.k_dim, gdn.v_dim)
        states = torch.zeros(*slots, *sizes, device=device, dtype=torch.float32)
        width = gdn.conv_channels + 2 * gdn.num_v_heads
        rings = torch.zeros(*slots, ring_size(max_depth), width, device=device, dtype=dtype)
        self.kept = (states, rings)  # [layers, slots and state slots, ...] each: what a row continues from
        self.layers = [GdnRingLayer(state, ring) for state, ring in zip(states, rings, strict=True)]

    def copy(self, source: int, target: int) -> None:
        """A slot begins as a copy of another."""
        for values in self.kept:
            values[:, target] = values[:, source]


def ring_bytes(gdn: GdnSpec, num_layers: int, max_depth: int, item: int) -> int:
    """Of one slot, all layers."""
    state = gdn.num_v_heads * gdn.v_dim * gdn.k_dim * 4
    return num_layers * (state + ring_size(max_depth) * (gdn.conv_channels + 2 * gdn.num_v_heads) * item)


RecurrentCache = GdnLayerCache | GdnRingLayer
LayerCache = LayerKv | RecurrentCache
