"""The MTP head on the device: captured functions, which read their rows and requests from buffers that never move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.runners.cuda.buffers import StepBuffers
from slipstream.runners.cuda.constrained import MaskBuffers
from slipstream.runners.cuda.kernels import step as kernels
from slipstream.runners.cuda.kernels.gather import gather_rows
from slipstream.runners.cuda.kernels.sampling.masks import apply_masks
from slipstream.runners.cuda.kernels.sampling.sample import choose_sure
from slipstream.runners.cuda.layout import StepShape
from slipstream.runners.cuda.report import StepReport
from slipstream.runners.cuda.rows import DeviceRows
from slipstream.runners.torch.models.mtp import MtpHead
from slipstream.runners.torch.ops import Linear


class DraftPass(NamedTuple):
    """Draft ``ahead`` + 1 of the rows that go so far."""

    ahead: int
    num_rows: int
    context: int
    masked: bool = False  # the rows' masks are uploaded


@dataclass(frozen=True, slots=True)
class CudaMtpDrafter:
    head: MtpHead
    embedding: Linear  # the target's
    output: Linear  # may hold only the first part of the vocabulary
    rows: DeviceRows
    buffers: StepBuffers
    masks: MaskBuffers
    report: StepReport
    simulated: Tensor | None = None  # float32 [depth]: acceptance rates instead of confidences, for benchmarks

    def committed(self, step: StepShape) -> None:
        """Feed the head the step's tokens."""
        buffers, batch = self.buffers, self.buffers.step(step)
        next_tokens = buffers.next_tokens(step)
        kernels.next_tokens(self.rows.state, batch, next_tokens)
        fed = self.head.forward(self.embedding.rows(next_tokens), buffers.hidden(step), batch)
        gather_rows(fed, buffers.row_last(step), out=buffers.draft_hidden[: step.num_rows])

    def propose(self, rows: DraftPass) -> None:
        """One draft of each row, into the report. The first comes from the tokens that the head was fed."""
        ahead, num_rows, context, masked = rows
        buffers, state = self.buffers, self.rows.state
        inputs, batch = buffers.draft_inputs(), buffers.draft_batch(num_rows, context)
        slots, index = buffers.samples(num_rows)
        sources = buffers.draft_sources[:num_rows]
        draft_rows = inputs.draft_rows[ahead * buffers.max_rows :][:num_rows]
        samples = (slots, index, sources)
        kernels.draft_begin(state, batch, draft_rows, inputs.row_slots, *samples, buffers.max_rows, ahead)
        hidden = gather_rows(buffers.draft_hidden, sources)
        if ahead:
            hidden = self.head.forward(self.embedding.rows(batch.tokens), hidden, batch)
            buffers.draft_hidden.index_copy_(0, sources, hidden)
        logits = self.output(hidden)
        if masked:
            apply_masks(logits, slots, self.masks.index[:num_rows], self.masks.masks)
        drafts, confidence = choose_sure(logits, slots, index, *self.rows.noise)
        limits = (inputs.thresholds.view(torch.float32), inputs.continue_thresholds.view(torch.float32))
        outputs = (self.report, self.simulated)
        kernels.draft_commit(state, draft_rows, *limits, slots, drafts, confidence, *outputs, ahead)
