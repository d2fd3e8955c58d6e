"""Times verification by tokens, a draft pass by rows and the reading of prompts on this machine.

The MTP head is fed for the sake of drafts, so feeding counts as part of the first pass; where a prompt is read, as part
of reading.

Runs the real model and head on made-up tokens in caches that nobody owns yet. The tokens are unlike, as those of
streams are: for equal ones a sparse model reads the same few experts, however many there are (log 261). All sizes are
timed round by round, and the median counts: what matters is how sizes compare, and a machine that is slow for a moment
is slow for all of them alike. Small sizes come first in a round, and after a pause: large ones leave a processor slow
for some milliseconds. No more sizes begin once SECONDS have passed: on a machine where a step takes long, the curve is
drawn on from what it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import median
from typing import Generic

from slipstream.engine.contract import DraftRequest, RowJoin, RunnerInfo, StepCosts
from slipstream.runners.costs import Points, of_context, rising
from slipstream.runners.host.drafter import HostDrafter
from slipstream.runners.host.model import A, B, CommittedStep, HostModel
from slipstream.runners.host.rows import GREEDY, CommittedRow, DraftRow, Row, Verdict
from slipstream.runners.rows import RowSpan
from slipstream.sampling.params import SamplingParams

ROUNDS = 5
SECONDS = 12.0
SECONDS_WITHOUT_DRAFTS = 3.0  # where depths are not chosen by cost: only prompts are, and the start is to stay short
MIN_SIZES = 2  # timed however long they take: a slope needs two
CONTEXT = 64  # tokens before each made-up row
LONG_CONTEXT = 1024  # the same where the cost of a long context is timed
SETTLING = 0.05  # seconds of the smallest work before a round
READ_SIZES = (1, 4, 8, 16, 32, 64)  # tokens of a prompt
READ_LONG_SIZES = (8, 64)  # of those, after a long context as well
CONTEXT_ROWS, CONTEXT_FEED = 4, 4
CONTEXTS = (
    ("short", CONTEXT, 1),
    ("long", LONG_CONTEXT, 1),
    ("short, drafts", CONTEXT, CONTEXT_FEED),
    ("long, drafts", LONG_CONTEXT, CONTEXT_FEED),
)

Task = Callable[[], object]
Key = tuple[str, int]  # what is timed, and its size
log = logging.getLogger(__name__)


def measure(
    info: RunnerInfo,
    model: HostModel[A, B],
    drafter: HostDrafter[A, B],
    num_tokens: Sequence[int],
    num_rows: Sequence[int],
) -> StepCosts:
    for slot in range(info.num_slots):
        model.join(RowJoin(slot, (1,), 1, SamplingParams(), 0, 0.0))
        model.grow(slot, _blocks(info, slot))
    work = _Work(model, drafter, _UnlikeTokens(info.vocab_size))
    sizes = _Sizes(info, work, frozenset(num_tokens), frozenset(num_rows))
    seconds = _timed_rounds(sizes, SECONDS if num_rows else SECONDS_WITHOUT_DRAFTS)
    for slot in reversed(range(info.num_slots)):
        model.leave(slot)
    draft = [(n, max(seconds["depth 1", n], second - seconds["depth 1", n])) for n, second in _of(seconds, "depth 2")]
    context, share = _context_costs(info, seconds)
    costs = StepCosts(
        rising(_of(seconds, "verify")),
        rising(draft),
        context=context,
        context_share=share,
        read=rising(_of(seconds, "read")),
        read_context=_read_context(info, seconds),
    )
    log.debug("a step by tokens: %s; a draft pass by rows: %s", describe(costs.verify), describe(costs.draft))
    log.debug("reading by tokens: %s", describe(costs.read))
    return costs


def _blocks(info: RunnerInfo, slot: int) -> tuple[int, ...]:
    """Of its own, as streams have them, as far as there are enough: one block read again and again stays in caches."""
    count = -(-min(info.max_context, LONG_CONTEXT + READ_SIZES[-1]) // info.block_size)
    return tuple((slot * count + i) % info.num_blocks for i in range(count))


def _more(seconds: dict[Key, float], long: str, short: str) -> float:
    """Seconds that a long context adds."""
    return max([0.0, *(value - seconds[short, n] for n, value in _of(seconds, long))])


def _context_costs(info: RunnerInfo, seconds: dict[Key, float]) -> tuple[float, float]:
    """Seconds for each token of context, and the share of it that each further token of a row costs."""
    one, four = _more(seconds, "long", "short"), _more(seconds, "long, drafts", "short, drafts")
    num_rows = min(CONTEXT_ROWS, info.num_slots)
    num_tokens = num_rows * (_context(info, LONG_CONTEXT) - _context(info, CONTEXT))
    share = (four / one - 1.0) / (CONTEXT_FEED - 1) if one else 0.0
    return one / max(1, num_tokens), min(1.0, max(0.0, share))


def _read_context(info: RunnerInfo, seconds: dict[Key, float]) -> tuple[float, float]:
    more = [(n, value - seconds["read", n]) for n, value in _of(seconds, "read, long")]
    return of_context(more, _context(info, LONG_CONTEXT))


def _context(info: RunnerInfo, num_tokens: int) -> int:
    return min(num_tokens, info.max_context // 2)


def describe(points: Points) -> str:
    """Milliseconds by size, in one line."""
    return " ".join(f"{n}:{seconds * 1e3:.3g}ms" for n, seconds in points) or "-"


def _of(seconds: dict[Key, float], kind: str) -> list[tuple[int, float]]:
    return sorted((n, value) for (name, n), value in seconds.items() if name == kind)


class _UnlikeTokens:
    """Made-up tokens, others each time."""

    def __init__(self, vocab_size: int) -> None:
        self._random, self._vocab_size = Random(0), vocab_size

    def take(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]


@dataclass(frozen=True)  # with slots, a generic dataclass fails on Python 3.11
class _Work(Generic[A, B]):
    """What is timed: parts of a step, on rows as they are given."""

    model: HostModel[A, B]
    drafter: HostDrafter[A, B]
    tokens: _UnlikeTokens

    def verify(self, spans: Sequence[RowSpan]) -> None:
        num_tokens, model = sum(span.num_fed for span in spans), self.model
        logits = model.logits(model.forward(self.tokens.take(num_tokens), model.lay_out(spans)))
        model.read(model.sample(logits, [GREEDY] * num_tokens, [CONTEXT] * num_tokens))
        model.finish()

    def read(self, num_tokens: int, start: int) -> None:
        span, tokens = RowSpan(0, start, 0, num_tokens), self.tokens.take(num_tokens + 1)
        batch = self.model.lay_out([span])
        hidden = self.model.forward(tokens[:-1], batch)
        self.drafter.committed(CommittedStep(hidden, batch, [CommittedRow(span, num_tokens, tokens[1:], True)]))
        self.model.finish()

    def draft(self, num_rows: int, start: int, depth: int) -> Task:
        """Feeding the head and drafting. The target's hidden states are made once, beforehand."""
        spans = [RowSpan(slot, start, slot, 1) for slot in range(num_rows)]
        batch, tokens = self.model.lay_out(spans), self.tokens.take(num_rows)
        hidden = self.model.take(self.model.forward(self.tokens.take(num_rows), batch), range(num_rows))
        rows = [CommittedRow(span, 1, [token], drafts_now=True) for span, token in zip(spans, tokens, strict=True)]
        step = CommittedStep(hidden, batch, rows)
        asked = [
            DraftRow(Row(slot, [*[1] * (start - 1), token], GREEDY), DraftRequest(depth), Verdict(0, token), start + 1)
            for slot, token in enumerate(tokens)
        ]

        def run() -> None:
            self.drafter.committed(step)
            self.drafter.propose(asked)
            self.model.finish()

        return run


