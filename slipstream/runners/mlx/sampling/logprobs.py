"""Log-probabilities of tokens: the model's own, before any processor."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from slipstream.runners.logprobs import Numbers


def token_logprobs(logprobs: mx.array, tokens: mx.array, num_top: int) -> list[Numbers]:
    """For each position: the log-probability of its token, the ids of the likeliest, theirs. logprobs: float32"""
    top = likeliest(logprobs, min(num_top, logprobs.shape[1]))
    ids = mx.concatenate([tokens[:, None], top], axis=1)
    values = mx.take_along_axis(logprobs, ids, axis=1)
    mx.eval(values, top)
    rows, best = (cast(list[list[float]], array.tolist()) for array in (values, top))
    return [[own, *ids, *others] for (own, *others), ids in zip(rows, best, strict=True)]


def likeliest(logprobs: mx.array, count: int) -> mx.array:
    """Best first, the lower id before its equals: as numbers that are never equal. int32 [positions, count]"""
    bits = (logprobs + 0.0).view(mx.int32).astype(mx.int64)  # there are no two zeros any more
    ordered = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = mx.left_shift(ordered, mx.array(32, mx.int64)) - mx.arange(logprobs.shape[1], dtype=mx.int64)
    best = mx.sort(mx.topk(keys, count, axis=-1), axis=-1)[:, ::-1] if count else keys[:, :0]
    return (-best & 0xFFFFFFFF).astype(mx.int32)
