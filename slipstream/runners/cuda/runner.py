"""The runner on a GPU: rows live on the device, a step is a few launches, and the host is one step late.

``submit`` uploads the layout of the rows and launches forward, verdict, commit, the head's feed and the draft passes;
it asks the device nothing, unless rows are constrained. ``collect`` waits for the report of the oldest step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.contract import Keep, RowResult, RunnerInfo, Start, StepCosts, StepPlan, StepResult
from slipstream.runners.cuda.buffers import StepBuffers
from slipstream.runners.cuda.calibrate import measure
from slipstream.runners.cuda.constrained import MaskBuffers, StepConstraints
from slipstream.runners.cuda.drafter import CudaMtpDrafter
from slipstream.runners.cuda.graphs import Graphs
from slipstream.runners.cuda.host_rows import HostRow, HostRows, RowFeed
from slipstream.runners.cuda.launch import StepEvents, StepLauncher
from slipstream.runners.cuda.logprobs import requested_logprobs
from slipstream.runners.cuda.program import CudaProgram
from slipstream.runners.cuda.report import RowReport, StepReport
from slipstream.runners.cuda.rows import DeviceRows
from slipstream.runners.logprobs import StepLogprobs, with_logprobs
from slipstream.runners.simulate import pass_rates
from slipstream.runners.torch.caches import GdnRings, PagedKv
from slipstream.runners.torch.host_memory import HostMemory
from slipstream.runners.torch.models.decoder import Decoder
from slipstream.runners.torch.models.mtp import MtpHead
from slipstream.runners.torch.ops import Linear


@dataclass(slots=True)
class InFlight:
    """A submitted step. ``report`` and ``logprobs`` are on the host once the last event has passed."""

    plan: StepPlan
    rows: tuple[HostRow, ...]
    feeds: tuple[RowFeed, ...]
    events: StepEvents
    report: Tensor  # int32 [rows, columns]
    logprobs: Tensor | None  # float64 [tokens reported, ...]
    logprob_request: StepLogprobs
    faults: dict[int, str]  # rows that cannot go on, and why
    advanced: bool = False  # the matchers of its rows


class CudaRunner:
    def __init__(
        self,
        info: RunnerInfo,
        decoder: Decoder,
        head: MtpHead | None,
        output: Linear | None,  # the draft head's: it may hold only the first part of the vocabulary
        rows: DeviceRows,
        kv: PagedKv,
        buffers: StepBuffers,
        gdn: GdnRings | None = None,
        host: HostMemory | None = None,
        *,
        graphs: bool = True,
        captured_tokens: int = 0,
        simulated: Sequence[float] = (),
    ) -> None:
        self.info = info
        self.kv = kv
        self.gdn = gdn
        self.host_memory = host
        device = rows.device
        masks = MaskBuffers(buffers.max_tokens, buffers.max_rows, info.max_depth, info.vocab_size, device)
        report = StepReport(buffers.max_rows, info.max_depth, device)
        rates = _rates(simulated, info.max_depth, device) if simulated else None
        shared = (rows, buffers, masks, report)
        drafter = None
        if head is not None and output is not None:
            drafter = CudaMtpDrafter(head, decoder.embedding, output, *shared, rates)
        draft_vocab = 0 if output is None else output.num_out
        self.program = CudaProgram(decoder, drafter, *shared, info.vocab_size, draft_vocab, rates)
        captured = Graphs(device, graphs, scarce=captured_tokens < info.prompt_tokens)
        self.launcher = StepLauncher(self.program, captured, info.max_context, captured_tokens)
        self._rows = HostRows(info.vocab_size)
        self._in_flight: deque[InFlight | StepPlan] = deque()

    @property
    def decoder(self) -> Decoder:
        return self.program.decoder

    @property
    def num_forwards(self) -> int:
        return self.launcher.num_forwards

    def submit(self, plan: StepPlan) -> None:
        assert all(self._may_keep(keep) for step in plan.rows for keep in step.keeps)
        with torch.inference_mode():
            self._update_rows(plan)
            self._in_flight.append(self._launch(plan) if plan.rows else plan)

    def collect(self) -> StepResult:
        step = self._in_flight.popleft()
        if isinstance(step, StepPlan):
            return StepResult(step.step, ())
        seconds = step.events.seconds()
        self._advance_matchers(step)
        reports = self.program.report.read(step.report)
        results = tuple(_result(step, i, report) for i, report in enumerate(reports))
        if step.logprobs is not None:
            requests = [row.logprobs for row in step.rows]
            results = with_logprobs(results, requests, step.logprob_request, step.logprobs.tolist())
        return StepResult(step.plan.step, results, *seconds)

    def close(self) -> None:
        self._in_flight.clear()

    def calibrate(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
        assert len(self._rows) == 0, "calibration needs an idle runner"
        if not num_rows:
            return StepCosts()  # steps are captured as they come; no start was measured that does it ahead
        with torch.inference_mode():
            return measure(self.launcher, max(num_rows))

    def _update_rows(self, plan: StepPlan) -> None:
        for slot in plan.leaves:
            self._rows.leave(slot)
        self._copy(plan)
        for join in plan.joins:
            self._rows.join(join)
            self.program.rows.join(join)
            self._copy_start(join.start, join.slot)
        self.program.rows.append_blocks(self._rows.append_blocks(plan.joins, plan.rows))

    def _copy(self, plan: StepPlan) -> None:
        """Between device and host."""
        for transfer in plan.saves:
            assert self.host_memory is not None
            self.host_memory.save(transfer)
        for transfer in plan.loads:
            assert self.host_memory is not None
            self.host_memory.load(transfer)

    def _copy_start(self, start: Start, slot: int) -> None:
        if start.copied is not None:
            self.kv.copy(*start.copied)
        if start.state_of is not None and self.gdn is not None:
            self.gdn.copy(start.state_of, slot)

    def _launch(self, plan: StepPlan) -> InFlight:
        rows = tuple(self._rows[step.slot] for step in plan.rows)
        feeds = tuple(row.feed(step) for row, step in zip(rows, plan.rows, strict=True))
        layout = self.launcher.lay_out(
            feeds,
            max(row.max_known for row in rows),
            plain=all(row.plain for row in rows),
            feeds_head=self.program.drafter is not None and any(row.may_draft for row in rows),
            masked=any(row.constraint and feed.num_samples for row, feed in zip(rows, feeds, strict=True)),
        )
        request, index = requested_logprobs(feeds, [row.logprobs for row in rows])
        constraints = None
        if layout.shape.masked:
            constraints = StepConstraints(rows, feeds, layout.first_samples, self._read_reports)
        events = self.launcher.run(layout, index, constraints)
        report = self.launcher.fetch(self.program.report.values[: len(rows)])
        logprobs = self._fetch_logprobs(request.num_tokens) if request else None
        events.mark()
        faults = constraints.faults if constraints else {}
        return InFlight(plan, rows, feeds, events, report, logprobs, request, faults)

    def _may_keep(self, keep: Keep) -> bool:
        """Off the grid no chunk of a prompt ends, and nothing would be kept; a slot of a row is none for a state."""
        in_range = keep.state is None or 0 <= keep.state - self.info.num_slots < self.info.num_states
        return keep.position > 0 and keep.position % self.info.keep_grid == 0 and in_range

    def _fetch_logprobs(self, count: int) -> Tensor:
        return self.launcher.fetch(self.program.buffers.logprob_values(count, self.info.vocab_size))

    def _read_reports(self) -> None:
        for step in self._in_flight:
            if isinstance(step, InFlight):
                self._advance_matchers(step)

    def _advance_matchers(self, step: InFlight) -> None:
        """Constrained rows take in a step's report: once, and in order."""
        if step.advanced or all(row.constraint is None for row in step.rows):
            return
        step.advanced = True
        step.events.wait()
        for row, report in zip(step.rows, self.program.report.read(step.report), strict=True):
            if row.constraint is not None:
                row.constraint.advance(report.tokens, report.drafts)


def _result(step: InFlight, i: int, report: RowReport) -> RowResult:
    row = step.rows[i]
    row.commit(step.feeds[i], len(report.tokens))
    if i in step.faults:
        return RowResult(row.slot, report.num_fed, (), (), fault=step.faults[i])
    confidences = report.confidences[: row.num_confidences(step.feeds[i], len(report.drafts))]
    return RowResult(row.slot, report.num_fed, report.tokens, report.drafts, confidences)


def _rates(survival: Sequence[float], depth: int, device: torch.device) -> Tensor:
    return torch.tensor(pass_rates(survival, depth), dtype=torch.float32, device=device)
