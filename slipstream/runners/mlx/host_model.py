"""MLX for the host-driven step: an mlx-lm model and its MTP head in grids over one buffer a layer.

Everything is lazy: a step's work is queued and runs when the host reads the samples. No name may hold a cache's array
across a step: the next write would have to copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx

from slipstream.engine.contract import HostBuffers, RowJoin, Transfer
from slipstream.runners.host.rows import Row, RowSampling
from slipstream.runners.logprobs import Numbers
from slipstream.runners.masks import StepMasks
from slipstream.runners.mlx.block_store import BlockStore
from slipstream.runners.mlx.caches import FeedHolder, KvCache
from slipstream.runners.mlx.grid import Grids, make_grids
from slipstream.runners.mlx.mtp import MtpHead
from slipstream.runners.mlx.sampling.logprobs import token_logprobs
from slipstream.runners.mlx.sampling.processors import processors_for, truncation_for
from slipstream.runners.mlx.sampling.sample import apply_masks, process, sample
from slipstream.runners.mlx.target import Cache, OpenTarget, TargetModel
from slipstream.runners.rows import RowSpan
from slipstream.sampling.params import SamplingParams


class MlxModel:
    def __init__(
        self,
        target: TargetModel,
        caches: Sequence[Cache],
        head_cache: KvCache | None,
        holder: FeedHolder,
        max_depth: int,
        pads: bool,
    ) -> None:
        """``pads``: whether rows that feed different numbers of tokens may share a grid."""
        self.host: HostBuffers | None = None
        self.target = target
        self.caches = caches
        self.head_cache = head_cache
        self.holder = holder
        self.blocks: BlockStore | None = None  # with a prefix cache: what rows keep for others
        self.reads_are_cheap = mx.default_device().type == mx.DeviceType.cpu
        self._max_short = 1 + max_depth
        self._pads = pads
        self._slots: list[int] = []  # by row of the buffers: always 0, 1, 2, ... without a gap
        self._kept: list[tuple[int, int]] = []  # slots that keep something in this step, and the positions

    @property
    def all_caches(self) -> list[Cache]:
        return [*self.caches, *([self.head_cache] if self.head_cache is not None else [])]

    def stepping(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def join(self, join: RowJoin) -> None:
        self._slots.append(join.slot)
        source = join.start.state_of
        if source is not None and source in self._slots:
            self._fork(source, join)
        elif self.blocks is not None:
            self._start(join, self.blocks)

    def _fork(self, source: int, join: RowJoin) -> None:
        """From another row."""
        for cache in self.all_caches:
            cache.fork(source, join.slot, self._slots.index(source), len(self._slots) - 1)
        if self.blocks is not None:
            self.blocks.fork(source, join.slot, join.start.blocks)

    def _start(self, join: RowJoin, blocks: BlockStore) -> None:
        """From what a row kept, or from nothing."""
        blocks.join(join.slot, join.start.blocks)
        if not join.start.num_computed:
            return
        blocks.load(join.slot, len(self._slots) - 1)
        for cache in self.all_caches:
            if not isinstance(cache, KvCache):
                assert join.start.state_of is not None
                cache.start(join.start.state_of, join.slot)

    def leave(self, slot: int) -> None:
        """The buffers' last row takes its place."""
        for cache in self.all_caches:
            cache.leave(slot)
        if self.blocks is not None:
            self.blocks.leave(slot)
        row, last = self._slots.index(slot), len(self._slots) - 1
        if row != last:
            for cache in self.all_caches:
                cache.move(last, row)
            self._slots[row] = self._slots[last]
        self._slots.pop()

    def grow(self, slot: int, blocks: tuple[int, ...]) -> None:
        """Buffers are dense: a row has room for the whole context. Only what it keeps for others lies in blocks."""
        if self.blocks is not None:
            self.blocks.grow(slot, blocks)

    def save(self, transfer: Transfer) -> None:
        raise NotImplementedError("memory is unified: there is no other to copy to")

    def load(self, transfer: Transfer) -> None:
        raise NotImplementedError("memory is unified: there is no other to copy from")

    def lay_out(self, spans: Sequence[RowSpan]) -> Grids:
        return make_grids(spans, [self._slots.index(span.slot) for span in spans], self._max_short, self._pads)

    def forward(self, tokens: Sequence[int], batch: Grids) -> mx.array:
        flat = mx.array(list(tokens), dtype=mx.int32)
        spans = [span for grid in batch.grids for span in grid.feed.spans]
        self._kept = [(span.slot, keep.position) for span in spans for keep in span.keeps]
        parts = []
        for grid in batch.grids:
            self.holder.set(grid.feed)
            parts.append(self.target.forward(grid.lay(flat), self.caches))
        return batch.flatten(parts)

    def logits(self, hidden: mx.array) -> mx.array:
        return self.target.unembed(hidden).astype(mx.float32)

    def processors_for(self, params: SamplingParams) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return processors_for(params), truncation_for(params)

    def process(
        self, logits: mx.array, rows: Sequence[Row], spans: Sequence[RowSpan], masks: StepMasks | None
    ) -> mx.array:
        return process(logits, rows, spans, masks)

    def mask(self, logits: mx.array, index: Sequence[int], masks: Sequence[bytes]) -> mx.array:
        return apply_masks(logits, index, masks)

    def sample(self, logits: mx.array, sampling: Sequence[RowSampling], positions: Sequence[int]) -> mx.array:
        return sample(logits, sampling, positions)

    def confidence(self, logits: mx.array) -> mx.array:
        return mx.softmax(logits, axis=-1).max(axis=-1)

    def log_softmax(self, logits: mx.array) -> mx.array:
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def token_logprobs(self, logprobs: mx.array, tokens: Sequence[int], num_top: int) -> list[Numbers]:
        return token_logprobs(logprobs, mx.array(list(tokens), dtype=mx.int32), num_top)

    def take(self, values: mx.array, index: Sequence[int]) -> mx.array:
        return values[mx.array(list(index), dtype=mx.int32)]

    def concatenate(self, parts: Sequence[mx.array]) -> mx.array:
        return mx.concatenate(list(parts))

    def read(self, values: mx.array) -> list[Any]:
        numbers: Any = values.tolist()
        return list(numbers)

    def wait(self, values: mx.array) -> None:
        mx.eval(values)

    def finish(self) -> None:
        mx.eval([array for cache in self.all_caches for array in cache.arrays()], self.holder.kept)
        self.holder.kept.clear()
        for slot, position in self._kept:
            assert self.blocks is not None
            self.blocks.save(slot, self._slots.index(slot), position)
        self._kept.clear()


class MlxHead:
    def __init__(
        self,
        model: MlxModel,
        target: OpenTarget,
        head: MtpHead,
        output: Callable[[mx.array], mx.array],
        vocab_size: int,
    ) -> None:
        """``output``: of the first ``vocab_size`` tokens."""
        self.vocab_size = vocab_size
        self._model = model
        self._target = target
        self._head = head
        self._output = output

    def forward(self, hidden: mx.array, tokens: Sequence[int] | mx.array, batch: Grids) -> mx.array:
        cache = self._model.head_cache
        assert cache is not None
        flat = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), dtype=mx.int32)
        parts = []
        for grid in batch.grids:
            self._model.holder.set(grid.feed)
            parts.append(self._head(self._target.embed(grid.lay(flat)), grid.lay(hidden), cache))
        return batch.flatten(parts)

    def logits(self, hidden: mx.array) -> mx.array:
        return self._output(hidden).astype(mx.float32)
