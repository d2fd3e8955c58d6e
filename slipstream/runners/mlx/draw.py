"""The target's own draw at every position, and how many drafts equal it.

A draft is accepted while it equals the draw, and a draw's randomness is (seed, position): so the output with
speculation is the output without it. Nothing is evaluated here; the host reads the verdict at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from slipstream.runners.masks import step_masks
from slipstream.runners.mlx.noise import gumbel_noise, key_halves, noise_key
from slipstream.runners.mlx.processors import History, Processor
from slipstream.runners.mlx.rows import Row, RowDraw
from slipstream.runners.rows import RowSpan


@dataclass(frozen=True, slots=True)
class Verdict:
    """For the rows that draw, in their order."""

    draws: mx.array  # int32 [drawing positions]
    accepted: mx.array  # int32 [rows]: drafts accepted
    drawn: mx.array  # int32 [rows]: the row's own draw behind them


def choose(logits: mx.array, draws: Sequence[RowDraw], halves: mx.array | None) -> mx.array:
    """One token per row of logits, greedy or with the noise of its key. int32 [rows]
    halves: uint32 [rows, 2], or None where all are greedy."""
    chosen = mx.argmax(logits, axis=-1).astype(mx.int32)
    noisy = [i for i, draw in enumerate(draws) if not draw.greedy]
    if not noisy:
        return chosen
    assert halves is not None
    index = mx.array(noisy)
    inv_temperature = mx.array([draws[i].inv_temperature for i in noisy])[:, None]
    noisy_logits = logits[index] * inv_temperature + gumbel_noise(halves[index], logits.shape[-1])
    return mx.put_along_axis(chosen, index, mx.argmax(noisy_logits, axis=-1).astype(mx.int32), axis=0)


def verify(logits: mx.array, rows: Sequence[Row], spans: Sequence[RowSpan]) -> Verdict:
    """logits: [drawing positions, vocab], each row's last known token and its drafts."""
    masks = step_masks(rows, spans)
    most = None if masks is None else masks.most
    logits = _process(logits.astype(mx.float32), rows, spans, [row.draw.processors for row in rows])
    if masks is not None and masks.at:
        logits = apply_masks(logits, masks.at, masks.masks)
    logits = _process(logits, rows, spans, [row.draw.cuts for row in rows])
    draws = [row.draw for row, span in zip(rows, spans, strict=True) for _ in range(span.num_drafts + 1)]
    if all(draw.greedy for draw in draws):
        return accept(choose(logits, draws, None), rows, spans, most)
    # Of the index of the token being drawn.
    keys = [
        noise_key(row.draw.seed, len(row.tokens) + i)
        for row, span in zip(rows, spans, strict=True)
        for i in range(span.num_drafts + 1)
    ]
    return accept(choose(logits, draws, key_halves(keys)), rows, spans, most)


def accept(
    draws: mx.array, rows: Sequence[Row], spans: Sequence[RowSpan], most: Sequence[int] | None = None
) -> Verdict:
    """``most``: how many drafts of each row may be accepted, where not all may."""
    depth = max(span.num_drafts for span in spans)
    if depth == 0:
        return Verdict(draws, mx.zeros(len(rows), mx.int32), draws)
    places, drafts, at = [], [], 0
    for row, span in zip(rows, spans, strict=True):
        spare = depth - span.num_drafts
        places.append([at + i for i in range(span.num_drafts + 1)] + [at] * spare)
        drafts.append(row.drafts[: span.num_drafts] + [-1] * spare)  # no draw is -1: padding is never accepted
        at += span.num_drafts + 1
    grid = draws[mx.array(places)]  # [rows, depth + 1]
    expected = mx.array(drafts, dtype=mx.int32).reshape(len(rows), depth)
    same = grid[:, :depth] == expected
    if most is not None:
        same = same & (mx.arange(depth) < mx.array(list(most))[:, None])
    accepted = mx.cumprod(same.astype(mx.int32), axis=1).sum(axis=1)
    return Verdict(draws, accepted, mx.take_along_axis(grid, accepted[:, None], axis=1)[:, 0])


def apply_masks(logits: mx.array, at: Sequence[int], masks: Sequence[bytes]) -> mx.array:
    """Take out what the masks do not allow at these positions."""
    packed = mx.array(np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), -1, 1))
    bits = ((packed >> mx.arange(8, dtype=mx.uint8)) & 1).flatten(1)  # [masks, vocab or a little more]
    index = mx.array(list(at))
    logits[index] = mx.where(bits[:, : logits.shape[1]] > 0, logits[index], -mx.inf)
    return logits


def _process(
    logits: mx.array, rows: Sequence[Row], spans: Sequence[RowSpan], processors: Sequence[tuple[Processor, ...]]
) -> mx.array:
    """Apply each row's processors at each of its positions, with the history of that position."""
    if not any(processors):
        return logits
    parts, at = [], 0
    for row, span, own in zip(rows, spans, processors, strict=True):
        part = logits[at : at + span.num_drafts + 1]
        parts.append(_process_row(part, row, span, own) if own else part)
        at += span.num_drafts + 1
    return mx.concatenate(parts)


def _process_row(logits: mx.array, row: Row, span: RowSpan, processors: tuple[Processor, ...]) -> mx.array:
    history = mx.array(row.tokens + row.drafts[: span.num_drafts], dtype=mx.int32)
    positions = []
    for i in range(span.num_drafts + 1):
        seen = History(history[: len(row.tokens) + i], row.draw.num_prompt)
        changed = logits[i]
        for processor in processors:
            changed = processor(changed, seen)
        positions.append(changed)
    return mx.stack(positions)
