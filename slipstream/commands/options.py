"""Options that several commands share, as one frozen object, and how they become a loaded model."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tqdm import tqdm

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.llm import LLM
from slipstream.sampling import DraftSetting


@dataclass(frozen=True, slots=True)
class ModelOptions:
    model: str | None = None
    mtp: str | None = None
    runner: str = "torch"
    device: str = "auto"
    dtype: str = "auto"
    draft: DraftSetting = "adaptive"
    max_depth: int = 4
    p_min: float = 0.0
    max_streams: int = 16
    kv_memory: int | None = None
    max_context: int | None = None
    draft_vocab: int | None = None

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig(max_streams=self.max_streams, draft=self.draft, max_depth=self.max_depth, p_min=self.p_min)

    @property
    def runner_config(self) -> RunnerConfig:
        return RunnerConfig(self.device, self.dtype, self.kv_memory, self.max_context, self.draft_vocab)


class LoadingBar:
    """A progress bar on a terminal, from the first bytes to the last; silent elsewhere."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def __call__(self, num_bytes: int, total: int) -> None:
        if self._bar is None:
            shown = sys.stderr.isatty()
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading", leave=False, disable=not shown)
        self._bar.update(num_bytes)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def load_llm(options: ModelOptions) -> LLM:
    bar = LoadingBar()
    try:
        return LLM.from_config(
            options.model, options.mtp, options.engine_config, options.runner_config, options.runner, bar
        )
    finally:
        bar.close()
