"""Processors, masks and the choice of tokens on PyTorch logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.runners.host.rows import Row, RowSampling
from slipstream.runners.masks import StepMasks
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.ops import Ops
from slipstream.runners.torch.sampling.noise import signed64
from slipstream.runners.torch.sampling.processors import History, Processor


def sample(ops: Ops, logits: Tensor, sampling: Sequence[RowSampling], positions: Sequence[int]) -> Tensor:
    """One token per row of logits, greedy or with the noise of (seed, position). int64 [rows]"""
    noisy = [i for i, each in enumerate(sampling) if not each.greedy]
    if not noisy:
        return ops.argmax(logits)
    device = logits.device
    inv_temperature = torch.tensor([sampling[i].inv_temperature for i in noisy]).to(device)
    seeds = torch.tensor([signed64(sampling[i].seed) for i in noisy]).to(device)
    where = torch.tensor([positions[i] for i in noisy]).to(device)
    if len(noisy) == len(sampling):
        return ops.gumbel_argmax(logits, inv_temperature, seeds, where)
    index = torch.tensor(noisy).to(device)
    chosen = ops.argmax(logits)
    chosen[index] = ops.gumbel_argmax(logits[index], inv_temperature, seeds, where)
    return chosen


def process(logits: Tensor, rows: Sequence[Row], spans: Sequence[RowSpan], masks: StepMasks | None) -> None:
    """Apply each row's processors at each of its positions, with the history of that position; then the masks; then
    truncation."""
    _process(logits, rows, spans, [row.sampling.processors for row in rows])
    if masks is not None and masks.at:
        apply_masks(logits, masks.at, masks.masks)
    _process(logits, rows, spans, [row.sampling.truncation for row in rows])


def _process(
    logits: Tensor, rows: Sequence[Row], spans: Sequence[RowSpan], processors: Sequence[tuple[Processor, ...]]
) -> None:
    at = 0
    for row, span, own in zip(rows, spans, processors, strict=True):
        if own:
            _process_row(logits[at : at + span.num_drafts + 1], row, span, own)
        at += span.num_drafts + 1


def _process_row(logits: Tensor, row: Row, span: RowSpan, processors: tuple[Processor, ...]) -> None:
    history = torch.tensor(row.tokens + row.drafts[: span.num_drafts]).to(logits.device)
    for i in range(span.num_drafts + 1):
        seen = History(history[: len(row.tokens) + i], row.num_prompt)
        for processor in processors:
            processor(logits[i], seen)


def apply_masks(logits: Tensor, at: Sequence[int], masks: Sequence[bytes]) -> None:
    """Rule out what the masks do not allow at these rows of the logits, which may cover only the first tokens."""
    packed = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), -1)
    lost = np.unpackbits(~packed, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        # PyTorch would share so little work among threads, and wait for them where the machine is busy.
        values = logits.numpy()
        for row, mask in zip(at, lost, strict=True):
            np.putmask(values[row], mask, -np.inf)
        return
    index = torch.tensor(at).to(logits.device)
    chosen = logits.index_select(0, index)
    chosen.masked_fill_(torch.from_numpy(lost).to(logits.device), float("-inf"))
    logits.index_copy_(0, index, chosen)
