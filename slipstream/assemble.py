"""Loader, backend and engine put together: for the offline API, the server and benchmarks alike."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config import EngineConfig
from slipstream.engine.contract import Runner
from slipstream.engine.engine import Engine
from slipstream.load import OpenedModel
from slipstream.load.fingerprint import fingerprint
from slipstream.runners.backend import Backend, MemoryPlan

LoadProgress = Callable[[int, int], None]  # bytes read since the last call, bytes in all


def make_engine(
    model: OpenedModel,
    engine: EngineConfig,
    backend: Backend,
    plan: MemoryPlan | None = None,
    progress: LoadProgress | None = None,
    on_death: Callable[[Exception], None] | None = None,
) -> Engine:
    """An engine that is not started yet; its thread will load the model. ``plan``: None: made there, too."""
    total = model.num_bytes

    def report(num_bytes: int) -> None:
        if progress is not None:
            progress(num_bytes, total)

    def load() -> Runner:
        return backend.load(model, engine, plan, report)

    digest = fingerprint(model, {"backend": backend.describe(model)}) if engine.cache_dir else ""
    return Engine(load, engine, model.tokenizer.eos_token_ids, on_death, digest)
