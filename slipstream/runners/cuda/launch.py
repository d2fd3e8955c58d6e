"""Launches the program's parts for one step, captured where possible. Waits for constrained rows only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.runners.cuda.constrained import StepConstraints
from slipstream.runners.cuda.drafter import DraftPass
from slipstream.runners.cuda.graphs import Graphs
from slipstream.runners.cuda.host_rows import RowFeed
from slipstream.runners.cuda.kernels.matmul.linear_quantized import compiled_for
from slipstream.runners.cuda.layout import TOKEN_BUCKETS, Layout, StepShape, bucket, lay_out
from slipstream.runners.cuda.program import CudaProgram


class StepEvents:
    """Where a step stands on the device: its start, the end of verification, its end. None on a CPU, which is done."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def wait(self) -> None:
        """For the last mark."""
        if self._on_gpu:
            self._events[-1].synchronize()

    def seconds(self) -> tuple[float, float]:
        """Of verification and of drafting. Waits."""
        if not self._on_gpu:
            return 0.0, 0.0
        self.wait()
        start, verified, end = self._events
        return start.elapsed_time(verified) / 1e3, verified.elapsed_time(end) / 1e3


Verdict = tuple[Tensor, StepEvents]  # the report without its drafts, on the host once the event has passed


class StepLauncher:
    def __init__(self, program: CudaProgram, graphs: Graphs, max_context: int, captured_tokens: int) -> None:
        """``captured_tokens``: steps that read prompts are captured up to so many."""
        self.program = program
        self._captured_tokens = captured_tokens
        self.graphs = graphs
        self.device = program.rows.device
        self.max_context = max_context  # tokens a row may have
        self.num_forwards = 0

    def lay_out(
        self, feeds: Sequence[RowFeed], max_known: int, *, plain: bool, feeds_head: bool, masked: bool = False
    ) -> Layout:
        """``max_known``: no row has more tokens after this step."""
        depth = self.program.depth
        sizes = (max_known + depth, depth, self.program.buffers.max_rows)
        max_context = self.max_context + depth
        return lay_out(feeds, *sizes, max_context=max_context, plain=plain, feeds_head=feeds_head, masked=masked)

    def captures(self, shape: StepShape) -> bool:
        return not shape.has_prompts or shape.num_tokens <= self._captured_tokens

    def run(
        self, layout: Layout, logprob_index: Sequence[int] = (), constraints: StepConstraints | None = None
    ) -> StepEvents:
        """Launch all that the device does in a step; the events of its start and of the end of verification.

        ``logprob_index``: flat index of the tokens before those whose log-probability is reported.
        """
        program, shape = self.program, layout.shape
        self._upload(program.buffers.upload, torch.from_numpy(layout.upload))
        events = StepEvents(self.device)
        events.mark()
        self.num_forwards += 1
        target, captures = shape.target, self.captures(shape)
        self.graphs.run(("target", target), ("target", target.kind), partial(program.forward, target), captures)
        if constraints is not None:
            program.masks.upload(constraints.sample_masks(), shape.num_samples)
        self.graphs.run(shape, shape.kind, partial(program.verify, shape), captures)
        verdict = self._fetch_verdict(layout) if constraints is not None and constraints.guides_drafts else None
        if shape.feeds_head_apart:
            self.graphs.run(("head", shape), ("head", shape.kind), partial(program.committed, shape), captures)
        if logprob_index:
            self._launch_logprobs(logprob_index)
        events.mark()
        masked = False
        if constraints is not None and verdict is not None:
            masked = self._mask_drafts(layout, constraints, verdict)
        for ahead, num_rows in enumerate(layout.pass_rows):
            variant = masked and ahead == 0
            rows = DraftPass(ahead, num_rows, shape.context, variant)
            self.graphs.run(rows, (ahead > 0, compiled_for(num_rows), variant), partial(program.propose, rows))
        program.report_drafts(shape)
        return events

    def _fetch_verdict(self, layout: Layout) -> Verdict:
        values = self.fetch(self.program.report.values[: len(layout.first_samples)])
        committed = StepEvents(self.device)
        committed.mark()
        return values, committed

    def _mask_drafts(self, layout: Layout, constraints: StepConstraints, verdict: Verdict) -> bool:
        """Waits for the verdict; the head's feed runs meanwhile. False: there is nothing to mask."""
        program = self.program
        values, committed = verdict
        committed.wait()
        reports = program.report.read(values)
        masks = constraints.draft_masks(reports, layout.draft_rows, program.draft_vocab)
        if masks.masks:
            program.masks.upload(masks, layout.pass_rows[0])
        return bool(masks.masks)

    def fetch(self, values: Tensor) -> Tensor:
        """On its way to the host, without waiting for it."""
        if self.device.type == "cpu":
            return values.clone()
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

    def _launch_logprobs(self, index: Sequence[int]) -> None:
        """Captured by itself, whatever the step looks like: only steps that report some pay for it."""
        count = bucket(TOKEN_BUCKETS, len(index))
        padded = torch.zeros(count, dtype=torch.int64)
        padded[: len(index)] = torch.tensor(index)
        self._upload(self.program.buffers.logprobs.index, padded)
        self.graphs.run(("logprobs", count), ("logprobs", count), partial(self.program.logprobs, count))

    def _upload(self, target: Tensor, values: Tensor) -> None:
        if self.device.type == "cuda":
            values = values.pin_memory()
        target[: values.shape[0]].copy_(values, non_blocking=True)
