"""Times verification by tokens and a draft pass by rows on this machine, for the depth policy.

Runs the real trunk and head on made-up tokens in places that nobody owns yet. All sizes take turns, and the median
counts. On Apple chips the cost of verification is a staircase in the number of tokens: the log says what was found.
Small sizes come first, and no more begin once SECONDS have passed: on a machine where a step takes long, the curve is
drawn on from what it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import mlx.core as mx

from slipstream.engine.contract import NO_DRAFTS, StepCosts
from slipstream.runners.costs import Points, rising
from slipstream.runners.mlx.drafter import Ends
from slipstream.runners.mlx.grid import Grid, make_grid
from slipstream.runners.mlx.rows import Row, RowDraw
from slipstream.runners.rows import RowSpan

if TYPE_CHECKING:
    from slipstream.runners.mlx.runner import MlxRunner

ROUNDS = 5
SECONDS = 8.0
LEAST = 2  # sizes of each kind that are timed however long they take: a slope needs two
CONTEXT = 64  # tokens each made-up row has behind it
GREEDY = RowDraw(
    greedy=True, inv_temperature=1.0, seed=0, p_min=0.0, num_prompt=0, may_draft=True, processors=()
)  # fmt: skip

Task = Callable[[], object]
log = logging.getLogger(__name__)


def measure(runner: MlxRunner, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
    seconds = _take_turns(runner, num_tokens, [n for n in num_rows if n <= runner.info.num_slots])
    for slot in range(runner.info.num_slots):
        runner.forget(slot)
    draft = [(n, max(seconds["depth 1", n], second - seconds["depth 1", n])) for n, second in _of(seconds, "depth 2")]
    costs = StepCosts(rising(_of(seconds, "verify")), rising(draft))
    log.info("a step by tokens: %s; a draft pass by rows: %s", told(costs.verify), told(costs.draft))
    return costs


def told(points: Points) -> str:
    """Milliseconds by size, in one line."""
    return " ".join(f"{n}:{seconds * 1e3:.3g}ms" for n, seconds in points) or "-"


def _of(seconds: dict[tuple[str, int], float], kind: str) -> list[tuple[int, float]]:
    return [(n, value) for (name, n), value in seconds.items() if name == kind]


def _start(runner: MlxRunner) -> int:
    return min(CONTEXT, runner.info.max_context // 2)


def _grid(runner: MlxRunner, num_tokens: int) -> Grid:
    """Rows of equally many tokens, as few as hold them all."""
    width = -(-num_tokens // min(runner.info.num_slots, -(-num_tokens // (1 + runner.drafter.max_depth))))
    counts = [width] * (num_tokens // width) + ([num_tokens % width] if num_tokens % width else [])
    spans = [RowSpan(slot, _start(runner), 0, count) for slot, count in enumerate(counts)]
    return make_grid(range(len(spans)), spans, range(len(spans)), [[1] * count for count in counts])


def _verify_step(runner: MlxRunner, grid: Grid) -> None:
    hidden = runner.forward(grid)
    draws = mx.argmax(runner.trunk.unembed(hidden), axis=-1).astype(mx.int32)
    mx.eval(runner.drafter.feed(hidden, draws, grid), draws, runner.cache_arrays())


def _proposal(runner: MlxRunner, num_rows: int, depth: int) -> Task:
    spans = [RowSpan(slot, _start(runner), 0, 1) for slot in range(num_rows)]
    grid = make_grid(range(num_rows), spans, range(num_rows), [[1]] * num_rows)
    fed = runner.drafter.feed(runner.forward(grid), grid.tokens, grid).flatten(0, 1)
    mx.eval(fed, runner.cache_arrays())
    ends = Ends(
        rows=[Row(span.slot, [1] * span.start, GREEDY) for span in spans],
        spans=spans,
        places=range(num_rows),
        propose=[depth] * num_rows,
        drafts=[NO_DRAFTS] * num_rows,
        last=mx.arange(num_rows),
        accepted=mx.zeros(num_rows, mx.int32),
    )
    return partial(_propose, runner, fed, ends)


def _propose(runner: MlxRunner, fed: mx.array, ends: Ends) -> None:
    proposal = runner.drafter.propose(fed, ends)
    mx.eval(proposal.drafts, proposal.lengths, runner.cache_arrays())


def _take_turns(runner: MlxRunner, num_tokens: Sequence[int], num_rows: Sequence[int]) -> dict[tuple[str, int], float]:
    """Median seconds of each task there was time for. The first round warms up, and counts if it is all there is."""
    until = time.perf_counter() + SECONDS
    tasks: dict[tuple[str, int], Task] = {}
    times: dict[tuple[str, int], list[float]] = {}
    sizes = sorted({*num_tokens, *num_rows})
    for index, n in enumerate(sizes):
        if index >= LEAST and time.perf_counter() > until:
            break
        for key, task in _tasks(runner, n, n in num_tokens, n in num_rows):
            tasks[key], times[key] = task, [_timed(task)]
    for _ in range(ROUNDS):
        for key, task in tasks.items():
            if time.perf_counter() < until:
                times[key].append(_timed(task))
    return {key: median(taken[1:] or taken) for key, taken in times.items()}


def _tasks(runner: MlxRunner, n: int, verifies: bool, drafts: bool) -> Iterator[tuple[tuple[str, int], Task]]:
    if verifies:
        yield ("verify", n), partial(_verify_step, runner, _grid(runner, n))
    if drafts and runner.drafter.max_depth > 1:
        for depth in (1, 2):
            yield (f"depth {depth}", n), _proposal(runner, n, depth)


def _timed(task: Task) -> float:
    began = time.perf_counter()
    task()
    return time.perf_counter() - began
