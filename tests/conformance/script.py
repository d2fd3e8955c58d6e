"""What scripted drafters of every runner propose: from the true continuation, found by a stream's seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence


class Script:
    """Always right, always wrong, or a guess."""

    def __init__(self, truth: Mapping[int, Sequence[int]], vocab: int, mode: str) -> None:
        self._truth = truth
        self._vocab = vocab
        self._mode = mode
        self._random = random.Random(0)

    def token(self, seed: int, index: int) -> int:
        truth = self._truth[seed]
        right = truth[index] if index < len(truth) else 0
        if self._mode == "right":
            return right
        if self._mode == "wrong":
            return (right + 1) % self._vocab
        return right if self._random.random() < 0.6 else self._random.randrange(self._vocab)
