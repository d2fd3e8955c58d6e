"""Log-probabilities of tokens: the model's own, before any processor. Nothing here waits for a device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.runners.logprobs import PIECE


def log_probabilities(logits: Tensor) -> Tensor:
    """A copy: processors may change the logits afterwards. float32 [positions, vocab]"""
    return logits.float().log_softmax(-1)


def token_logprobs(logprobs: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Of each token its log-probability, the ids of the likeliest, theirs. float64 [positions, 1 + 2 * top]"""
    top = likeliest(logprobs, min(num_top, logprobs.shape[1]))
    own = logprobs.gather(1, tokens[:, None].long())
    return torch.cat([part.double() for part in (own, top, logprobs.gather(1, top))], dim=1)


def hidden_logprobs(
    hidden: Tensor, log_softmax: Callable[[Tensor], Tensor], vocab_size: int, tokens: Tensor, num_top: int
) -> Tensor:
    """The same of hidden states, piece by piece. hidden: [positions, hidden]"""
    size = max(1, PIECE // vocab_size)
    pieces = zip(hidden.split(size), tokens.split(size), strict=True)
    return torch.cat([token_logprobs(log_softmax(part), following, num_top) for part, following in pieces])


def likeliest(logprobs: Tensor, count: int) -> Tensor:
    """Best first, the lower id before its equals: as numbers that are never equal. int64 [positions, count]"""
    bits = (logprobs + 0.0).view(torch.int32).long()  # there are no two zeros any more
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    best = ((ordered << 32) - ids).topk(count).values
    return -best & 0xFFFFFFFF
