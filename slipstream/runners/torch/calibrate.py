"""Times verification by tokens and a draft pass by rows on this machine, for the depth policy.

The head is fed for the sake of drafts, so feeding counts as part of the first pass.

Runs the real decoder and head on made-up tokens in caches that nobody owns yet. All sizes take turns, and the median
counts: what matters is how sizes compare, and a machine that is slow for a moment is slow for all of them alike. Small
ones come first in a turn, and after a pause: large ones leave a processor slow for some milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from slipstream.engine.contract import RunnerInfo, StepCosts
from slipstream.runners.costs import rising
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.batch import RaggedBatch, make_batch
from slipstream.runners.torch.drafter import Drafter, Ends
from slipstream.runners.torch.models.decoder import Decoder
from slipstream.runners.torch.ops import Ops
from slipstream.runners.torch.rows import Row, RowDraw, RowTable

ROUNDS = 5
CONTEXT = 64  # tokens each made-up row has behind it
SETTLING = 0.05  # seconds of the smallest work before a turn

Task = Callable[[], object]


def measure(
    decoder: Decoder,
    drafter: Drafter,
    ops: Ops,
    table: RowTable,
    info: RunnerInfo,
    num_tokens: Sequence[int],
    num_rows: Sequence[int],
) -> StepCosts:
    start = min(CONTEXT, info.max_context // 2)
    tasks: dict[tuple[str, int], Task] = {}
    for n in num_tokens:
        tasks["verify", n] = partial(_verify_step, decoder, ops, _batch(table, info, n, start))
    for n in num_rows:
        if drafter.max_depth > 1 and n <= info.num_slots:
            for depth in (1, 2):
                tasks[f"depth {depth}", n] = _proposal(decoder, drafter, ops, table, n, start, depth)
    seconds = _take_turns(tasks, ops)
    draft = [(n, max(seconds["depth 1", n], second - seconds["depth 1", n])) for n, second in _of(seconds, "depth 2")]
    return StepCosts(rising(_of(seconds, "verify")), rising(draft))


def _of(seconds: dict[tuple[str, int], float], kind: str) -> list[tuple[int, float]]:
    return [(n, value) for (name, n), value in seconds.items() if name == kind]


def _batch(table: RowTable, info: RunnerInfo, num_tokens: int, start: int) -> RaggedBatch:
    """Rows of at most four tokens, as in decoding."""
    rows = []
    offset = 0
    for slot in range(info.num_slots):
        left_slots = info.num_slots - slot
        size = min(num_tokens - offset, max(4, -(-(num_tokens - offset) // left_slots)), info.max_context - start)
        if size > 0:
            rows.append(RowSpan(slot, start, offset, size))
            offset += size
    return make_batch(tuple(rows), [1] * offset, table.block_table)


def _verify_step(decoder: Decoder, ops: Ops, batch: RaggedBatch) -> None:
    ops.argmax(decoder.unembed(decoder.forward(decoder.embed(batch.tokens), batch)))


def _proposal(
    decoder: Decoder, drafter: Drafter, ops: Ops, table: RowTable, num_rows: int, start: int, depth: int
) -> Task:
    spans = tuple(RowSpan(slot, start, slot, 1) for slot in range(num_rows))
    batch = make_batch(spans, [1] * num_rows, table.block_table)
    hidden = decoder.forward(decoder.embed(batch.tokens), batch).clone()
    greedy = RowDraw(True, 1.0, 0, 0.0, 0, True, ())
    rows = [Row(span.slot, [1] * start, greedy) for span in spans]
    last = torch.arange(num_rows, device=ops.device)
    ends = Ends(rows, spans, [depth] * num_rows, last, batch.positions.long() + 1)
    return lambda: drafter.propose(drafter.feed(hidden, batch.tokens, batch), ends)


def _take_turns(tasks: dict[tuple[str, int], Task], ops: Ops) -> dict[tuple[str, int], float]:
    """Median seconds of each task; the first round only warms up."""
    smallest_first = sorted(tasks, key=lambda key: key[1])
    times: dict[tuple[str, int], list[float]] = {key: [] for key in tasks}
    for _ in range(ROUNDS + 1):
        settled = time.perf_counter() + SETTLING
        while time.perf_counter() < settled:
            _seconds(tasks[smallest_first[0]], ops)
        for key in smallest_first:
            times[key].append(_seconds(tasks[key], ops))
    return {key: median(taken[1:]) for key, taken in times.items()}


def _seconds(task: Task, ops: Ops) -> float:
    began = time.perf_counter()
    task()
    if ops.device.type == "cuda":
        torch.cuda.synchronize(ops.device)
    return time.perf_counter() - began
