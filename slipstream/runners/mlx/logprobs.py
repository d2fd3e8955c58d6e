"""Log-probabilities of tokens: the model's own, before any processor. Nothing is evaluated here."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from slipstream.runners.logprobs import PIECE

Table = tuple[mx.array, mx.array]  # log-probabilities: float32 [positions, 1 + top]; ids: int32 [positions, top]


def tell(logits: mx.array, tokens: mx.array, num_top: int) -> Table:
    """Of each token and of the likeliest in its place. logits: [positions, vocab]"""
    logits = logits.astype(mx.float32)
    chances = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    top = likeliest(chances, min(num_top, chances.shape[1]))
    told = mx.concatenate([tokens[:, None].astype(mx.int32), top], axis=1)
    return mx.take_along_axis(chances, told, axis=1), top


def tell_hidden(
    hidden: mx.array, unembed: Callable[[mx.array], mx.array], vocab_size: int, tokens: mx.array, num_top: int
) -> list[Table]:
    """The same where there are no logits yet; they are made piece by piece. hidden: [positions, hidden]"""
    size = max(1, PIECE // vocab_size)
    tables = []
    for start in range(0, hidden.shape[0], size):
        table = tell(unembed(hidden[start : start + size]), tokens[start : start + size], num_top)
        mx.async_eval(table)  # or the logits of all pieces would be there at once
        tables.append(table)
    return tables


def likeliest(chances: mx.array, count: int) -> mx.array:
    """Best first, the lower id before its equals: as numbers that are never equal. int32 [positions, count]"""
    bits = (chances + 0.0).view(mx.int32).astype(mx.int64)  # there are no two zeros any more
    ordered = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = mx.left_shift(ordered, mx.array(32, mx.int64)) - mx.arange(chances.shape[1], dtype=mx.int64)
    best = mx.sort(mx.topk(keys, count, axis=-1), axis=-1)[:, ::-1] if count else keys[:, :0]
    return (-best & 0xFFFFFFFF).astype(mx.int32)


def read(tables: list[Table]) -> list[list[float]]:
    """As the host's side takes them: of each token its log-probability, the ids of the likeliest, theirs."""
    numbers: list[list[float]] = []
    for table in tables:
        chances, top = (cast(list[list[float]], array.tolist()) for array in table)
        numbers += [[own, *ids, *others] for (own, *others), ids in zip(chances, top, strict=True)]
    return numbers
