"""Log-probabilities of tokens: the model's own, before any processor. Nothing here waits for a device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.runners.logprobs import PIECE


def log_probabilities(logits: Tensor) -> Tensor:
    """A copy: processors may change the logits afterwards. float32 [positions, vocab]"""
    return logits.float().log_softmax(-1)


def tell(chances: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """What the host reads of each token, ids among log-probabilities. float64 [positions, 1 + 2 * top]"""
    top = likeliest(chances, min(num_top, chances.shape[1]))
    own = chances.gather(1, tokens[:, None].long())
    return torch.cat([part.double() for part in (own, top, chances.gather(1, top))], dim=1)


def tell_hidden(
    hidden: Tensor, chances: Callable[[Tensor], Tensor], vocab_size: int, tokens: Tensor, num_top: int
) -> Tensor:
    """The same of hidden states, whose log-probabilities are made piece by piece. hidden: [positions, hidden]"""
    size = max(1, PIECE // vocab_size)
    pieces = zip(hidden.split(size), tokens.split(size), strict=True)
    return torch.cat([tell(chances(part), behind, num_top) for part, behind in pieces])


def likeliest(chances: Tensor, count: int) -> Tensor:
    """Best first, the lower id before its equals: as numbers that are never equal. int64 [positions, count]"""
    bits = (chances + 0.0).view(torch.int32).long()  # there are no two zeros any more
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(chances.shape[1], device=chances.device)
    best = ((ordered << 32) - ids).topk(count).values
    return -best & 0xFFFFFFFF
