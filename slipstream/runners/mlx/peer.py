"""mlx-lm's own batched generation, to compare with: the same files, its caches, its loop."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mlx_lm.generate import BatchGenerator

from slipstream.load import OpenedModel
from slipstream.runners.mlx.loaders.models import load_target


class MlxLmPeer:
    def __init__(self, model: OpenedModel, dtype: str) -> None:
        """``dtype``: as in RunnerConfig."""
        self._model = load_target(model, dtype)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], float]:
        """Greedy tokens of each prompt, all running together, and the seconds it took, prompts included."""
        generator = BatchGenerator(self._model, max_tokens=max_tokens, completion_batch_size=len(prompts))
        began = time.perf_counter()
        try:
            ids = generator.insert([list(prompt) for prompt in prompts])
            tokens: dict[int, list[int]] = {uid: [] for uid in ids}
            while responses := generator.next_generated():
                for response in responses:
                    tokens[response.uid].append(response.token)
            return list(tokens.values()), time.perf_counter() - began
        finally:
            generator.close()
