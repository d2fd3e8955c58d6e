"""Host memory of the prefix cache: copies of KV blocks and of recurrent states, a contiguous piece each.

Next to a GPU it is pinned. Copies out leave the stream of steps at once: what they read is gathered there first, and
the way to the host goes beside the steps. Copies in are part of the stream, before the steps that need them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slipstream.engine.contract import Transfer
from slipstream.runners.torch.caches import GdnCache, GdnRings, PagedKv

LOADED_BLOCKS = 256  # copied in together


class HostMemory:
    def __init__(self, kv: PagedKv, gdn: GdnCache | GdnRings | None, num_blocks: int, num_states: int) -> None:
        self._kv, self._kept = kv.buffer, gdn.kept if gdn else ()
        layers, two, _, *block = kv.buffer.shape
        self._on_gpu = kv.buffer.device.type == "cuda"
        self._beside = torch.cuda.Stream(kv.buffer.device) if self._on_gpu else None
        # [blocks, layers, keys and values, kv heads, block size, head dim]
        self._blocks = torch.empty(num_blocks, layers, two, *block, dtype=kv.buffer.dtype, pin_memory=self._on_gpu)
        size = -(-sum(_slot_bytes(values) for values in self._kept) // 64) * 64  # so that each is aligned
        self._states = torch.empty(num_states if self._kept else 0, size, dtype=torch.uint8, pin_memory=self._on_gpu)

    @property
    def block_bytes(self) -> int:
        return self._blocks[0].nbytes

    @property
    def state_bytes(self) -> int:
        return self._states.shape[1]

    def block(self, index: int) -> memoryview:
        return self._blocks[index].reshape(-1).view(torch.uint8).numpy().data

    def state(self, index: int) -> memoryview:
        return self._states[index].numpy().data

    def wait(self) -> None:
        """For all copies out. Any thread may call it."""
        if self._beside is not None:
            self._beside.synchronize()

    def save(self, transfer: Transfer) -> None:
        if transfer.blocks:
            gathered = self._kv.index_select(2, self._index(transfer.blocks)).movedim(2, 0).contiguous()
            self._out((self._blocks[host], gathered[at]) for host, at in _runs(transfer.host_blocks))
        if transfer.state is not None and transfer.host_state is not None:
            target = self._states[transfer.host_state]
            parts = [values[:, transfer.state].contiguous() for values in self._kept]
            self._out(zip(self._parts(target), parts, strict=True))

    def _out(self, copies: Iterator[tuple[Tensor, Tensor]]) -> None:
        if self._beside is None:
            for target, source in copies:
                target.copy_(source)
            return
        self._beside.wait_stream(torch.cuda.current_stream(self._kv.device))
        with torch.cuda.stream(self._beside):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._beside)

    def load(self, transfer: Transfer) -> None:
        if self._beside is not None:
            torch.cuda.current_stream(self._kv.device).wait_stream(self._beside)
        for first in range(0, len(transfer.blocks), LOADED_BLOCKS):
            blocks = transfer.blocks[first : first + LOADED_BLOCKS]
            runs = _runs(transfer.host_blocks[first : first + LOADED_BLOCKS])
            here = [self._blocks[host].to(self._kv.device, non_blocking=True) for host, _ in runs]
            self._kv.index_copy_(2, self._index(blocks), torch.cat(here).movedim(0, 2))
        if transfer.state is not None and transfer.host_state is not None:
            for values, part in zip(self._kept, self._parts(self._states[transfer.host_state]), strict=True):
                values[:, transfer.state] = part.to(values.device, non_blocking=True)

    def _parts(self, state: Tensor) -> list[Tensor]:
        """A host state as the caches have it. [layers, ...] each"""
        parts, first = [], 0
        for values in self._kept:
            size = _slot_bytes(values)
            parts.append(state[first : first + size].view(values.dtype).view(values.shape[0], *values.shape[2:]))
            first += size
        return parts

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self._kv.device, non_blocking=True)


def _slot_bytes(values: Tensor) -> int:
    """Of one slot, all layers."""
    return values.shape[0] * math.prod(values.shape[2:]) * values.itemsize


def _runs(blocks: Sequence[int]) -> list[tuple[slice, slice]]:
    """Consecutive ones together, as a copy each: in host memory, and among these blocks."""
    starts = [i for i in range(len(blocks)) if i == 0 or blocks[i] != blocks[i - 1] + 1]
    ends = [*starts[1:], len(blocks)]
    return [(slice(blocks[a], blocks[a] + b - a), slice(a, b)) for a, b in zip(starts, ends, strict=True)]
