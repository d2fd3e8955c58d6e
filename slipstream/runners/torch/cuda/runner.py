"""The runner on a GPU: rows live on the device, a step is a few launches, and the host is one step behind.

``submit`` uploads where the rows lie and launches forward, verdict, commit, the head's feed and the draft passes; it
asks the device nothing. ``collect`` waits for the report of the oldest step. The host knows of each row only what no
verdict changes: how many of its known tokens are still to be computed, and an upper bound of how many it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.engine.plan import RowResult, RunnerInfo, StepCosts, StepPlan, StepResult
from slipstream.runners.torch.caches import PagedKv
from slipstream.runners.torch.cuda.calibrate import measure
from slipstream.runners.torch.cuda.graphs import Graphs
from slipstream.runners.torch.cuda.kernels import step as kernels
from slipstream.runners.torch.cuda.kernels.linear import MAX_TOKENS
from slipstream.runners.torch.cuda.kernels.penalties import add_bias, penalise
from slipstream.runners.torch.cuda.kernels.sampling import choose, choose_sure
from slipstream.runners.torch.cuda.kernels.truncate import truncate
from slipstream.runners.torch.cuda.layout import Buffers, Layout, StepShape, lay_out
from slipstream.runners.torch.cuda.rows import DeviceRows
from slipstream.runners.torch.models.decoder import Decoder
from slipstream.runners.torch.models.mtp import MtpHead
from slipstream.runners.torch.ops import Linear
from slipstream.runners.torch.simulate import pass_rates

Marks = tuple[torch.cuda.Event, ...]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step on its way."""

    plan: StepPlan
    stays: tuple[int, ...]  # which stay of its slot each row belongs to
    added: tuple[int, ...]  # tokens each row gets at most
    report: Tensor  # int32 [rows, width], on the host once the last mark has passed
    marks: tuple[torch.cuda.Event, ...]  # on a GPU: start, verified, drafted and reported


