"""`slipstream serve`: the HTTP server and its page."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.assemble import make_engine
from slipstream.commands.options import LoadingBar, ModelOptions
from slipstream.commands.text import size
from slipstream.errors import EngineDead, SlipstreamError
from slipstream.load import OpenedModel
from slipstream.runners.backend import MemoryPlan
from slipstream.server.http.lifecycle import Server
from slipstream.server.service.model_holder import LoadedModel
from slipstream.server.service.settings import ServerConfig
from slipstream.server.service.status import ModelFacts


def serve(options: ModelOptions, config: ServerConfig) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    loading = Loading(options)
    server = Server(config, options.engine_config, loading, lambda loaded: _announce(loading, loaded, server.address))
    print(f"listening on {server.address}, loading {options.model or 'the default model'}", flush=True)
    server.run()
    if server.error is None:
        return 0
    if isinstance(server.error, SlipstreamError):
        raise server.error
    raise EngineDead(f"the engine ended: {type(server.error).__name__}: {server.error}")


@dataclass
class Loading:
    """How the server gets its model: called in a thread, with a callback for the engine's death.

    The memory is planned here, once; the engine's thread loads by that plan.
    """

    options: ModelOptions
    bar: LoadingBar = field(default_factory=LoadingBar)
    model: OpenedModel | None = None
    memory: MemoryPlan | None = None

    def __call__(self, on_death: Callable[[Exception], None]) -> LoadedModel:
        backend, engine_config = self.options.backend, self.options.engine_config
        self.model = model = self.options.open()
        tokenizer = model.tokenizer  # before the plan: its memory counts
        self.memory = memory = backend.plan_memory(model, engine_config)
        engine = make_engine(model, engine_config, backend, memory, self.bar, on_death)
        facts = ModelFacts(
            name=model.name,
            architecture=model.spec.architecture,
            format=_format(model),
            runner=backend.name,
            weight_bytes=memory.weights + memory.head,
            kv_token_bytes=memory.kv_per_token,
            state_bytes=memory.states,
        )
        return LoadedModel(engine, tokenizer, facts)


def _format(model: OpenedModel) -> str:
    """The container, and the type of most bytes in it."""
    checkpoint = model.checkpoint
    stored: Counter[str] = Counter()
    for name in checkpoint.names():
        stored[checkpoint.dtype(name)] += checkpoint.num_bytes(name)
    container = "safetensors" if model.path.is_dir() else "GGUF"
    return f"{container}, {stored.most_common(1)[0][0]}"


def _announce(loading: Loading, loaded: LoadedModel, address: str) -> None:
    loading.bar.close()
    model, memory, engine = loading.model, loading.memory, loaded.engine
    assert model is not None
    assert memory is not None
    head = "its MTP head" if model.head is not None else f"no MTP head: {model.head_reason}"
    print(f"model   {model.name} ({loaded.facts.architecture}; {loaded.facts.format}), {head}")
    print(f"device  {engine.info.note}")
    taken = (
        f"{size(memory.weights)} weights, {size(memory.head)} head, "
        f"{size(memory.kv_pool)} KV for {memory.pool_tokens} tokens, {size(memory.states)} states"
    )
    streams = f"{engine.config.max_streams} streams of up to {engine.info.max_context} tokens"
    print(f"memory  {taken}; {streams}")
    print(f"drafts  {_policy(loaded)}")
    print(f"page    {address}", flush=True)


def _policy(loaded: LoadedModel) -> str:
    config, info = loaded.engine.config, loaded.engine.info
    if not info.max_depth:
        return f"off: {info.why_no_draft}"
    policy = f"depth {config.draft}" if isinstance(config.draft, int) else config.draft
    return f"{policy}, at most {min(info.max_depth, config.max_depth)} deep, p_min {config.p_min:g}"
