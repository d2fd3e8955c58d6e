"""The target's own draw at every position, and how many drafts equal it.

A draft is accepted while it equals the draw, and a draw's randomness is (seed, position): so the output with
speculation is the output without it. Everything stays on the device; the host reads the verdict once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.runners.masks import StepMasks, step_masks
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.ops import Ops
from slipstream.runners.torch.processors import History, Processor
from slipstream.runners.torch.rows import Row, RowDraw
from slipstream.runners.torch.simulate import passes


@dataclass(frozen=True, slots=True)
class Verdict:
    """For the rows that draw, in their order."""

    draws: Tensor  # int64 [drawing positions]
    accepted: Tensor  # int64 [rows]: drafts accepted
    drawn: Tensor  # int64 [rows]: the row's own draw behind them


def choose(ops: Ops, logits: Tensor, draws: Sequence[RowDraw], positions: Tensor) -> Tensor:
    """One token per row of logits, greedy or with the noise of (seed, position). int64 [rows]"""
    noisy = [i for i, draw in enumerate(draws) if not draw.greedy]
    if not noisy:
        return ops.argmax(logits)
    device = logits.device
    inv_temperature = torch.tensor([draws[i].inv_temperature for i in noisy]).to(device, non_blocking=True)
    seeds = torch.tensor([draws[i].seed for i in noisy]).to(device, non_blocking=True)
    if len(noisy) == len(draws):
        return ops.gumbel_argmax(logits, inv_temperature, seeds, positions)
    index = torch.tensor(noisy).to(device, non_blocking=True)
    chosen = ops.argmax(logits)
    chosen[index] = ops.gumbel_argmax(logits[index], inv_temperature, seeds, positions[index])
    return chosen


def process(logits: Tensor, rows: Sequence[Row], spans: Sequence[RowSpan], masks: StepMasks | None) -> None:
    """Apply each row's processors at each of its positions, with the history of that position; masks; then its cuts."""
    _process(logits, rows, spans, [row.draw.processors for row in rows])
    if masks is not None and masks.at:
        apply_masks(logits, masks.at, masks.masks)
    _process(logits, rows, spans, [row.draw.cuts for row in rows])


def _process(
    logits: Tensor, rows: Sequence[Row], spans: Sequence[RowSpan], processors: Sequence[tuple[Processor, ...]]
) -> None:
    at = 0
    for row, span, own in zip(rows, spans, processors, strict=True):
        if own:
            _process_row(logits[at : at + span.num_drafts + 1], row, span, own)
        at += span.num_drafts + 1


def _process_row(logits: Tensor, row: Row, span: RowSpan, processors: tuple[Processor, ...]) -> None:
    history = torch.tensor(row.tokens + row.drafts[: span.num_drafts]).to(logits.device, non_blocking=True)
    for i in range(span.num_drafts + 1):
        seen = History(history[: len(row.tokens) + i], row.draw.num_prompt)
        for processor in processors:
            processor(logits[i], seen)


def apply_masks(logits: Tensor, at: Sequence[int], masks: Sequence[bytes]) -> None:
    """Take out what the masks do not allow at these rows of the logits, which may know only the first tokens."""
    packed = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), -1)
    lost = np.unpackbits(~packed, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        # PyTorch would share so little work among threads, and wait for them where the machine is busy.
        values = logits.numpy()
        for place, row in zip(at, lost, strict=True):
            np.putmask(values[place], row, -np.inf)
        return
    index = torch.tensor(at).to(logits.device, non_blocking=True)
    chosen = logits.index_select(0, index)
    chosen.masked_fill_(torch.from_numpy(lost).to(logits.device, non_blocking=True), float("-inf"))
    logits.index_copy_(0, index, chosen)


def verify(
    ops: Ops, logits: Tensor, rows: Sequence[Row], spans: Sequence[RowSpan], simulate: Sequence[float] = ()
) -> Verdict:
    """logits: [drawing positions, vocab], each row's last known token and its drafts. ``simulate``: see simulate.py."""
    masks = step_masks(rows, spans)
    process(logits, rows, spans, masks)
    draws = [row.draw for row, span in zip(rows, spans, strict=True) for _ in range(span.num_drafts + 1)]
    # The index of the token being drawn. [drawing positions]
    index = [len(row.tokens) + i for row, span in zip(rows, spans, strict=True) for i in range(span.num_drafts + 1)]
    positions = torch.tensor(index).to(logits.device, non_blocking=True)
    chosen = choose(ops, logits, draws, positions)
    return accept(chosen, rows, spans, simulate, None if masks is None else masks.most)


def accept(
    draws: Tensor,
    rows: Sequence[Row],
    spans: Sequence[RowSpan],
    simulate: Sequence[float] = (),
    most: Sequence[int] | None = None,
) -> Verdict:
    """``most``: how many drafts of each row may be accepted, where not all may."""
    depth = max(span.num_drafts for span in spans)
    places, drafts, at = [], [], 0
    for row, span in zip(rows, spans, strict=True):
        spare = depth - span.num_drafts
        places.append([at + i for i in range(span.num_drafts + 1)] + [at] * spare)
        drafts.append(row.drafts[: span.num_drafts] + [-1] * spare)  # no draw is -1: padding is never accepted
        at += span.num_drafts + 1
    grid = draws[torch.tensor(places).to(draws.device, non_blocking=True)]  # [rows, depth + 1]
    expected = torch.tensor(drafts, dtype=torch.int64).to(draws.device, non_blocking=True)  # [rows, depth]
    same = grid[:, :depth] == expected
    if simulate:
        packed = torch.tensor([[row.draw.seed, len(row.tokens)] for row in rows]).to(grid.device, non_blocking=True)
        same = passes(packed[:, 0], packed[:, 1], simulate, depth) & (expected >= 0)
    if most is not None:
        limits = torch.tensor(most).to(grid.device, non_blocking=True)
        same &= torch.arange(depth, device=grid.device) < limits[:, None]
    taken = same.long().cumprod(1)  # [rows, depth]
    accepted = taken.sum(1)
    if simulate:
        draws = _followers(grid, expected, taken)
    return Verdict(draws, accepted, grid.gather(1, accepted[:, None])[:, 0])


def _followers(grid: Tensor, expected: Tensor, taken: Tensor) -> Tensor:
    """Where the verdict is drawn: at an accepted draft's place the draft follows, whatever the target drew there."""
    depth = expected.shape[1]
    follows = torch.cat([torch.where(taken.bool(), expected, grid[:, :depth]), grid[:, depth:]], dim=1)
    there = expected >= 0
    own = torch.cat([there.new_ones(len(there), 1), there], dim=1)  # [rows, depth + 1]: not padding
    return follows[own]