class CudaRunner:
    def __init__(
        self,
        info: RunnerInfo,
        decoder: Decoder,
        head: MtpHead | None,
        output: Linear | None,  # the draft head's: it may hold only the first part of the vocabulary
        rows: DeviceRows,
        kv: PagedKv,
        buffers: Buffers,
        *,
        graphs: bool = True,
        simulated: Sequence[float] = (),
    ) -> None:
        self.info = info
        self.decoder = decoder
        self.kv = kv
        self.rows = rows
        self.buffers = buffers
        self.device = rows.device
        self.depth = info.max_depth
        self.graphs = Graphs(self.device, graphs)
        self.num_forwards = 0
        self._head = head
        self._output = output
        width = kernels.report_width(self.depth)
        self._report = torch.zeros(buffers.max_rows, width, dtype=torch.int32, device=self.device)
        self._simulated = _rates(simulated, self.depth, self.device) if simulated else None
        self._flights: deque[_Flight | StepPlan] = deque()
        self._most: dict[int, int] = {}  # tokens each slot has at most, all plans done
        self._stays: dict[int, int] = {}  # how often each slot was given away

    # The protocol.

    def submit(self, plan: StepPlan) -> None:
        with torch.inference_mode():
            self._come_and_go(plan)
            self._flights.append(self._launch(plan) if plan.rows else plan)

    def collect(self) -> StepResult:
        flight = self._flights.popleft()
        if isinstance(flight, StepPlan):
            return StepResult(flight.step, ())
        seconds = _seconds(flight.marks)
        told = flight.report.tolist()
        return StepResult(flight.plan.step, tuple(self._result(i, flight, row) for i, row in enumerate(told)), *seconds)

    def close(self) -> None:
        self._flights.clear()

    def calibrate(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
        assert len(self.rows) == 0, "calibration needs an idle runner"
        with torch.inference_mode():
            return measure(self, max(num_rows))

    # A step, on the host.

    def _come_and_go(self, plan: StepPlan) -> None:
        for slot in plan.leaves:
            self.rows.leave(slot)
        for join in plan.joins:
            self.rows.join(join)
            self._most[join.slot] = len(join.tokens)
            self._stays[join.slot] = self._stays.get(join.slot, 0) + 1
        self.rows.grow(plan.rows)

    def _launch(self, plan: StepPlan) -> _Flight:
        gaps = [self.rows.gaps[step.slot] for step in plan.rows]
        added = tuple(max(0, step.feed - gap + 1) for step, gap in zip(plan.rows, gaps, strict=True))
        for step, new in zip(plan.rows, added, strict=True):
            self._most[step.slot] += new
            self.rows.advance(step)
        most = max(self._most[step.slot] for step in plan.rows) + self.depth
        layout = lay_out(
            plan.rows,
            gaps,
            most,
            self.depth,
            self.buffers.max_rows,
            plain=all(self.rows.plain(step.slot) for step in plan.rows),
            feeds_head=self._head is not None and any(self.rows.may_draft(step.slot) for step in plan.rows),
        )
        start, verified = self.run(layout)
        report, drafted = self._fetch(len(plan.rows)), _mark(self.device)
        stays = tuple(self._stays[step.slot] for step in plan.rows)
        return _Flight(plan, stays, added, report, (*start, *verified, *drafted))

    def _fetch(self, num_rows: int) -> Tensor:
        """The report's way to the host, without waiting for it."""
        report = self._report[:num_rows]
        if self.device.type == "cpu":
            return report.clone()
        return torch.empty(report.shape, dtype=report.dtype, pin_memory=True).copy_(report, non_blocking=True)

    def run(self, layout: Layout) -> tuple[Marks, Marks]:
        """Launch all that the device does in a step; marks of its start and of the end of verification."""
        upload = torch.from_numpy(layout.upload)
        if self.device.type == "cuda":
            upload = upload.pin_memory()
        self.buffers.upload[: upload.shape[0]].copy_(upload, non_blocking=True)
        shape = layout.shape
        start = _mark(self.device)
        self.num_forwards += 1
        self.graphs.run(("trunk", shape.trunk), ("trunk", shape.trunk.kind), partial(self._forward, shape.trunk))
        self.graphs.run(shape, shape.kind, partial(self._verify, shape))
        verified = _mark(self.device)
        for ahead, num_rows in enumerate(layout.pass_rows):
            key = (ahead, num_rows, shape.context)
            self.graphs.run(key, (ahead > 0, num_rows <= MAX_TOKENS), partial(self._draft, *key))
        if self.depth:
            kernels.tell_drafts(self.rows.state, self.buffers.step(shape), self._report, self.depth)
        return start, verified

    def _result(self, row: int, flight: _Flight, told: list[int]) -> RowResult:
        fed, num_new, slot = told[0], told[1], flight.plan.rows[row].slot
        drafts = told[4 + self.depth :][: told[3 + self.depth]] if self.depth else []
        if self._stays[slot] == flight.stays[row]:
            self._most[slot] -= flight.added[row] - num_new
        return RowResult(slot, fed, tuple(told[2 : 2 + num_new]), tuple(drafts))

    # A step, on the device: no line below may ask it anything.

    def _forward(self, shape: StepShape) -> None:
        """A step's first half: all rows through the trunk. Captured apart, since it serves every way of drawing."""
        batch = self.buffers.step(shape)
        _, _, feed, _, token_rows, _, _, draw_flat = self.buffers.parts(shape)
        kernels.begin(self.rows.state, batch, feed, token_rows, draw_flat, *self.buffers.draws(shape))
        self.buffers.hidden(shape).copy_(self.decoder.forward(batch))

    def _verify(self, shape: StepShape) -> None:
        """The other half: verdict and commit of all rows, and the head's share of what was computed."""
        buffers, state = self.buffers, self.rows.state
        batch, hidden = buffers.step(shape), buffers.hidden(shape)
        _, _, _, row_draws, _, _, _, draw_flat = buffers.parts(shape)
        draw_slots, draw_index = buffers.draws(shape)
        drawing = hidden.index_select(0, draw_flat.clamp(min=0)) if shape.has_prompts else hidden
        draws = self._draws(self.decoder.unembed(drawing), draw_slots, draw_index, shape.plain)
        row_last = buffers.row_last(shape)
        kernels.commit(state, batch, draws, row_draws, row_last, self._report, self.depth, self._simulated)
        if shape.feeds_head:
            assert self._head is not None
            followers = buffers.followers(shape)
            kernels.followers(state, batch, followers)
            fed = self._head.forward(self.decoder.embedding.rows(followers), hidden, batch)
            buffers.draft_hidden[: shape.num_rows] = fed.index_select(0, row_last)

    def _draws(self, logits: Tensor, slots: Tensor, index: Tensor, plain: bool) -> Tensor:
        rows = self.rows
        if not plain:
            fields = (rows.float_field(name) for name in ("repetition", "presence", "frequency"))
            penalise(logits, slots, index, rows.tokens, rows.int_field("num_prompt"), *fields)
            add_bias(logits, slots, rows.bias_tokens, rows.bias_values, rows.int_field("num_bias"))
            cuts = (rows.int_field("top_k"), rows.float_field("top_p"), rows.float_field("min_p"))
            truncate(logits, slots, rows.float_field("inv_temperature"), *cuts)
        return choose(logits, slots, index, *self._noise)

    def _draft(self, ahead: int, num_rows: int, context: int) -> None:
        """Draft ``ahead`` + 1 of the rows that go so far: the first comes from what the head was fed already."""
        assert self._head is not None
        assert self._output is not None
        buffers, state = self.buffers, self.rows.state
        batch = buffers.draft(num_rows, context)
        slots, index = buffers.draft_draws(num_rows)
        sources = buffers.sources[:num_rows]
        taking_part = buffers.pass_rows(ahead, num_rows)
        kernels.draft_begin(
            state, batch, taking_part, buffers.row_slots, slots, index, sources, buffers.max_rows, ahead
        )
        hidden = buffers.draft_hidden.index_select(0, sources)
        if ahead:
            hidden = self._head.forward(self.decoder.embedding.rows(batch.tokens), hidden, batch)
            buffers.draft_hidden.index_copy_(0, sources, hidden)
        picked, sure = choose_sure(self._output(hidden), slots, index, *self._noise)
        kernels.draft_commit(state, slots, picked, sure, ahead)

    @property
    def _noise(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows.float_field("inv_temperature"), self.rows.seeds, self.rows.int_field("greedy")


def _mark(device: torch.device) -> Marks:
    if device.type != "cuda":
        return ()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return (event,)


def _seconds(marks: Marks) -> tuple[float, float]:
    """Of verification and of drafting. Waits for the last mark."""
    if not marks:
        return 0.0, 0.0
    start, verified, end = marks
    end.synchronize()
    return start.elapsed_time(verified) / 1e3, verified.elapsed_time(end) / 1e3


def _rates(survival: Sequence[float], depth: int, device: torch.device) -> Tensor:
    return torch.tensor(pass_rates(survival, depth), dtype=torch.float32, device=device)
