"""The runner protocol for libraries whose host reads the verdict: one forward a step for all rows, then the drafts.

feed rows -> forward -> sample -> accept -> feed the MTP head -> propose -> commit. No row changes before everything is
computed, so a step that fails commits nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Generic

from slipstream.engine.contract import HostBuffers, RowStep, RunnerInfo, StepCosts, StepPlan, StepResult
from slipstream.runners.host.accept import accept_all
from slipstream.runners.host.calibrate import measure
from slipstream.runners.host.drafter import HostDrafter
from slipstream.runners.host.logprobs import prompt_index, prompt_tokens, step_logprobs
from slipstream.runners.host.masks import sample_masks
from slipstream.runners.host.model import A, B, CommittedStep, HostModel
from slipstream.runners.host.rows import (
    NO_PROPOSAL,
    CommittedRow,
    DraftRow,
    Proposal,
    Row,
    SamplingRows,
    Verdict,
    commit_rows,
    join_row,
    sampling_rows,
    spans_of,
)
from slipstream.runners.logprobs import PIECE, Numbers, StepLogprobs, with_logprobs
from slipstream.runners.rows import RowSpan
from slipstream.runners.simulate import Simulation


class HostRunner(Generic[A, B]):
    def __init__(
        self,
        info: RunnerInfo,
        model: HostModel[A, B],
        drafter: HostDrafter[A, B],
        simulation: Simulation | None = None,
    ) -> None:
        self.info = info
        self.model = model
        self.drafter = drafter
        self.rows: dict[int, Row] = {}  # by slot
        self.num_forwards = 0
        self._simulation = simulation
        self._done: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        with self.model.stepping():
            self._join_and_leave(plan)
            self._done.append(self._step(plan) if plan.rows else StepResult(plan.step, ()))

    def collect(self) -> StepResult:
        return self._done.popleft()

    @property
    def host_memory(self) -> HostBuffers | None:
        return self.model.host

    def calibrate(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
        assert not self.rows, "calibration needs an idle runner"
        with self.model.stepping():
            return measure(self.info, self.model, self.drafter, num_tokens, num_rows)

    def close(self) -> None:
        self._done.clear()

    def _join_and_leave(self, plan: StepPlan) -> None:
        for slot in plan.leaves:
            del self.rows[slot]
            self.model.leave(slot)
            self.drafter.leave(slot)
        for transfer in plan.saves:
            self.model.save(transfer)
        for transfer in plan.loads:
            self.model.load(transfer)
        for join in plan.joins:
            assert join.slot not in self.rows, f"slot {join.slot} is taken"
            source = join.start.state_of
            if source is not None and source >= self.info.num_slots:
                source = None  # a state slot: no row
            assert source is None or self.rows[source].num_replay == 0
            self.rows[join.slot] = join_row(join, self.info.vocab_size, *self.model.processors_for(join.params))
            self.model.join(join)
            self.drafter.join(join.slot, source)
        for step in plan.rows:
            self.model.grow(step.slot, step.blocks)

    def _step(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        rows = [self.rows[step.slot] for step in plan.rows]
        spans = spans_of(rows, plan.rows)
        batch = self.model.lay_out(spans)
        tokens = [token for row, span in zip(rows, spans, strict=True) for token in row.fed_tokens(span)]
        hidden = self.model.forward(tokens, batch)
        self.num_forwards += 1
        sampling = sampling_rows(rows, spans)
        wanted = step_logprobs(rows, spans, sampling)
        numbers = self._prompt_logprobs(hidden, rows, spans, wanted)
        verdicts, sample_numbers = self._verify(hidden, sampling, wanted)
        middle = time.perf_counter()
        by_index = dict(zip(sampling.index, verdicts, strict=True))
        self.drafter.committed(CommittedStep(hidden, batch, self._committed(rows, spans, by_index, plan.rows)))
        proposals = self._propose(sampling, verdicts, [plan.rows[i] for i in sampling.index])
        self.model.finish()
        self.drafter.settle()
        outcomes = dict(zip(sampling.index, zip(verdicts, proposals, strict=True), strict=True))
        results = commit_rows(rows, spans, outcomes)
        results = with_logprobs(results, [row.logprobs for row in rows], wanted, numbers + sample_numbers)
        late = self.drafter.late_seconds
        return StepResult(plan.step, results, middle - began, time.perf_counter() - middle - late, late)

    def _prompt_logprobs(
        self, hidden: A, rows: Sequence[Row], spans: Sequence[RowSpan], wanted: StepLogprobs
    ) -> list[Numbers]:
        """Of prompts that are read, where asked for: the one reason to compute logits there. Piece by piece, since
        prompts are long and vocabularies large."""
        index = prompt_index(wanted, spans)
        tokens = prompt_tokens(wanted, rows, spans)
        size = max(1, PIECE // self.info.vocab_size)
        numbers: list[Numbers] = []
        for start in range(0, len(index), size):
            logits = self.model.logits(self.model.take(hidden, index[start : start + size]))
            logprobs = self.model.log_softmax(logits)
            numbers += self.model.token_logprobs(logprobs, tokens[start : start + size], wanted.num_top)
        return numbers

    def _verify(self, hidden: A, sampling: SamplingRows, wanted: StepLogprobs) -> tuple[list[Verdict], list[Numbers]]:
        """The verdict on each sampling row, and the log-probabilities of its samples where asked for."""
        if not sampling.index:
            return [], []
        model = self.model
        logits = model.logits(model.take(hidden, sampling.flat))
        own = model.log_softmax(model.take(logits, wanted.sample_index)) if wanted.samples else None
        masks = sample_masks(sampling)
        logits = model.process(logits, sampling.rows, sampling.spans, masks)
        each = [
            row.sampling
            for row, span in zip(sampling.rows, sampling.spans, strict=True)
            for _ in range(span.num_drafts + 1)
        ]
        sampled = model.read(model.sample(logits, each, sampling.positions))
        verdicts = accept_all(sampling, sampled, None if masks is None else masks.max_accepted, self._simulation)
        if own is None:
            return verdicts, []
        return verdicts, model.token_logprobs(own, [sampled[i] for i in wanted.sample_index], wanted.num_top)

    def _committed(
        self, rows: Sequence[Row], spans: Sequence[RowSpan], verdicts: dict[int, Verdict], steps: Sequence[RowStep]
    ) -> list[CommittedRow]:
        committed = []
        for i, (row, span, step) in enumerate(zip(rows, spans, steps, strict=True)):
            verdict = verdicts.get(i)
            kept = span.num_committed + (verdict.num_accepted if verdict else 0)
            following = row.tokens[span.start + 1 : span.start + kept + 1]
            if verdict is not None:
                following += [*row.drafts[: verdict.num_accepted], verdict.sampled]
            following += [0] * (span.num_fed - len(following))
            drafts_now = verdict is not None and step.draft.depth > 0
            committed.append(CommittedRow(span, kept, following, drafts_now, row.may_draft))
        return committed

    def _propose(self, sampling: SamplingRows, verdicts: Sequence[Verdict], steps: Sequence[RowStep]) -> list[Proposal]:
        """One for each sampling row."""
        asked = {
            i: DraftRow(row, step.draft, verdict, span.start + span.num_committed + verdict.num_accepted)
            for i, (row, span, step, verdict) in enumerate(
                zip(sampling.rows, sampling.spans, steps, verdicts, strict=True)
            )
            if step.draft.depth > 0
        }
        made = dict(zip(asked, self.drafter.propose(list(asked.values())), strict=True)) if asked else {}
        return [made.get(i, NO_PROPOSAL) for i in range(len(sampling.index))]
