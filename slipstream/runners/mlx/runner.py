"""MLX behind the runner protocol: rows in grids, forward, verify, propose, one read, then the commit.

A step is two parts, verification and drafting, queued one behind the other before the host waits for either: the device
is never idle between them. Nothing on the host changes before the verdict is read, so a step that dies commits nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from slipstream.engine.contract import RunnerInfo, StepCosts, StepPlan, StepResult
from slipstream.runners.logprobs import Telling, find_telling, with_logprobs
from slipstream.runners.mlx.caches import FeedHolder, KvCache
from slipstream.runners.mlx.calibrate import measure
from slipstream.runners.mlx.drafter import Drafter, Ends, Proposal
from slipstream.runners.mlx.draw import Verdict, verify
from slipstream.runners.mlx.grid import Grid, group, make_grid
from slipstream.runners.mlx.logprobs import Table, read, tell, tell_hidden
from slipstream.runners.mlx.rows import Row, RowTable
from slipstream.runners.mlx.trunk import Cache, Trunk
from slipstream.runners.rows import RowSpan, Told, commit


@dataclass(frozen=True, slots=True)
class _Drawing:
    """The rows of a step that draw, and where."""

    index: list[int]  # in the plan's rows
    rows: list[Row]
    spans: list[RowSpan]
    flat: list[int]  # of every drawing position, among the tokens of all grids
    lasts: list[int]  # flat index of each row's last known token


class MlxRunner:
    def __init__(
        self,
        info: RunnerInfo,
        trunk: Trunk,
        drafter: Drafter,
        caches: Sequence[Cache],
        head_cache: KvCache | None,
        holder: FeedHolder,
        pads: bool,
    ) -> None:
        """``pads``: whether rows that feed different numbers of tokens may share a grid."""
        self.info = info
        self.trunk = trunk
        self.drafter = drafter
        self.caches = caches
        self.num_forwards = 0
        self._head_cache = head_cache
        self._holder = holder
        self._pads = pads
        self.table = RowTable(info.num_slots, info.vocab_size, self._move)
        self._done: deque[StepResult] = deque()

    @property
    def all_caches(self) -> list[Cache]:
        return [*self.caches, *([self._head_cache] if self._head_cache is not None else [])]

    def submit(self, plan: StepPlan) -> None:
        for slot in plan.leaves:
            self.table.leave(slot)
            self.forget(slot)
        for join in plan.joins:
            self.table.join(join)
            if join.start.state_of is not None:
                self._start(join.start.state_of, join.slot)
        self._done.append(self._step(plan) if plan.rows else StepResult(plan.step, ()))

    def collect(self) -> StepResult:
        return self._done.popleft()

    def close(self) -> None:
        self._done.clear()

    def calibrate(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
        assert len(self.table) == 0, "calibration needs an idle runner"
        return measure(self, num_tokens, num_rows)

    def forward(self, grid: Grid) -> mx.array:
        """[rows, width, ...]"""
        self.num_forwards += 1
        self._holder.set(grid.feed)
        return self.trunk.forward(grid.tokens, self.caches)

    def cache_arrays(self) -> list[mx.array]:
        return [array for cache in self.all_caches for array in cache.arrays()]

    def forget(self, slot: int) -> None:
        for cache in self.caches:
            cache.leave(slot)

    def _start(self, source: int, slot: int) -> None:
        places = self.table.place(source), self.table.place(slot)
        for cache in self.all_caches:
            cache.fork(source, slot, *places)

    def _move(self, source: int, target: int) -> None:
        for cache in self.all_caches:
            cache.move(source, target)

    def _step(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        rows = [self.table[step.slot] for step in plan.rows]
        spans = [row.span(step.feed) for row, step in zip(rows, plan.rows, strict=True)]
        grids = self._grids(rows, spans)
        hidden = [self.forward(grid) for grid in grids]
        drawing = _drawing(rows, spans, grids)
        telling = find_telling(rows, spans, drawing.index)
        tables = self._tell_prompts(hidden, rows, spans, grids, telling)
        verdict, told_draws = self._verify(hidden, drawing, telling)
        tables += told_draws
        fed = self._feed_head(rows, grids, hidden, drawing, verdict)
        # No name may hold the caches' arrays: what the next write finds held it would copy.
        mx.async_eval(fed, verdict.accepted, verdict.drawn, self.cache_arrays())
        proposal = self._propose(fed, drawing, verdict, plan)
        columns = [verdict.accepted[:, None], verdict.drawn[:, None], proposal.lengths[:, None], proposal.drafts]
        numbers = mx.concatenate(columns, axis=1)
        mx.async_eval(numbers, proposal.confidences, tables, self.cache_arrays())
        mx.eval(fed, verdict.accepted, verdict.drawn)
        middle = time.perf_counter()
        told = _read(numbers, proposal.confidences)
        results = commit(rows, spans, dict(zip(drawing.index, told, strict=True)))
        results = with_logprobs(results, [row.asked for row in rows], telling, read(tables))
        return StepResult(plan.step, results, middle - began, time.perf_counter() - middle)

    def _grids(self, rows: Sequence[Row], spans: Sequence[RowSpan]) -> list[Grid]:
        grids = []
        for index in group(spans, 1 + self.drafter.max_depth, self._pads):
            places = [self.table.place(spans[i].slot) for i in index]
            tokens = [rows[i].fed_tokens(spans[i]) for i in index]
            grids.append(make_grid(index, [spans[i] for i in index], places, tokens))
        return grids

    def _tell_prompts(
        self,
        hidden: Sequence[mx.array],
        rows: Sequence[Row],
        spans: Sequence[RowSpan],
        grids: Sequence[Grid],
        telling: Telling,
    ) -> list[Table]:
        """Of the prompts that are read, where asked for: the one reason to look at logits there."""
        if not telling.prompt:
            return []
        places = mx.array(telling.prompt_places(_firsts(grids)))
        tokens = mx.array(telling.prompt_tokens(rows, spans), dtype=mx.int32)
        return tell_hidden(_flat(hidden)[places], self.trunk.unembed, self.info.vocab_size, tokens, telling.num_top)

    def _verify(self, hidden: Sequence[mx.array], drawing: _Drawing, telling: Telling) -> tuple[Verdict, list[Table]]:
        """The verdict, and what is told of the draws."""
        if not drawing.index:
            nothing = mx.zeros(0, mx.int32)
            return Verdict(nothing, nothing, nothing), []
        logits = self.trunk.unembed(_flat(hidden)[mx.array(drawing.flat)])
        verdict = verify(logits, drawing.rows, drawing.spans)
        if not telling.draws:
            return verdict, []
        places = mx.array(telling.places)
        return verdict, [tell(logits[places], verdict.draws[places], telling.num_top)]

    def _feed_head(
        self,
        rows: Sequence[Row],
        grids: Sequence[Grid],
        hidden: Sequence[mx.array],
        drawing: _Drawing,
        verdict: Verdict,
    ) -> list[mx.array]:
        """What the head makes of each grid; where no row of it will ever draft, the head need not learn of it."""
        if not any(row.draw.may_draft for row in rows):
            return list(hidden)
        where = {flat: i for i, flat in enumerate(drawing.flat)}
        fed, base = [], 0
        for grid, part in zip(grids, hidden, strict=True):
            next_tokens = _next_tokens(rows, grid, base, where, verdict.draws)
            fed.append(self.drafter.feed(part, next_tokens, grid))
            base += grid.tokens.size
        return fed

    def _propose(self, fed: Sequence[mx.array], drawing: _Drawing, verdict: Verdict, plan: StepPlan) -> Proposal:
        steps = [plan.rows[i] for i in drawing.index]
        ends = Ends(
            rows=drawing.rows,
            spans=drawing.spans,
            places=[self.table.place(span.slot) for span in drawing.spans],
            propose=[min(step.draft.depth, self.drafter.max_depth) for step in steps],
            drafts=[step.draft for step in steps],
            last=mx.array(drawing.lasts, dtype=mx.int32) + verdict.accepted,
            accepted=verdict.accepted,
        )
        return self.drafter.propose(_flat(fed), ends)


def _flat(grids: Sequence[mx.array]) -> mx.array:
    """[tokens of all grids, ...], padding included."""
    flat = [grid.flatten(0, 1) for grid in grids]
    return flat[0] if len(flat) == 1 else mx.concatenate(flat)


def _firsts(grids: Sequence[Grid]) -> list[int]:
    """Where each row's first fed token lies among the tokens of all grids; by the row's index in the plan."""
    firsts, base = {}, 0
    for grid in grids:
        for place, i in enumerate(grid.index):
            firsts[i] = base + place * grid.width
        base += len(grid.index) * grid.width
    return [firsts[i] for i in range(len(firsts))]


def _drawing(rows: Sequence[Row], spans: Sequence[RowSpan], grids: Sequence[Grid]) -> _Drawing:
    drawing = _Drawing([], [], [], [], [])
    base = 0
    for grid in grids:
        for place, i in enumerate(grid.index):
            if rows[i].draws(spans[i]):
                last = base + place * grid.width + spans[i].num_certain - 1
                drawing.index.append(i)
                drawing.rows.append(rows[i])
                drawing.spans.append(spans[i])
                drawing.lasts.append(last)
                drawing.flat.extend(range(last, last + spans[i].num_drafts + 1))
        base += len(grid.index) * grid.width
    return drawing


def _next_tokens(rows: Sequence[Row], grid: Grid, base: int, where: dict[int, int], draws: mx.array) -> mx.array:
    """The token behind each fed one: the next known token, or the target's draw. int32 [rows, width]"""
    known, drawn = [], []  # of each token of the grid; drawn: its index among the draws, or -1
    for place, (i, span) in enumerate(zip(grid.index, grid.spans, strict=True)):
        ahead = rows[i].tokens[span.start + 1 : span.start + grid.width + 1]
        known += ahead + [0] * (grid.width - len(ahead))
        first = base + place * grid.width
        drawn += [where.get(first + j, -1) for j in range(grid.width)]
    tokens = mx.array(known, dtype=mx.int32)
    if max(drawn) >= 0:
        index = mx.array(drawn)
        tokens = mx.where(index >= 0, draws[mx.maximum(index, 0)], tokens)
    return tokens.reshape(len(grid.index), grid.width)


def _read(numbers: mx.array, confidences: mx.array | None) -> list[Told]:
    """numbers: int32 [rows, 3 + depth]; confidences: [rows, depth]"""
    rows: Any = numbers.tolist()
    parts: Any = [[]] * len(rows) if confidences is None else confidences.tolist()
    told = []
    for (accepted, drawn, length, *drafts), values in zip(rows, parts, strict=True):
        # The one behind the last draft is told too, if there was one: it ended them.
        told.append((accepted, drawn, drafts[:length], tuple(value for value in values[: length + 1] if value)))
    return told
