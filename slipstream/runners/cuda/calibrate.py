"""Times steps and draft passes on this GPU, for the depth policy: by tokens, and by rows beside them.

Runs the captured steps on made-up rows in caches that no stream owns yet.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from slipstream.config import EngineConfig
from slipstream.engine.contract import DraftRequest, StepCosts
from slipstream.runners.costs import Points, rising
from slipstream.runners.cuda.host_rows import RowFeed
from slipstream.runners.cuda.launch import StepLauncher
from slipstream.runners.cuda.layout import ROW_BUCKETS, TOKEN_BUCKETS, Layout, StepShape
from slipstream.runners.cuda.model.fp8_choice import choose_products
from slipstream.runners.cuda.warmup import warm_up

ROUNDS = 3
CONTEXT = 64  # computed tokens of each made-up row
PIECE = EngineConfig().max_chunk
MAX_MIXED_ROWS = 64


def measure(launcher: StepLauncher, max_rows: int) -> StepCosts:
    """Costs are flat between buckets: a point at both ends of each. Serving uses the graphs captured on the way."""
    if launcher.device.type != "cuda":
        return StepCosts()
    # Unlike tokens, as streams have them: a sparse model reads more experts for them than for equal ones.
    launcher.program.rows.tokens.random_(0, launcher.program.vocab_size)
    row_sizes = [min(n, max_rows) for n in _up_to(ROW_BUCKETS, max_rows)]
    sizes = _sizes(row_sizes, launcher.program.depth)
    untimed = [*_mixed(launcher, max_rows), _layout(launcher, 1, 1, 0, plain=False)]
    choose_products(launcher.program, launcher.graphs)
    warm_up(launcher.program, launcher.graphs, _to_warm_up(launcher, sizes, untimed))
    verify = {(n, num_rows): _seconds(launcher, n, num_rows)[0] for n, num_rows in sizes}
    draft = {n: _draft_seconds(launcher, n) for n in row_sizes} if launcher.program.depth > 1 else {}
    for layout in untimed:
        _run_twice(launcher, layout)
    _set_rows(launcher, 0, 0)
    per_row = _per_row(verify)
    fewest = {n: min(rows for m, rows in verify if m == n) for n, _ in verify}
    points = [(n, max(0.0, verify[n, rows] - per_row * rows)) for n, rows in sorted(fewest.items())]
    return StepCosts(_stairs(points), _stairs(list(draft.items())), per_row)


def _sizes(row_sizes: list[int], depth: int) -> list[tuple[int, int]]:
    """Every (tokens, rows) of decoding rows, rounded up: all of them will occur."""
    found = []
    for num_rows in row_sizes:
        largest = num_rows * (1 + depth)
        between = [min(n, largest) for n in _up_to(TOKEN_BUCKETS, largest) if n > num_rows]
        found += [(n, num_rows) for n in (num_rows, *between)]
    return found


def _mixed(launcher: StepLauncher, max_rows: int) -> list[Layout]:
    """Decoding rows beside a piece of a prompt: not timed, but captured, so that a prompt's arrival is no pause."""
    found: dict[StepShape, Layout] = {}
    for num_rows in range(2, min(max_rows, MAX_MIXED_ROWS) + 1):
        for feed in range(1, launcher.program.depth + 2):
            decoding = [RowFeed(slot, feed) for slot in range(num_rows - 1)]
            layout = _laid_out(launcher, [*decoding, RowFeed(num_rows - 1, PIECE, PIECE + 1)])
            found.setdefault(layout.shape, layout)
    return list(found.values())


def _to_warm_up(launcher: StepLauncher, sizes: list[tuple[int, int]], untimed: list[Layout]) -> list[Layout]:
    """Steps that launch all that calibration does, and the first step of a first request: a prompt alone."""
    drafting = [_layout(launcher, n, num_rows, launcher.program.depth) for n, num_rows in sizes]
    prompts = [n for n in TOKEN_BUCKETS if n <= launcher.program.buffers.max_tokens]
    return [*drafting, *untimed, *(_laid_out(launcher, [RowFeed(0, n, n)]) for n in prompts)]


def _run_twice(launcher: StepLauncher, layout: Layout) -> None:
    """Once as it is, which compiles its kernels, and once captured."""
    for _ in range(2):
        _set_rows(launcher, min(CONTEXT, launcher.max_context // 2), 0)
        launcher.run(layout)


def _up_to(buckets: tuple[int, ...], largest: int) -> list[int]:
    below = [n for n in buckets if n < largest]
    return [*below, buckets[len(below)]]


def _per_row(verify: dict[tuple[int, int], float]) -> float:
    """As many tokens in many rows against few: the difference is the cost of the rows' own state. The median."""
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


def _set_rows(launcher: StepLauncher, known: int, num_drafts: int) -> None:
    state = launcher.program.rows.state
    state.known.fill_(known)
    state.cursor.fill_(max(0, known - 1))
    state.num_drafts.fill_(num_drafts)
    state.replay.fill_(0)


def _layout(launcher: StepLauncher, num_tokens: int, num_rows: int, depth: int, plain: bool = True) -> Layout:
    feeds = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
    rows = [RowFeed(slot, feed, draft=DraftRequest(depth)) for slot, feed in enumerate(feeds)]
    return _laid_out(launcher, rows, plain)


def _laid_out(launcher: StepLauncher, feeds: list[RowFeed], plain: bool = True) -> Layout:
    feeds_head = launcher.program.depth > 0
    return launcher.lay_out(feeds, CONTEXT, plain=plain, feeds_head=feeds_head)


def _seconds(launcher: StepLauncher, num_tokens: int, num_rows: int, depth: int = 0) -> tuple[float, float]:
    """Of verification and of the draft passes."""
    layout = _layout(launcher, num_tokens, num_rows, depth)
    times = []
    for _ in range(2 + ROUNDS):  # as it is, captured, and then timed
        _set_rows(launcher, min(CONTEXT, launcher.max_context // 2), launcher.program.depth)
        events = launcher.run(layout)
        events.mark()
        times.append(events.seconds())
    verify, draft = zip(*times[2:], strict=True)
    return median(verify), median(draft)


def _draft_seconds(launcher: StepLauncher, num_rows: int) -> float:
    """One pass of the head over its own output, as the second draft needs it."""
    one = _seconds(launcher, num_rows, num_rows, 1)[1]
    two = _seconds(launcher, num_rows, num_rows, 2)[1]
    return max(one, two - one)
