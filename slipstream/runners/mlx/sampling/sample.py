"""Processors, masks and the choice of tokens on MLX logits. Nothing is evaluated here."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from slipstream.runners.host.rows import Row, RowSampling
from slipstream.runners.masks import StepMasks
from slipstream.runners.mlx.sampling.noise import gumbel_noise, key_halves
from slipstream.runners.mlx.sampling.processors import History, Processor
from slipstream.runners.noise import noise_key
from slipstream.runners.rows import RowSpan


def sample(logits: mx.array, sampling: Sequence[RowSampling], positions: Sequence[int]) -> mx.array:
    """One token per row of logits, greedy or with the noise of (seed, position). int32 [rows]"""
    chosen = mx.argmax(logits, axis=-1).astype(mx.int32)
    noisy = [i for i, each in enumerate(sampling) if not each.greedy]
    if not noisy:
        return chosen
    index = mx.array(noisy)
    halves = key_halves(noise_key(sampling[i].seed, positions[i]) for i in noisy)
    inv_temperature = mx.array([sampling[i].inv_temperature for i in noisy])[:, None]
    noisy_logits = logits[index] * inv_temperature + gumbel_noise(halves, logits.shape[-1])
    return mx.put_along_axis(chosen, index, mx.argmax(noisy_logits, axis=-1).astype(mx.int32), axis=0)


def process(logits: mx.array, rows: Sequence[Row], spans: Sequence[RowSpan], masks: StepMasks | None) -> mx.array:
    """Each row's processors at each of its positions, with the history of that position; masks; truncation."""
    logits = _process(logits, rows, spans, [row.sampling.processors for row in rows])
    if masks is not None and masks.at:
        logits = apply_masks(logits, masks.at, masks.masks)
    return _process(logits, rows, spans, [row.sampling.truncation for row in rows])


def apply_masks(logits: mx.array, at: Sequence[int], masks: Sequence[bytes]) -> mx.array:
    """Rule out what the masks do not allow at these rows of the logits, which may cover only the first tokens."""
    packed = mx.array(np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), -1, 1))
    bits = ((packed >> mx.arange(8, dtype=mx.uint8)) & 1).flatten(1)  # [masks, vocab or a little more]
    index = mx.array(list(at))
    logits[index] = mx.where(bits[:, : logits.shape[1]] > 0, logits[index], -mx.inf)
    return logits


def _process(
    logits: mx.array, rows: Sequence[Row], spans: Sequence[RowSpan], processors: Sequence[tuple[Processor, ...]]
) -> mx.array:
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
        seen = History(history[: len(row.tokens) + i], row.num_prompt)
        changed = logits[i]
        for processor in processors:
            changed = processor(changed, seen)
        positions.append(changed)
    return mx.stack(positions)
