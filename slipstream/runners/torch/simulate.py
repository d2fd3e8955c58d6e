"""Simulated acceptance, for benchmarks with random weights: all compute is done, only the verdict is drawn.

The rule, the same on every device. With S_0 = 1 and S_i the asked probability that the first i drafts are all accepted
(0 beyond those given), draft i = 1, 2, ... of a row passes iff

    u(seed, index) < S_i / S_(i-1)        (never where S_(i-1) is 0)

where index is the place of the drafted token among the row's tokens, prompt included, counted from 0, and
u = (bits 40 to 63 of noise_keys(seed, index)) / 2^24; both sides are float32. Drafts are accepted while they pass.
Committed are the accepted drafts and then the target's own draw behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.runners.torch.noise import noise_keys

_BITS = 24


def pass_rates(survival: Sequence[float], depth: int) -> list[float]:
    """[depth]: S_i / S_(i-1), the chance of draft i once those before it were accepted."""
    padded = [1.0, *survival, *[0.0] * depth][: depth + 1]
    return [after / before if before else 0.0 for before, after in pairwise(padded)]


def uniform(seeds: Tensor, index: Tensor) -> Tensor:
    """From 0 to below 1, float32 of the same shape as both."""
    return ((noise_keys(seeds, index) >> (64 - _BITS)) & ((1 << _BITS) - 1)).float() * 2.0**-_BITS


def passes(seeds: Tensor, first: Tensor, survival: Sequence[float], depth: int) -> Tensor:
    """Which drafts pass, bool [rows, depth]. seeds: int64 [rows]; first: int64 [rows], the index of draft 1."""
    index = first[:, None] + torch.arange(depth, device=first.device)
    rates = torch.tensor(pass_rates(survival, depth), dtype=torch.float32).to(first.device, non_blocking=True)
    return uniform(seeds[:, None].expand_as(index), index) < rates
