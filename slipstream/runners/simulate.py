"""Simulated acceptance, for benchmarks with random weights: all compute is done, only the verdict is made up.

The rule, the same on every runner. With S_0 = 1 and S_i the asked probability that the first i drafts are all accepted
(0 beyond those given), draft i = 1, 2, ... of a row passes iff

    u(seed, position) < S_i / S_(i-1)        (never where S_(i-1) is 0)

where position is the index of the drafted token among the row's tokens, prompt included, counted from 0, and
u = (bits 40 to 63 of noise_key(seed, position)) / 2^24; both sides are float32. Drafts are accepted while they pass.
Committed are the accepted drafts and then the target's own sample after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from slipstream.runners.noise import noise_key


def pass_rates(survival: Sequence[float], depth: int) -> list[float]:
    """[depth]: S_i / S_(i-1), the chance of draft i once those before it were accepted."""
    padded = [1.0, *survival, *[0.0] * depth][: depth + 1]
    return [after / before if before else 0.0 for before, after in pairwise(padded)]


def uniform(seed: int, position: int) -> float:
    """From 0 to below 1, exact in float32."""
    return (noise_key(seed, position) >> 40) * 2.0**-24


class Simulation:
    def __init__(self, survival: Sequence[float], max_depth: int) -> None:
        self.pass_rates = [float(np.float32(rate)) for rate in pass_rates(survival, max_depth)]

    def passes(self, seed: int, position: int, i: int) -> bool:
        """Whether the row's draft i (from 0) passes."""
        return uniform(seed, position) < self.pass_rates[i]


def simulation_note(survival: Sequence[float]) -> str:
    """At the end of a runner's note: what is not real about it."""
    rates = "/".join(f"{rate:g}" for rate in survival)
    return f", ACCEPTANCE SIMULATED at {rates}" if rates else ""
