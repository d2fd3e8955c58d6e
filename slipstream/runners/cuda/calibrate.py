"""Times steps and draft passes on this GPU, for the depth policy: by tokens, and what each row costs beside them.

Runs the captured steps on made-up rows in caches that nobody owns yet.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import torch

from slipstream.config import EngineConfig
from slipstream.engine.contract import DraftRequest, StepCosts
from slipstream.runners.costs import Points, rising
from slipstream.runners.cuda.host_rows import RowFeed
from slipstream.runners.cuda.layout import ROW_BUCKETS, TOKEN_BUCKETS, Layout, StepShape, lay_out
from slipstream.runners.cuda.warmup import rehearse

if TYPE_CHECKING:
    from slipstream.runners.cuda.runner import CudaRunner

ROUNDS = 3
CONTEXT = 64  # tokens each made-up row has behind it
PIECE = EngineConfig().max_chunk
MOST_MIXED_ROWS = 64


def measure(runner: CudaRunner, max_rows: int) -> StepCosts:
    """Costs are flat between buckets: a point at both ends of each. What is captured on the way, serving uses."""
    if runner.device.type != "cuda":
        return StepCosts()
    # Unlike tokens, as streams have them: a sparse model reads more experts for them than for equal ones.
    runner.rows.tokens.random_(0, runner.info.vocab_size)
    row_sizes = [min(n, max_rows) for n in _up_to(ROW_BUCKETS, max_rows)]
    sizes = _sizes(row_sizes, runner.depth)
    untimed = [*_mixed(runner, max_rows), _layout(runner, 1, 1, 0, plain=False)]
    rehearse(runner, _to_rehearse(runner, sizes, untimed))
    verify = {(n, num_rows): _seconds(runner, n, num_rows)[0] for n, num_rows in sizes}
    draft = {n: _draft_seconds(runner, n) for n in row_sizes} if runner.depth > 1 else {}
    for layout in untimed:
        _run_twice(runner, layout)
    _set_rows(runner, 0, 0)
    per_row = _per_row(verify)
    fewest = {n: min(rows for m, rows in verify if m == n) for n, _ in verify}
    points = [(n, max(0.0, verify[n, rows] - per_row * rows)) for n, rows in sorted(fewest.items())]
    return StepCosts(_stairs(points), _stairs(list(draft.items())), per_row)


def _sizes(row_sizes: list[int], depth: int) -> list[tuple[int, int]]:
    """Every (tokens, rows) that decoding rows can come to, after rounding up: all of them will be met."""
    found = []
    for num_rows in row_sizes:
        most = num_rows * (1 + depth)
        between = [min(n, most) for n in _up_to(TOKEN_BUCKETS, most) if n > num_rows]
        found += [(n, num_rows) for n in (num_rows, *between)]
    return found


def _mixed(runner: CudaRunner, max_rows: int) -> list[Layout]:
    """Decoding rows beside a piece of a prompt: not timed, but captured, so that a prompt's arrival is no pause."""
    found: dict[StepShape, Layout] = {}
    for num_rows in range(2, min(max_rows, MOST_MIXED_ROWS) + 1):
        for feed in range(1, runner.depth + 2):
            decoding = [RowFeed(slot, feed) for slot in range(num_rows - 1)]
            layout = _laid_out(runner, [*decoding, RowFeed(num_rows - 1, PIECE, PIECE + 1)])
            found.setdefault(layout.shape, layout)
    return list(found.values())


def _to_rehearse(runner: CudaRunner, sizes: list[tuple[int, int]], untimed: list[Layout]) -> list[Layout]:
    """Steps that launch all that calibration does, and what the first request begins with: a prompt alone."""
    drafting = [_layout(runner, n, num_rows, runner.depth) for n, num_rows in sizes]
    prompts = [n for n in TOKEN_BUCKETS if n <= runner.buffers.max_tokens]
    return [*drafting, *untimed, *(_laid_out(runner, [RowFeed(0, n, n)]) for n in prompts)]


def _run_twice(runner: CudaRunner, layout: Layout) -> None:
    """As it is, which compiles what it needs, and captured."""
    for _ in range(2):
        _set_rows(runner, min(CONTEXT, runner.info.max_context // 2), 0)
        runner.run(layout)


def _up_to(buckets: tuple[int, ...], most: int) -> list[int]:
    below = [n for n in buckets if n < most]
    return [*below, buckets[len(below)]]


def _per_row(verify: dict[tuple[int, int], float]) -> float:
    """As many tokens in many rows against few: the difference is what the rows' own state costs. The median."""
    slopes = [
        (verify[n, many] - verify[n, few]) / (many - few)
        for n, many in verify
        for m, few in verify
        if m == n and few < many
    ]
    return max(0.0, median(slopes)) if slopes else 0.0


def _stairs(points: list[tuple[int, float]]) -> Points:
    levelled = rising(points)
    stairs = list(levelled[:1])
    for (before, _), (n, seconds) in pairwise(levelled):
        stairs += [(before + 1, seconds), (n, seconds)] if before + 1 < n else [(n, seconds)]
    return tuple(stairs)


def _set_rows(runner: CudaRunner, known: int, drafts: int) -> None:
    state = runner.rows.state
    state.known.fill_(known)
    state.cursor.fill_(max(0, known - 1))
    state.drafts.fill_(drafts)
    state.replay.fill_(0)


def _layout(runner: CudaRunner, num_tokens: int, num_rows: int, propose: int, plain: bool = True) -> Layout:
    feeds = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
    rows = [RowFeed(slot, feed, draft=DraftRequest(propose)) for slot, feed in enumerate(feeds)]
    return _laid_out(runner, rows, plain)


def _laid_out(runner: CudaRunner, feeds: list[RowFeed], plain: bool = True) -> Layout:
    sizes = (CONTEXT, runner.depth, runner.buffers.max_rows)
    longest = runner.info.max_context + runner.depth
    return lay_out(feeds, *sizes, longest=longest, plain=plain, feeds_head=runner.depth > 0)


def _seconds(runner: CudaRunner, num_tokens: int, num_rows: int, propose: int = 0) -> tuple[float, float]:
    """Of verification and of the draft passes."""
    layout = _layout(runner, num_tokens, num_rows, propose)
    times = []
    for _ in range(2 + ROUNDS):  # as it is, captured, and then timed
        _set_rows(runner, min(CONTEXT, runner.info.max_context // 2), runner.depth)
        (start,), (verified,) = runner.run(layout)
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        times.append((start.elapsed_time(verified) / 1e3, verified.elapsed_time(end) / 1e3))
    verify, draft = zip(*times[2:], strict=True)
    return median(verify), median(draft)


def _draft_seconds(runner: CudaRunner, num_rows: int) -> float:
    """One pass of the head over its own output, as the second draft needs it."""
    one = _seconds(runner, num_rows, num_rows, 1)[1]
    two = _seconds(runner, num_rows, num_rows, 2)[1]
    return max(one, two - one)
