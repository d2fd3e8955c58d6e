"""Recurrent state on a GPU: one committed state per slot and a ring of raw inputs by position.

The ring is window and tape in one: the conv reads the three inputs before a token, and the drafts that were accepted
last step are replayed from it. Like the KV cache it is written ahead and overwritten before it is read, so nothing is
rolled back, and a slot needs no reset: a row at position 0 starts from zeros by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.load.spec import GdnSpec

CONV_KERNEL = 4  # what the kernel is written for


@dataclass(frozen=True, slots=True)
class GdnRingLayer:
    state: Tensor  # float32 [slots, v heads, v dim, k dim]: after the last certain token
    ring: Tensor  # [slots, ring size, conv channels + 2 * v heads]: raw q, k, v, b, a by position


def ring_size(max_depth: int) -> int:
    """A step reads the window and what it replays, and writes a token and its drafts: none of them may meet."""
    needed = (CONV_KERNEL - 1) + max_depth + (1 + max_depth)
    return 1 << (needed - 1).bit_length()


class GdnRings:
    def __init__(
        self, gdn: GdnSpec, num_layers: int, num_slots: int, max_depth: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        assert gdn.conv_kernel == CONV_KERNEL
        width = gdn.conv_channels + 2 * gdn.num_v_heads
        self.layers = [
            GdnRingLayer(
                state=torch.zeros(num_slots, gdn.num_v_heads, gdn.v_dim, gdn.k_dim, device=device, dtype=torch.float32),
                ring=torch.zeros(num_slots, ring_size(max_depth), width, device=device, dtype=dtype),
            )
            for _ in range(num_layers)
        ]


def state_bytes(gdn: GdnSpec, num_layers: int, max_depth: int, item: int) -> int:
    """Of one slot, all layers."""
    state = gdn.num_v_heads * gdn.v_dim * gdn.k_dim * 4
    return num_layers * (state + ring_size(max_depth) * (gdn.conv_channels + 2 * gdn.num_v_heads) * item)
