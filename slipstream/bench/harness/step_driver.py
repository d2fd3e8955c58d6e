"""A runner driven by hand-made plans: rows of one depth, step after step, with nothing else in the way.

Keeps as many steps in flight as the runner allows, as the engine does. Without `p_min` a decoding row of depth d feeds
exactly 1 + d tokens a step, so every step of a run has the same shape.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import median

from slipstream.bench.harness.workload import random_prompt
from slipstream.engine.contract import DraftRequest, RowJoin, RowStep, Runner, StepPlan, StepResult
from slipstream.errors import ConfigError
from slipstream.sampling import SamplingParams

WARM_STEPS = 6


@dataclass(frozen=True, slots=True)
class StepTimes:
    rows: int
    depth: int
    tokens: int
    step_ms: float  # from one result to the next, the median: filling the pipeline is no part of it
    verify_ms: float  # of it, on the device: forward, sampling, commit, feeding the head
    draft_ms: float | None  # one draft pass


class Driver:
    def __init__(self, runner: Runner, max_step_tokens: int, context: int) -> None:
        self._runner = runner
        self._info = runner.info
        self._chunk = max_step_tokens
        self._context = context
        self._numbers = count()
        self._num_in_flight = 0
        self._ends: list[float] = []  # when results came

    def measure(self, num_rows: int, depth: int, num_steps: int) -> StepTimes:
        blocks = self._blocks(num_rows, depth, WARM_STEPS + num_steps)
        self._read_prompts(num_rows, depth, blocks)
        plan = tuple(RowStep(slot, 1 + depth, DraftRequest(depth)) for slot in range(num_rows))
        for _ in range(WARM_STEPS):
            self._submit(plan)
        self._drain()
        self._ends = [time.perf_counter()]
        results = [result for _ in range(num_steps) for result in self._submit(plan)] + self._drain()
        seconds = [after - before for before, after in pairwise(self._ends)]
        self._submit((), leaves=tuple(range(num_rows)))
        self._drain()
        return _times(num_rows, depth, median(seconds[1:] or seconds), results)

    def _blocks(self, num_rows: int, depth: int, num_steps: int) -> list[tuple[int, ...]]:
        """Enough for each row to accept everything."""
        length = self._context + (num_steps + 2) * (1 + depth)
        each = -(-length // self._info.block_size)
        if length > self._info.max_context or num_rows * each > self._info.num_blocks:
            raise ConfigError(
                f"{num_rows} rows of {length} tokens do not fit into {self._info.num_blocks} blocks of "
                f"{self._info.block_size} and a context of {self._info.max_context}: ask for fewer steps or rows"
            )
        return [tuple(range(row * each, (row + 1) * each)) for row in range(num_rows)]

    def _read_prompts(self, num_rows: int, depth: int, blocks: list[tuple[int, ...]]) -> None:
        """Rows join as a step has room for their prompts; a step holds as many prompts as fit, or a part of one."""
        per_step = max(1, self._chunk // self._context)
        params = SamplingParams(temperature=0.0)
        for first in range(0, num_rows, per_step):
            slots = range(first, min(first + per_step, num_rows))
            joins = tuple(self._join(slot, params, depth) for slot in slots)
            for at in range(0, self._context, self._chunk):
                feed = min(self._chunk, self._context - at)
                rows = tuple(RowStep(slot, feed, DraftRequest(depth), () if at else blocks[slot]) for slot in slots)
                self._submit(rows, () if at else joins)
        self._drain()

    def _join(self, slot: int, params: SamplingParams, depth: int) -> RowJoin:
        """At depth 0 as a request that wants no drafts: the head does not learn of it."""
        prompt = tuple(random_prompt(self._context, self._info.vocab_size, slot))
        return RowJoin(slot, prompt, len(prompt), params, slot, 0.0, may_draft=depth > 0)

    def _submit(
        self, rows: tuple[RowStep, ...], joins: tuple[RowJoin, ...] = (), leaves: tuple[int, ...] = ()
    ) -> list[StepResult]:
        """The results that had to be waited for."""
        self._runner.submit(StepPlan(next(self._numbers), leaves, joins, rows))
        self._num_in_flight += 1
        return self._collect(self._info.lag)

    def _drain(self) -> list[StepResult]:
        return self._collect(0)

    def _collect(self, max_in_flight: int) -> list[StepResult]:
        results = []
        while self._num_in_flight > max_in_flight:
            results.append(self._runner.collect())
            self._ends.append(time.perf_counter())
            self._num_in_flight -= 1
        return results


def _times(num_rows: int, depth: int, seconds: float, results: list[StepResult]) -> StepTimes:
    assert all(row.num_fed == 1 + depth for result in results for row in result.rows)
    draft = median(result.draft_seconds for result in results)
    return StepTimes(
        num_rows,
        depth,
        num_rows * (1 + depth),
        round(1e3 * seconds, 3),
        round(1e3 * median(result.verify_seconds for result in results), 3),
        round(1e3 * draft / depth, 3) if depth else None,
    )
