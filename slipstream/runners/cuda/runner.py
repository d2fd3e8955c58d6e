"""The runner on a GPU: rows live on the device, a step is a few launches, and the host is one step behind.

``submit`` uploads where the rows lie and launches forward, verdict, commit, the head's feed and the draft passes; it
asks the device nothing. ``collect`` waits for the report of the oldest step. The host knows of each row only what no
verdict changes: how many of its known tokens are still to be computed, and an upper bound of how many it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slipstream.engine.contract import RowResult, RunnerInfo, Start, StepCosts, StepPlan, StepResult
from slipstream.runners.cuda.calibrate import measure
from slipstream.runners.cuda.constrained import MaskBuffers, step_masks
from slipstream.runners.cuda.graphs import Graphs
from slipstream.runners.cuda.host_rows import HostRow, HostRows, RowFeed
from slipstream.runners.cuda.kernels import step as kernels
from slipstream.runners.cuda.kernels.gather import gather_rows
from slipstream.runners.cuda.kernels.matmul.linear_quantized import compiled_for
from slipstream.runners.cuda.kernels.norm import rms_norm
from slipstream.runners.cuda.kernels.sampling.masks import apply_masks
from slipstream.runners.cuda.kernels.sampling.penalties import add_bias, penalise
from slipstream.runners.cuda.kernels.sampling.sample import choose, choose_sure
from slipstream.runners.cuda.kernels.sampling.truncate import truncate
from slipstream.runners.cuda.layout import (
    TOKEN_BUCKETS,
    Buffers,
    Layout,
    StepShape,
    bucket,
    find_telling,
    lay_out,
)
from slipstream.runners.cuda.rows import DeviceRows
from slipstream.runners.logprobs import Telling, with_logprobs
from slipstream.runners.torch.caches import GdnRings, PagedKv
from slipstream.runners.torch.logprobs import log_probabilities, tell_hidden
from slipstream.runners.torch.models.decoder import Decoder
from slipstream.runners.torch.models.mtp import MtpHead
from slipstream.runners.torch.ops import Linear
from slipstream.runners.torch.simulate import pass_rates
from slipstream.sampling.params import MAX_TOP_LOGPROBS

Marks = tuple[torch.cuda.Event, ...]


@dataclass(slots=True)
class _Flight:
    """A step on its way."""

    plan: StepPlan
    rows: tuple[HostRow, ...]
    feeds: tuple[RowFeed, ...]
    report: Tensor  # int32 [rows, width], on the host once the last mark has passed
    telling: Telling
    told: Tensor | None  # float64 [tokens told of, ...], likewise
    marks: tuple[torch.cuda.Event, ...]  # on a GPU: start, verified, drafted and reported
    faults: Mapping[int, str]  # rows that cannot go on, and why
    learned: bool = False  # by the constrained rows


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
        gdn: GdnRings | None = None,
        *,
        graphs: bool = True,
        simulated: Sequence[float] = (),
    ) -> None:
        self.info = info
        self.decoder = decoder
        self.kv = kv
        self.gdn = gdn
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
        self._host_rows = HostRows(info.vocab_size)
        sizes = (buffers.max_tokens, buffers.max_rows, self.depth, info.vocab_size)
        self._masks = MaskBuffers(*sizes, self.device)

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
        self._learn(flight)
        results = tuple(self._result(i, flight, row) for i, row in enumerate(flight.report.tolist()))
        if flight.told is not None:
            results = with_logprobs(results, [row.asked for row in flight.rows], flight.telling, flight.told.tolist())
        return StepResult(flight.plan.step, results, *seconds)

    def close(self) -> None:
        self._flights.clear()

    def calibrate(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
        assert len(self._host_rows) == 0, "calibration needs an idle runner"
        with torch.inference_mode():
            return measure(self, max(num_rows))

    # A step, on the host.

    def _come_and_go(self, plan: StepPlan) -> None:
        for slot in plan.leaves:
            self._host_rows.leave(slot)
        for join in plan.joins:
            self._host_rows.join(join)
            self.rows.join(join)
            if join.start.state_of is not None:
                self._start(join.start, join.start.state_of, join.slot)
        self.rows.append_blocks(self._host_rows.append_blocks(plan.joins, plan.rows))

    def _start(self, start: Start, source: int, slot: int) -> None:
        if start.copied is not None:
            self.kv.copy(*start.copied)
        if self.gdn is not None:
            self.gdn.copy(source, slot)

    def _launch(self, plan: StepPlan) -> _Flight:
        rows = tuple(self._host_rows[step.slot] for step in plan.rows)
        feeds = tuple(row.feed(step) for row, step in zip(rows, plan.rows, strict=True))
        layout = lay_out(
            feeds,
            max(row.max_known for row in rows) + self.depth,
            self.depth,
            self.buffers.max_rows,
            longest=self.info.max_context + self.depth,
            plain=all(row.plain for row in rows),
            feeds_head=self._head is not None and any(row.may_draft for row in rows),
        )
        telling, before = find_telling(feeds, [row.asked for row in rows])
        faults: dict[int, str] = {}
        if any(row.constraint and feed.num_samples for row, feed in zip(rows, feeds, strict=True)):
            layout = replace(layout, shape=replace(layout.shape, masked=True))
        tells = [*before, *telling.places]
        start, verified = self.run(layout, tells, lambda: faults.update(self._constrain(rows, feeds, layout)))
        report, told = self._fetch(self._report[: len(rows)]), self._fetch_told(telling)
        drafted = _mark(self.device)
        return _Flight(plan, rows, feeds, report, telling, told, (*start, *verified, *drafted), faults)

    def _constrain(self, rows: Sequence[HostRow], feeds: Sequence[RowFeed], layout: Layout) -> Mapping[int, str]:
        """While the forward runs: hear of the steps before, and say what may follow. The rows that cannot go on."""
        for flight in self._flights:
            if isinstance(flight, _Flight):
                self._learn(flight)
        masks, faults = step_masks(rows, feeds, layout.first_draws)
        self._masks.upload(masks, layout.shape.num_draws)
        return faults

    def _learn(self, flight: _Flight) -> None:
        """Constrained rows take in what a step told: once, and in order."""
        if flight.learned or all(row.constraint is None for row in flight.rows):
            return
        flight.learned = True
        if flight.marks:
            flight.marks[-1].synchronize()
        for row, told in zip(flight.rows, flight.report.tolist(), strict=True):
            if row.constraint is not None:
                row.constraint.advance(*self._told(told))

    def _fetch(self, report: Tensor) -> Tensor:
        """The report's way to the host, without waiting for it."""
        if self.device.type == "cpu":
            return report.clone()
        return torch.empty(report.shape, dtype=report.dtype, pin_memory=True).copy_(report, non_blocking=True)

    def _fetch_told(self, telling: Telling) -> Tensor | None:
        return self._fetch(self.buffers.told(telling.num_tokens, self.info.vocab_size)) if telling else None

    def run(
        self, layout: Layout, tells: Sequence[int] = (), constrain: Callable[[], None] | None = None
    ) -> tuple[Marks, Marks]:
        """Launch all that the device does in a step; marks of its start and of the end of verification.

        ``tells``: flat places of the tokens behind which a log-probability is told. ``constrain`` brings the masks of a
        masked step; it may wait for the steps before.
        """
        upload = torch.from_numpy(layout.upload)
        if self.device.type == "cuda":
            upload = upload.pin_memory()
        self.buffers.upload[: upload.shape[0]].copy_(upload, non_blocking=True)
        shape = layout.shape
        start = _mark(self.device)
        self.num_forwards += 1
        self.graphs.run(("trunk", shape.trunk), ("trunk", shape.trunk.kind), partial(self._forward, shape.trunk))
        if shape.masked and constrain is not None:
            constrain()
        self.graphs.run(shape, shape.kind, partial(self._verify, shape))
        if tells:
            self._launch_tells(tells)
        verified = _mark(self.device)
        for ahead, num_rows in enumerate(layout.pass_rows):
            key = (ahead, num_rows, shape.context)
            self.graphs.run(key, (ahead > 0, compiled_for(num_rows)), partial(self._draft, *key))
        if self.depth:
            kernels.tell_drafts(self.rows.state, self.buffers.step(shape), self._report, self.depth)
        return start, verified

    def rehearse(self, layout: Layout) -> None:
        """Make every launch of a step that draws as calibration's do, and let the device do nothing."""
        self.graphs.rehearse(partial(self.launch_all, layout))

    def _launch_tells(self, places: Sequence[int]) -> None:
        """Captured by itself, whatever the step looks like: only steps that tell something pay for it."""
        num_tells = bucket(TOKEN_BUCKETS, len(places))
        padded = torch.zeros(num_tells, dtype=torch.int64)
        padded[: len(places)] = torch.tensor(places)
        if self.device.type == "cuda":
            padded = padded.pin_memory()
        self.buffers.tells[:num_tells].copy_(padded, non_blocking=True)
        self.graphs.run(("tell", num_tells), ("tell", num_tells), partial(self._tell, num_tells))

    def _result(self, row: int, flight: _Flight, told: list[int]) -> RowResult:
        fed, slot = told[0], flight.plan.rows[row].slot
        tokens, drafts = self._told(told)
        flight.rows[row].commit(flight.feeds[row], len(tokens))
        if row in flight.faults:
            return RowResult(slot, fed, (), (), fault=flight.faults[row])
        return RowResult(slot, fed, tokens, drafts)

    def _told(self, told: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """New tokens and drafts, of a row of the report."""
        drafts = told[4 + self.depth :][: told[3 + self.depth]] if self.depth else []
        return tuple(told[2 : 2 + told[1]]), tuple(drafts)

    # A step, on the device: no line below may ask it anything.

    def _forward(self, shape: StepShape) -> None:
        """A step's first half: all rows through the trunk. Captured apart, since it serves every way of drawing."""
        batch = self.buffers.step(shape)
        _, _, feed, _, token_rows, _, _, draw_flat = self.buffers.parts(shape)
        kernels.begin(self.rows.state, batch, feed, token_rows, draw_flat, *self.buffers.draws(shape))
        norm = self.decoder.norm
        rms_norm(self.decoder.body(batch), norm.weight, norm.eps, out=self.buffers.hidden(shape))

    def _verify(self, shape: StepShape) -> None:
        """The other half: verdict and commit of all rows, and the head's share of what was computed."""
        buffers, state = self.buffers, self.rows.state
        batch, hidden = buffers.step(shape), buffers.hidden(shape)
        _, _, _, row_draws, _, _, _, draw_flat = buffers.parts(shape)
        drawing = gather_rows(hidden, draw_flat.clamp(min=0)) if shape.has_prompts else hidden
        draws = self._draws(self.decoder.unembed(drawing), shape)
        row_last, most = buffers.row_last(shape), self._masks.max_accepted if shape.masked else None
        kernels.commit(state, batch, draws, row_draws, row_last, self._report, self.depth, self._simulated, most)
        if shape.feeds_head:
            assert self._head is not None
            followers = buffers.followers(shape)
            kernels.followers(state, batch, followers)
            fed = self._head.forward(self.decoder.embedding.rows(followers), hidden, batch)
            gather_rows(fed, row_last, out=buffers.draft_hidden[: shape.num_rows])

    def launch_all(self, layout: Layout) -> None:
        """All parts of a step in one."""
        shape = layout.shape
        self._forward(shape.trunk)
        self._verify(shape)
        for ahead, num_rows in enumerate(layout.pass_rows):
            self._draft(ahead, num_rows, shape.context)
        if self.depth:
            kernels.tell_drafts(self.rows.state, self.buffers.step(shape), self._report, self.depth)

    def _tell(self, num_tells: int) -> None:
        """What the model itself thought of the tokens that follow: a prompt's or, committed by now, the draws."""
        hidden, slots, positions = self.buffers.tell_sources(num_tells)
        tokens = self.rows.tokens[slots, positions + 1]
        vocab_size = self.info.vocab_size
        told = tell_hidden(hidden, self._chances, vocab_size, tokens, MAX_TOP_LOGPROBS)
        self.buffers.told(num_tells, vocab_size).copy_(told)

    def _chances(self, hidden: Tensor) -> Tensor:
        return log_probabilities(self.decoder.unembed(hidden))

    def _draws(self, logits: Tensor, shape: StepShape) -> Tensor:
        rows, (slots, index) = self.rows, self.buffers.draws(shape)
        if not shape.plain:
            fields = (rows.float_field(name) for name in ("repetition", "presence", "frequency"))
            penalise(logits, slots, index, rows.tokens, rows.int_field("num_prompt"), *fields)
            add_bias(logits, slots, rows.bias_tokens, rows.bias_values, rows.int_field("num_bias"))
        if shape.masked:
            apply_masks(logits, slots, self._masks.index[: shape.num_draws], self._masks.masks)
        if not shape.plain:
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
        hidden = gather_rows(buffers.draft_hidden, sources)
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
