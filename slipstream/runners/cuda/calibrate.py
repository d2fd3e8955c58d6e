"""Times steps, draft passes and the reading of prompts on this GPU: by tokens, and by rows beside them.

Runs the captured steps on made-up rows in caches that no stream owns yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median

import torch

from slipstream.engine.contract import DraftRequest, StepCosts
from slipstream.runners.costs import Points, of_context, rising
from slipstream.runners.cuda.host_rows import RowFeed
from slipstream.runners.cuda.kernels.recurrent.gdn import max_deferred
from slipstream.runners.cuda.launch import StepLauncher
from slipstream.runners.cuda.layout import ROW_BUCKETS, TOKEN_BUCKETS, Layout, StepShape, bucket
from slipstream.runners.cuda.model.fp8_choice import choose_products
from slipstream.runners.cuda.warmup import warm_up

ROUNDS, READ_ROUNDS = 3, 1
CONTEXT = 64  # computed tokens of each made-up row
MAX_MIXED_ROWS = 64
READ_SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 512)  # tokens of a prompt, of the buckets
LARGE_READ_SIZES = (1024, 2048)  # the same for prompts that came together
LARGE_READ_SECONDS = 0.25  # a GPU that takes longer gains nothing from so many at once, and is not to start late
READ_LONG_SIZES = (64, 512)  # of READ_SIZES, timed once more after a long context
LONG_CONTEXT = 8192  # tokens before the piece


def measure(launcher: StepLauncher, max_rows: int) -> StepCosts:
    """Costs are flat between buckets: a point at both ends of each. Serving uses the graphs captured on the way."""
    if launcher.device.type != "cuda":
        return StepCosts()
    # Unlike tokens, as streams have them: a sparse model reads more experts for them than for equal ones.
    launcher.program.rows.tokens.random_(0, launcher.program.vocab_size)
    row_sizes = [min(n, max_rows) for n in _up_to(ROW_BUCKETS, max_rows)]
    sizes = _sizes(row_sizes, launcher.program.depth)
    sampled = _layout(launcher, 1, 1, 0, plain=False)
    choose_products(launcher.program, launcher.graphs)
    warm_up(launcher.program, launcher.graphs, _to_warm_up(launcher, sizes, [sampled]))
    launcher.graphs.end_dry_runs()
    verify = {(n, rows): _seconds(launcher, _layout(launcher, n, rows, 0), n == rows)[0] for n, rows in sizes}
    draft = {n: _draft_seconds(launcher, n) for n in row_sizes} if launcher.program.depth > 1 else {}
    longest = min(launcher.program.buffers.max_tokens, launcher.max_context)
    read = {n: _read_seconds(launcher, n) for n in READ_SIZES if n <= longest}
    large = _read_large(launcher, read, longest)
    read_context = _read_context(launcher, read)
    for layout in [*_mixed(launcher, max_rows, read), sampled]:
        _run_twice(launcher, layout)
    _set_rows(launcher, 0, 0)
    per_row = _per_row(verify)
    fewest = {n: min(rows for m, rows in verify if m == n) for n, _ in verify}
    points = [(n, max(0.0, verify[n, rows] - per_row * rows)) for n, rows in sorted(fewest.items())]
    draft_points, read_points = _stairs(list(draft.items())), (*_stairs(list(read.items())), *large)
    return StepCosts(_stairs(points), draft_points, per_row, read=read_points, read_context=read_context)


def _sizes(row_sizes: list[int], depth: int) -> list[tuple[int, int]]:
    """Every (tokens, rows) of decoding rows, rounded up: all of them will occur."""
    found = []
    for num_rows in row_sizes:
        largest = num_rows * (1 + depth)
        between = [min(n, largest) for n in _up_to(TOKEN_BUCKETS, largest) if n > num_rows]
        found += [(n, num_rows) for n in (num_rows, *between)]
    return found


def _mixed(launcher: StepLauncher, max_rows: int, read: Mapping[int, float]) -> list[Layout]:
    """Decoding rows beside a piece of a prompt: not timed, but captured, so that a prompt's arrival is no pause.

    ``read``: seconds of reading, by tokens. The engine takes pieces by cost: those that it is likely to take."""
    found: dict[StepShape, Layout] = {}
    for num_rows in range(2, min(max_rows, MAX_MIXED_ROWS) + 1):
        for feed in range(1, launcher.program.depth + 2):
            layout = _beside(launcher, num_rows, feed, _likely_size(read, feed * (num_rows - 1)))
            found.setdefault(layout.shape, layout)
    return list(found.values())


def _beside(launcher: StepLauncher, num_rows: int, feed: int, num_tokens: int) -> Layout:
    """A step of so many tokens: decoding rows that feed so many each, and one that reads a prompt."""
    decoding = [RowFeed(slot, feed) for slot in range(num_rows - 1)]
    piece = num_tokens - feed * (num_rows - 1)
    return _laid_out(launcher, [*decoding, RowFeed(num_rows - 1, piece, piece + 1)])


def _likely_size(read: Mapping[int, float], num_decoding: int) -> int:
    """Tokens of a step that decodes so many and reads a prompt: the most that take twice as long as they do alone."""
    alone = next((read[n] for n in sorted(read) if n >= num_decoding), 0.0)
    fitting = [n for n, seconds in read.items() if num_decoding < n and seconds <= 2.0 * alone]
    return max(fitting, default=bucket(TOKEN_BUCKETS, num_decoding + 1))


def _to_warm_up(launcher: StepLauncher, sizes: list[tuple[int, int]], untimed: list[Layout]) -> list[Layout]:
    """Steps that launch all that calibration does, the first step of a first request (a prompt alone), and pieces of
    prompts beside decoding rows."""
    drafting = [_layout(launcher, n, num_rows, launcher.program.depth) for n, num_rows in sizes]
    prompts = [n for n in TOKEN_BUCKETS if n <= launcher.program.buffers.max_tokens]
    most, piece = min(max(num_rows for _, num_rows in sizes), MAX_MIXED_ROWS), min(READ_SIZES[-1], prompts[-1])
    beside = [_beside(launcher, rows, 1, piece) for rows in {*_up_to(ROW_BUCKETS, most), most} if 1 < rows <= most]
    return [*drafting, *untimed, *beside, *(_prompt(launcher, n) for n in prompts)]


def _prompt(launcher: StepLauncher, num_tokens: int) -> Layout:
    return _laid_out(launcher, [RowFeed(0, num_tokens, num_tokens)])


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


def _set_rows(launcher: StepLauncher, known: int, num_drafts: int, num_uncomputed: int = 1, deferred: int = 0) -> None:
    """``deferred``: tokens that a state may lack; each row lacks as many as its slot does in the middle of decoding."""
    state, start = launcher.program.rows.state, max(0, known - num_uncomputed)
    state.known.fill_(known)
    state.cursor.fill_(start)
    state.num_drafts.fill_(num_drafts)
    slots = torch.arange(len(state.replay), device=state.replay.device, dtype=state.replay.dtype)
    state.replay.copy_((slots + start + deferred) % (deferred + 1))


def _layout(launcher: StepLauncher, num_tokens: int, num_rows: int, depth: int, plain: bool = True) -> Layout:
    feeds = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
    rows = [RowFeed(slot, feed, draft=DraftRequest(depth)) for slot, feed in enumerate(feeds)]
    return _laid_out(launcher, rows, plain)


def _laid_out(launcher: StepLauncher, feeds: list[RowFeed], plain: bool = True) -> Layout:
    feeds_head = launcher.program.depth > 0
    return launcher.lay_out(feeds, CONTEXT, plain=plain, feeds_head=feeds_head)


def _seconds(launcher: StepLauncher, layout: Layout, plain: bool = False) -> tuple[float, float]:
    """Of verification and of the draft passes. ``plain``: rows of one token, without drafts."""
    known = min(CONTEXT, launcher.max_context // 2)
    deferred = max_deferred(layout.shape.num_rows) if plain else 0
    return _timed(launcher, layout, ROUNDS, known, launcher.program.depth, 1, deferred)


def _read_seconds(launcher: StepLauncher, num_tokens: int, num_before: int = 0) -> float:
    return _timed(launcher, _prompt(launcher, num_tokens), READ_ROUNDS, num_before + num_tokens, 0, num_tokens)[0]


def _read_large(launcher: StepLauncher, read: Mapping[int, float], longest: int) -> Points:
    """As far as they take no longer than allowed, by the speed of the size before."""
    found = [max(read.items(), default=(1, LARGE_READ_SECONDS))]
    for n in LARGE_READ_SIZES:
        before, seconds = found[-1]
        if n > longest or n * seconds / before > LARGE_READ_SECONDS:
            break
        found.append((n, max(seconds, _read_seconds(launcher, n))))
    return tuple(found[1:])


def _read_context(launcher: StepLauncher, read: Mapping[int, float]) -> tuple[float, float]:
    """Two sizes again, by the same graphs: of few tokens each takes more time, since they leave processors idle."""
    sizes = [n for n in READ_LONG_SIZES if n in read]
    num_before = min(LONG_CONTEXT, launcher.max_context - max(sizes, default=0))
    if num_before <= 0:
        return 0.0, 0.0
    return of_context([(n, _read_seconds(launcher, n, num_before) - read[n]) for n in sizes], num_before)


def _timed(launcher: StepLauncher, layout: Layout, rounds: int, *rows: int) -> tuple[float, float]:
    """``rows``: the state of all rows before each run."""
    num_before = 2 if launcher.captures(layout.shape) else 1  # the first takes memory, the next one is captured
    times = [_once(launcher, layout, *rows) for _ in range(num_before + rounds)]
    verify, draft = zip(*times[num_before:], strict=True)
    return median(verify), median(draft)


def _once(launcher: StepLauncher, layout: Layout, *rows: int) -> tuple[float, float]:
    _set_rows(launcher, *rows)
    events = launcher.run(layout)
    events.mark()
    return events.seconds()


def _draft_seconds(launcher: StepLauncher, num_rows: int) -> float:
    """One pass of the head over its own output, as the second draft needs it."""
    one, two = (_seconds(launcher, _layout(launcher, num_rows, num_rows, depth))[1] for depth in (1, 2))
    return max(one, two - one)
