"""PyTorch behind the runner protocol: one ragged forward a step for all rows, one host sync, then the commit.

gather rows -> forward -> verify -> feed the head -> propose -> read the verdict -> commit. Nothing on the host changes
before the verdict is read, so a step that dies commits nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.contract import RowStep, RunnerInfo, Start, StepCosts, StepPlan, StepResult
from slipstream.runners.cpu.threads import keep_to_this_thread
from slipstream.runners.logprobs import Numbers, Telling, find_telling, with_logprobs
from slipstream.runners.masks import Guide
from slipstream.runners.rows import RowSpan, Told, commit
from slipstream.runners.torch.batch import RaggedBatch, make_batch
from slipstream.runners.torch.caches import GdnCache, PagedKv
from slipstream.runners.torch.calibrate import measure
from slipstream.runners.torch.clock import step_clock
from slipstream.runners.torch.drafter import Drafter, Ends, Proposal
from slipstream.runners.torch.draw import Verdict, verify
from slipstream.runners.torch.feeding import Feeding, Share
from slipstream.runners.torch.logprobs import tell, tell_hidden
from slipstream.runners.torch.models.decoder import Decoder
from slipstream.runners.torch.ops import Ops
from slipstream.runners.torch.rows import Row, RowTable

FINE = 1 << 24  # confidences travel with the tokens, as whole numbers of this part


@dataclass(frozen=True, slots=True)
class _Drawing:
    """The rows of a step that draw, and where."""

    index: list[int]  # in the plan's rows
    rows: list[Row]
    spans: list[RowSpan]
    flat: Tensor  # int64 [drawing positions]: in the flat batch
    last_certain: Tensor  # int64 [rows]: flat index of each row's last known token
    cursor_certain: Tensor  # int64 [rows]: its position + 1


class TorchRunner:
    def __init__(
        self,
        info: RunnerInfo,
        decoder: Decoder,
        drafter: Drafter,
        ops: Ops,
        table: RowTable,
        kv: PagedKv,
        gdn: GdnCache | None,
        simulate_acceptance: Sequence[float] = (),
        *,
        fused: bool = False,
    ) -> None:
        """``fused``: layers are computed by kernels alone, on threads of their own."""
        self.info = info
        self.kv = kv
        self.gdn = gdn
        self.drafter = drafter
        self.feeding = Feeding(table.block_table)
        self.num_forwards = 0
        self.decoder = decoder
        self._ops = ops
        self.table = table
        self._simulate = simulate_acceptance
        self._fused = fused
        self._done: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        if self._fused:
            keep_to_this_thread()
        with torch.inference_mode():
            self._come_and_go(plan)
            self._done.append(self._step(plan) if plan.rows else StepResult(plan.step, ()))

    def collect(self) -> StepResult:
        return self._done.popleft()

    def close(self) -> None:
        self._done.clear()

    def _come_and_go(self, plan: StepPlan) -> None:
        for slot in plan.leaves:
            self.table.leave(slot)
            self.feeding.forget(slot)
        for join in plan.joins:
            self.table.join(join)
            if join.start.state_of is not None:
                self._start(join.start, join.start.state_of, join.slot)
            elif self.gdn is not None:
                self.gdn.reset(join.slot)
        for step in plan.rows:
            self.table.grow(step)

    def _start(self, start: Start, source: int, slot: int) -> None:
        self.feeding.fork(source, slot)
        if start.copied is not None:
            self.kv.copy(*start.copied)
        if self.gdn is not None:
            assert self.table[source].num_replay == 0
            self.gdn.copy(source, slot)

    def _step(self, plan: StepPlan) -> StepResult:
        clock = step_clock(self._ops.device)
        clock.mark()
        rows = [self.table[step.slot] for step in plan.rows]
        spans = self._spans(rows, [step.feed for step in plan.rows])
        tokens = [token for row, span in zip(rows, spans, strict=True) for token in row.fed_tokens(span)]
        batch = make_batch(spans, tokens, self.table.block_table)
        hidden = self._forward(batch)
        drawing = self._drawing(rows, spans)
        telling = find_telling(rows, spans, drawing.index)
        told = self._tell_prompts(hidden, rows, spans, telling)
        verdict, told_draws = self._verify(hidden, drawing, telling)
        clock.mark()
        steps = [plan.rows[i] for i in drawing.index]
        fed, last = hidden, drawing.last_certain + verdict.accepted
        if any(row.draw.may_draft for row in rows):
            next_tokens = self._next_tokens(rows, spans, drawing, verdict)
            if self._ops.device.type == "cpu":
                shares = self._shares(rows, spans, drawing, verdict, steps)
                fed, places = self.feeding.feed(self.drafter, hidden, next_tokens, batch, shares)
                last = torch.tensor([places[i] for i in drawing.index], dtype=torch.int64)
            else:
                fed = self.drafter.feed(hidden, next_tokens, batch)
        proposal = self._propose(fed, last, drawing, verdict, steps)
        clock.mark()
        verdicts, numbers = _read(verdict, proposal, told + told_draws)
        self.feeding.settle()
        results = commit(rows, spans, dict(zip(drawing.index, verdicts, strict=True)))
        return StepResult(
            plan.step, with_logprobs(results, [row.asked for row in rows], telling, numbers), *clock.read()
        )

    def _spans(self, rows: Sequence[Row], feeds: Sequence[int]) -> tuple[RowSpan, ...]:
        spans: list[RowSpan] = []
        offset = 0
        for row, feed in zip(rows, feeds, strict=True):
            span = row.span(feed, offset)
            spans.append(span)
            offset += span.num_fed
        return tuple(spans)

    def _forward(self, batch: RaggedBatch) -> Tensor:
        self.num_forwards += 1
        return self.decoder.forward(self.decoder.embed(batch.tokens), batch)

    def _drawing(self, rows: Sequence[Row], spans: Sequence[RowSpan]) -> _Drawing:
        index = [i for i, (row, span) in enumerate(zip(rows, spans, strict=True)) if row.draws(span)]
        chosen = [spans[i] for i in index]
        lasts = [span.offset + span.num_certain - 1 for span in chosen]
        flat = [last + j for last, span in zip(lasts, chosen, strict=True) for j in range(span.num_drafts + 1)]
        ends = [span.start + span.num_certain for span in chosen]
        packed = torch.tensor([*flat, *lasts, *ends], dtype=torch.int64).to(self._ops.device, non_blocking=True)
        parts = packed.split([len(flat), len(lasts), len(ends)])
        return _Drawing(index, [rows[i] for i in index], chosen, *parts)

    def _tell_prompts(
        self, hidden: Tensor, rows: Sequence[Row], spans: Sequence[RowSpan], telling: Telling
    ) -> list[Tensor]:
        """Of the prompts that are read, where asked for: the one reason to look at logits there."""
        if not telling.prompt:
            return []
        places = telling.prompt_places([span.offset for span in spans])
        packed = torch.tensor([places, telling.prompt_tokens(rows, spans)]).to(self._ops.device, non_blocking=True)
        return [tell_hidden(hidden[packed[0]], self._chances, self.info.vocab_size, packed[1], telling.num_top)]

    def _chances(self, hidden: Tensor) -> Tensor:
        """Log-probabilities. [positions, vocab]"""
        return self._ops.log_softmax(self.decoder.unembed(hidden))

    def _verify(self, hidden: Tensor, drawing: _Drawing, telling: Telling) -> tuple[Verdict, list[Tensor]]:
        """The verdict, and what is told of the draws."""
        if not drawing.index:
            nothing = drawing.flat
            return Verdict(nothing, nothing, nothing), []
        logits = self.decoder.unembed(hidden[drawing.flat])
        if not telling.draws:
            return verify(self._ops, logits, drawing.rows, drawing.spans, self._simulate), []
        places = torch.tensor(telling.places).to(self._ops.device, non_blocking=True)
        chances = self._ops.log_softmax(logits[places])
        verdict = verify(self._ops, logits, drawing.rows, drawing.spans, self._simulate)
        return verdict, [tell(chances, verdict.draws[places], telling.num_top)]

    def _next_tokens(
        self, rows: Sequence[Row], spans: Sequence[RowSpan], drawing: _Drawing, verdict: Verdict
    ) -> Tensor:
        """The token behind each fed one: the next known token, or the target's draw. int64 [tokens]"""
        known: list[int] = []
        for row, span in zip(rows, spans, strict=True):
            ahead = row.tokens[span.start + 1 : span.start + span.num_fed + 1]
            known += ahead + [0] * (span.num_fed - len(ahead))
        tokens = torch.tensor(known).to(self._ops.device, non_blocking=True)
        tokens[drawing.flat] = verdict.draws
        return tokens

    def _shares(
        self,
        rows: Sequence[Row],
        spans: Sequence[RowSpan],
        drawing: _Drawing,
        verdict: Verdict,
        steps: Sequence[RowStep],
    ) -> list[Share]:
        """On the CPU a look at the verdict costs nothing, so the head learns what was kept, and when it matters."""
        accepted = dict(zip(drawing.index, verdict.accepted.tolist(), strict=True))
        drafts = dict(zip(drawing.index, (step.draft.depth > 0 for step in steps), strict=True))
        return [
            Share(
                span,
                span.num_certain + accepted.get(i, 0),
                at_once=drafts.get(i, False),
                at_all=row.draw.may_draft,
            )
            for i, (row, span) in enumerate(zip(rows, spans, strict=True))
        ]

    def _propose(
        self, fed: Tensor, last: Tensor, drawing: _Drawing, verdict: Verdict, steps: list[RowStep]
    ) -> Proposal:
        """``last``: of each row, where its last kept token lies in what was fed."""
        cursors = drawing.cursor_certain + verdict.accepted
        allowed = [min(step.draft.depth, self.drafter.max_depth) for step in steps]
        bounds = [step.draft for step in steps]
        guides = self._guides(drawing.rows, verdict) if any(allowed) else []
        return self.drafter.propose(fed, Ends(drawing.rows, drawing.spans, allowed, last, cursors, bounds, guides))

    def _guides(self, rows: Sequence[Row], verdict: Verdict) -> list[Guide]:
        """On the CPU a look at the verdict costs nothing, so constrained rows draft what may follow it."""
        if self._ops.device.type != "cpu" or all(row.matcher is None for row in rows):
            return []
        told = zip(rows, verdict.accepted.tolist(), verdict.drawn.tolist(), strict=True)
        return [Guide(row, accepted, drawn) for row, accepted, drawn in told]

    def calibrate(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
        assert len(self.table) == 0, "calibration needs an idle runner"
        if self._fused:
            keep_to_this_thread()
        with torch.inference_mode():
            return measure(self.decoder, self.drafter, self._ops, self.table, self.info, num_tokens, num_rows)


def _read(verdict: Verdict, proposal: Proposal, told: list[Tensor]) -> tuple[list[Told], list[Numbers]]:
    """The step's one host sync: the verdict of each row, and what is told of tokens."""
    depth = proposal.drafts.shape[1]
    columns = [verdict.accepted[:, None], verdict.drawn[:, None], proposal.lengths[:, None], proposal.drafts]
    if proposal.confidences is not None:
        columns.append((proposal.confidences * FINE).long())
    rows, numbers = _fetch(torch.cat(columns, dim=1), told)
    verdicts = []
    for accepted, drawn, length, *rest in rows:
        # The one behind the last draft is told too, if there was one: it ended them.
        confidences = tuple(part / FINE for part in rest[depth:][: length + 1] if part)
        verdicts.append((accepted, drawn, rest[:length], confidences))
    return verdicts, numbers


def _fetch(columns: Tensor, told: list[Tensor]) -> tuple[list[list[int]], list[Numbers]]:
    """Whole numbers and log-probabilities in one piece, where there are both: all of them are exact in float64."""
    if not told:
        return columns.tolist(), []
    numbers = torch.cat(told)
    flat = torch.cat([columns.double().flatten(), numbers.flatten()]).tolist()
    num_rows, width = columns.shape
    rows = [list(map(int, flat[i * width : (i + 1) * width])) for i in range(num_rows)]
    rest, width = flat[num_rows * width :], numbers.shape[1]
    return rows, [rest[i : i + width] for i in range(0, len(rest), width)]