@dataclass(frozen=True)  # with slots, a generic dataclass fails on Python 3.11
class _Sizes(Generic[A, B]):
    """What is to be timed at each size."""

    info: RunnerInfo
    work: _Work[A, B]
    num_tokens: frozenset[int]
    num_rows: frozenset[int]

    def __iter__(self) -> Iterator[int]:
        reads = {n for n in READ_SIZES if n <= self.info.max_context // 2}
        return iter(sorted(self.num_tokens | self.num_rows | reads))

    def tasks(self, n: int) -> Iterator[tuple[Key, Task]]:
        start = _context(self.info, CONTEXT)
        if n in self.num_tokens:
            yield ("verify", n), partial(self.work.verify, _spans(self.info, n, start))
        if n == min(CONTEXT_ROWS, self.info.num_slots):
            for kind, context, feed in CONTEXTS:
                spans = [RowSpan(slot, _context(self.info, context), slot * feed, feed) for slot in range(n)]
                yield (kind, n), partial(self.work.verify, spans)
        if n in self.num_rows and n <= self.info.num_slots and self.work.drafter.max_depth > 1:
            for depth in (1, 2):
                yield (f"depth {depth}", n), self.work.draft(n, start, depth)
        if n not in READ_SIZES or n > self.info.max_context // 2:
            return
        yield ("read", n), partial(self.work.read, n, 0)
        if n in READ_LONG_SIZES:
            yield ("read, long", n), partial(self.work.read, n, _context(self.info, LONG_CONTEXT))


def _spans(info: RunnerInfo, num_tokens: int, start: int) -> list[RowSpan]:
    """Rows of at most four tokens, as in decoding, if there are slots enough."""
    spans: list[RowSpan] = []
    offset = 0
    for slot in range(info.num_slots):
        left_slots = info.num_slots - slot
        size = min(num_tokens - offset, max(4, -(-(num_tokens - offset) // left_slots)), info.max_context - start)
        if size > 0:
            spans.append(RowSpan(slot, start, offset, size))
            offset += size
    return spans


def _timed_rounds(sizes: _Sizes[A, B], seconds: float) -> dict[Key, float]:
    """Median seconds of each task there was time for. The first round warms up, and counts if it is all there is."""
    until = time.perf_counter() + seconds
    tasks: dict[Key, Task] = {}
    times: dict[Key, list[float]] = {}
    for index, n in enumerate(sizes):
        if index >= MIN_SIZES and time.perf_counter() > until:
            break
        for key, task in sizes.tasks(n):
            tasks[key], times[key] = task, [_seconds(task)]
    for _ in range(ROUNDS):
        _settle(next(iter(tasks.values())))
        for key, task in tasks.items():
            if time.perf_counter() < until:
                times[key].append(_seconds(task))
    return {key: median(taken[1:] or taken) for key, taken in times.items()}


def _settle(smallest: Task) -> None:
    settled = time.perf_counter() + SETTLING
    while time.perf_counter() < settled:
        smallest()


def _seconds(task: Task) -> float:
    began = time.perf_counter()
    task()
    return time.perf_counter() - began
