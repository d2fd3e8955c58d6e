"""`slipstream serve`: the HTTP server and its page."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from slipstream.assemble import make_engine
from slipstream.commands.options import ModelOptions
from slipstream.commands.progress import LoadingBar, clear_line
from slipstream.commands.progress import say as say_on_stderr
from slipstream.commands.text import show, size
from slipstream.errors import EngineDead, SlipstreamError
from slipstream.load import OpenedModel
from slipstream.load.contents import file_format, head_place, main_type
from slipstream.server.http.lifecycle import Server
from slipstream.server.http.logs import set_up_logging
from slipstream.server.service.model_holder import LoadedModel
from slipstream.server.service.settings import ServerConfig
from slipstream.server.service.status import ModelFacts


def serve(options: ModelOptions, config: ServerConfig) -> int:
    set_up_logging(config.log_level, config.log_format)
    log = logging.getLogger("slipstream.server").info
    loading = Loading(options) if config.log_format == "text" else Loading(options, log, log)
    server = Server(config, options.engine_config, loading, lambda loaded: loading.ready(loaded, server.address))
    loading.say(f"listening on {server.address}, loading {_what(options)}")
    try:
        server.run()
    finally:
        loading.bar.close()
        clear_line()
    if server.error is None:
        return 0
    if isinstance(server.error, SlipstreamError):
        raise server.error
    raise EngineDead(f"the engine ended: {type(server.error).__name__}: {server.error}")


def _what(options: ModelOptions) -> str:
    if options.shape is not None:
        return f"the shape {options.model_name}"
    return options.model or "the default model"


@dataclass
class Loading:
    """How the server gets its model, each time: called in a thread, with a callback for the engine's death.

    The memory is planned here; the engine's thread loads by that plan. Of the model only text is kept.
    """

    options: ModelOptions
    say: Callable[[str], None] = show  # gets a line for each fact of the loaded model
    say_far: Callable[[str], None] = say_on_stderr  # gets how far loading is, where there is no terminal
    bar: LoadingBar = field(default_factory=LoadingBar)
    model_line: str = ""
    chat_fault: str = ""  # why its chat template cannot be used
    weights_note: str = ""  # what of the weights is stored otherwise than in the files
    memory_line: str = ""
    announced: bool = False

    def __call__(self, on_death: Callable[[Exception], None]) -> LoadedModel:
        backend = self.options.backend
        self.bar = LoadingBar(lines=True, say=self.say_far)
        model = self.options.open()
        engine_config = replace(self.options.engine_config, sampling_defaults=self.options.sampling_of(model))
        tokenizer = model.tokenizer  # before the plan: its memory counts
        if not self.announced:
            self.chat_fault = tokenizer.check_chat()
        memory = backend.plan_memory(model, engine_config)
        engine = make_engine(model, engine_config, backend, memory, self.bar, on_death)
        facts = ModelFacts(
            name=model.name,
            architecture=model.spec.architecture,
            format=f"{file_format(model.checkpoint)}, {main_type(model)}",
            runner=backend.name,
            weight_bytes=memory.weights + memory.head,
            kv_token_bytes=memory.kv_per_token,
            state_bytes=memory.states + memory.kept_states,
            kv_row_bytes=memory.row_buffers,
            kv_dtype=memory.kv_dtype,
            state_dtype=memory.state_dtype,
        )
        self.model_line = f"{model.name} ({facts.architecture}; {facts.format}), {_head(model)}"
        self.weights_note = memory.weights_note
        kv = memory.kv_pool + memory.row_buffers
        self.memory_line = (
            f"{size(memory.weights)} weights, {size(memory.head)} head, "
            f"{size(kv)} KV for {memory.pool_tokens} tokens, {size(facts.state_bytes)} states"
        )
        return LoadedModel(engine, tokenizer, facts, backend.device.release_memory)

    def ready(self, loaded: LoadedModel, address: str) -> None:
        self.bar.close()
        if not self.announced:
            self.announced = True
            self._announce(loaded, address)

    def _announce(self, loaded: LoadedModel, address: str) -> None:
        engine = loaded.engine
        self.say(f"model   {self.model_line}")
        if self.chat_fault:
            self.say(f"chat    a plain question fails: {self.chat_fault}")
        self.say(f"device  {engine.info.note}")
        if self.weights_note:
            self.say(f"weights {self.weights_note}")
        streams = f"{engine.config.max_streams} streams of up to {engine.info.max_model_len} tokens"
        self.say(f"memory  {self.memory_line}; {streams}")
        self.say(f"drafts  {_policy(loaded)}")
        self.say(f"sampling {engine.config.sampling_defaults}")
        self.say(f"page    {address}")


def _head(model: OpenedModel) -> str:
    """Whether there is one, and where. Why not is the policy's to say."""
    return f"its MTP head {head_place(model)}".rstrip() if model.head is not None else "no MTP head"


def _policy(loaded: LoadedModel) -> str:
    config, info = loaded.engine.config, loaded.engine.info
    if not info.max_depth:
        return f"off: {info.why_no_draft}"
    room = f"at most {min(info.max_depth, config.max_depth)} deep, p_min {config.p_min:g}"
    if config.draft in ("off", 0):
        return f"off, but for requests that ask for drafts: {room}"
    return f"depth {config.draft}, {room}" if isinstance(config.draft, int) else f"{config.draft}, {room}"
