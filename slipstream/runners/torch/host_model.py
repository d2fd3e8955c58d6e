"""PyTorch for the host-driven step: a decoder and its MTP head over paged caches.

On a CPU with our kernels; on any device with PyTorch's own operations, which is slow and right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.contract import HostBuffers, RowJoin, Transfer
from slipstream.runners.host.rows import Row, RowSampling
from slipstream.runners.logprobs import Numbers
from slipstream.runners.masks import StepMasks
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.batch import RaggedBatch, make_batch
from slipstream.runners.torch.caches import GdnCache, PagedKv
from slipstream.runners.torch.host_memory import HostMemory
from slipstream.runners.torch.models.decoder import Decoder
from slipstream.runners.torch.models.mtp import MtpHead
from slipstream.runners.torch.ops import Linear, Ops
from slipstream.runners.torch.sampling.logprobs import token_logprobs
from slipstream.runners.torch.sampling.processors import processors_for, truncation_for
from slipstream.runners.torch.sampling.sample import apply_masks, process, sample
from slipstream.runners.torch.threads import keep_to_this_thread
from slipstream.sampling.params import SamplingParams


class BlockTable:
    """Which KV blocks each slot has, on the device."""

    def __init__(self, num_slots: int, blocks_per_slot: int, device: torch.device) -> None:
        self.blocks: Tensor = torch.zeros(num_slots, blocks_per_slot, dtype=torch.int32, device=device)
        self._num_blocks = [0] * num_slots

    def clear(self, slot: int) -> None:
        self._num_blocks[slot] = 0

    def append(self, slot: int, blocks: tuple[int, ...]) -> None:
        if not blocks:
            return
        start = self._num_blocks[slot]
        end = self._num_blocks[slot] = start + len(blocks)
        self.blocks[slot, start:end] = torch.tensor(blocks, dtype=torch.int32).to(self.blocks.device)


class TorchModel:
    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        table: BlockTable,
        kv: PagedKv,
        gdn: GdnCache | None,
        *,
        host: HostMemory | None = None,
        fused: bool = False,
    ) -> None:
        """``fused``: layers are computed by our kernels alone, on threads of their own."""
        self.host: HostBuffers | None = host
        self._memory = host
        self.decoder = decoder
        self.ops = ops
        self.kv = kv
        self.gdn = gdn
        self.table = table
        self.reads_are_cheap = ops.device.type == "cpu"
        self._fused = fused

    @contextmanager
    def stepping(self) -> Iterator[None]:
        if self._fused:
            keep_to_this_thread()
        with torch.inference_mode():
            yield

    def join(self, join: RowJoin) -> None:
        start = join.start
        self.table.clear(join.slot)
        self.table.append(join.slot, start.blocks)
        if start.copied is not None:
            self.kv.copy(*start.copied)
        if self.gdn is not None and start.state_of is not None:
            self.gdn.copy(start.state_of, join.slot)
        elif self.gdn is not None:
            self.gdn.reset(join.slot)

    def leave(self, slot: int) -> None:
        self.table.clear(slot)

    def grow(self, slot: int, blocks: tuple[int, ...]) -> None:
        self.table.append(slot, blocks)

    def save(self, transfer: Transfer) -> None:
        assert self._memory is not None
        self._memory.save(transfer)

    def load(self, transfer: Transfer) -> None:
        assert self._memory is not None
        self._memory.load(transfer)

    def lay_out(self, spans: Sequence[RowSpan]) -> RaggedBatch:
        return make_batch(spans, self.table.blocks)

    def forward(self, tokens: Sequence[int], batch: RaggedBatch) -> Tensor:
        return self.decoder.forward(self.decoder.embed(self.tokens(tokens)), batch)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.unembed(hidden)

    def processors_for(self, params: SamplingParams) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return processors_for(params, self.ops.device), truncation_for(params)

    def process(self, logits: Tensor, rows: Sequence[Row], spans: Sequence[RowSpan], masks: StepMasks | None) -> Tensor:
        process(logits, rows, spans, masks)
        return logits

    def mask(self, logits: Tensor, index: Sequence[int], masks: Sequence[bytes]) -> Tensor:
        apply_masks(logits, index, masks)
        return logits

    def sample(self, logits: Tensor, sampling: Sequence[RowSampling], positions: Sequence[int]) -> Tensor:
        return sample(self.ops, logits, sampling, positions)

    def confidence(self, logits: Tensor) -> Tensor:
        return self.ops.confidence(logits)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return self.ops.log_softmax(logits)

    def token_logprobs(self, logprobs: Tensor, tokens: Sequence[int], num_top: int) -> list[Numbers]:
        numbers: list[Numbers] = token_logprobs(logprobs, self.tokens(tokens), num_top).tolist()
        return numbers

    def take(self, values: Tensor, index: Sequence[int]) -> Tensor:
        if isinstance(index, range) and index.step == 1:
            return values[index.start : index.stop].clone()
        return values[torch.tensor(index, dtype=torch.int64).to(values.device)]

    def concatenate(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def read(self, values: Tensor) -> list[Any]:
        numbers: list[Any] = values.tolist()
        return numbers

    def wait(self, values: Tensor) -> None:
        self.finish()

    def finish(self) -> None:
        if self.ops.device.type == "cuda":
            torch.cuda.synchronize(self.ops.device)

    def tokens(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """int64, on the device."""
        if isinstance(tokens, Tensor):
            return tokens
        return torch.tensor(tokens, dtype=torch.int64).to(self.ops.device)


class TorchHead:
    def __init__(self, model: TorchModel, head: MtpHead, output: Linear) -> None:
        """``output`` may hold only the first, most frequent, part of the vocabulary."""
        self.vocab_size = output.num_out
        self.output = output
        self._model = model
        self._head = head

    def forward(self, hidden: Tensor, tokens: Sequence[int] | Tensor, batch: RaggedBatch) -> Tensor:
        embedded = self._model.decoder.embed(self._model.tokens(tokens))
        return self._head.forward(embedded, hidden, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.output(hidden)
