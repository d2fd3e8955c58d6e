"""Times verification by tokens and a draft pass by rows on this machine, for the depth policy.

Runs the real decoder and head on made-up tokens in caches that nobody owns yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from slipstream.engine.plan import RunnerInfo, StepCosts
from slipstream.runners.torch.batch import RaggedBatch, RowSpan, make_batch
from slipstream.runners.torch.drafter import Drafter, Ends
from slipstream.runners.torch.models.decoder import Decoder
from slipstream.runners.torch.ops import Ops
from slipstream.runners.torch.rows import Row, RowDraw, RowTable

REPEATS = 3
CONTEXT = 64  # tokens each made-up row has behind it


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
    verify, draft = [], []
    for n in num_tokens:
        batch = _batch(table, info, n, start)
        verify.append((n, _fastest(partial(_verify_step, decoder, drafter, ops, batch), ops)))
    for n in num_rows:
        if drafter.max_depth > 1 and n <= info.num_slots:
            draft.append((n, _draft_pass(decoder, drafter, ops, table, info, n, start)))
    return StepCosts(_rising(verify), _rising(draft))


def _rising(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """More work never takes less time: noise that says otherwise is levelled."""
    best = float("inf")
    levelled = []
    for n, seconds in reversed(points):
        best = min(best, seconds)
        levelled.append((n, best))
    return tuple(reversed(levelled))


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


def _verify_step(decoder: Decoder, drafter: Drafter, ops: Ops, batch: RaggedBatch) -> None:
    hidden = decoder.forward(batch)
    draws = ops.argmax(decoder.unembed(hidden))
    drafter.feed(hidden, draws, batch)


def _draft_pass(
    decoder: Decoder, drafter: Drafter, ops: Ops, table: RowTable, info: RunnerInfo, num_rows: int, start: int
) -> float:
    """The difference between proposing two and one."""
    batch = make_batch(
        tuple(RowSpan(slot, start, slot, 1) for slot in range(num_rows)), [1] * num_rows, table.block_table
    )
    fed = drafter.feed(decoder.forward(batch), batch.tokens, batch)
    greedy = RowDraw(True, 1.0, 0, 0.0, 0, ())
    rows = [Row(span.slot, [1] * start, greedy) for span in batch.rows]
    last = torch.arange(num_rows, device=ops.device)

    def propose(depth: int) -> float:
        ends = Ends(rows, batch.rows, [depth] * num_rows, last, batch.positions.long() + 1)
        return _fastest(lambda: drafter.propose(fed, ends), ops)

    one = propose(1)
    return max(one, propose(2) - one)


def _fastest(run: Callable[[], object], ops: Ops) -> float:
    """The best of a few: what others do on the machine only ever adds time."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        run()
        if ops.device.type == "cuda":
            torch.cuda.synchronize(ops.device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
