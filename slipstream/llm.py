"""The offline API: a model, prompts, answers. Knows no HTTP and no terminal."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from slipstream.assemble import LoadProgress, make_engine
from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import TokenLogprobs
from slipstream.engine.request import FinishReason, TokenEvent
from slipstream.engine.stats import RequestStats, StatsSnapshot
from slipstream.errors import ConfigError, EngineDead, RequestError
from slipstream.grammar import GrammarCompiler, Spec
from slipstream.load import OpenedModel, StreamingDetokenizer, open_model
from slipstream.runners.backend import Backend
from slipstream.runners.choose import choose_backend
from slipstream.sampling import Constraint, DraftSetting, SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Output:
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # the end token included, if there was one
    text: str  # without it
    finish_reason: FinishReason
    stats: RequestStats
    error: str = ""  # what happened, when finish_reason is "error"
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens after the first, if requested


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of one stream."""

    text: str
    tokens: tuple[int, ...]
    num_accepted: int
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first tokens, if requested


class LLM:
    """A loaded model that answers lists of prompts. Use as a context manager, or call ``close``."""

    def __init__(
        self,
        model: str | None = None,
        *,
        runner: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        mtp: str | None = None,
        draft: DraftSetting = "adaptive",
        max_streams: int = 16,
        memory: int | None = None,
        kv_memory: int | None = None,
        kv_dtype: str = "auto",
        state_dtype: str = "float32",
        max_context: int | None = None,
        max_depth: int = 4,
        p_min: float = 0.0,
        draft_vocab: int | None = None,
        prefix_cache: bool = True,
        progress: LoadProgress | None = None,
    ) -> None:
        engine_config = EngineConfig(
            max_streams=max_streams, draft=draft, max_depth=max_depth, p_min=p_min, prefix_cache=prefix_cache
        )
        sizes = (kv_memory, max_context, draft_vocab)
        backend = choose_backend(
            RunnerConfig(
                device, dtype, *sizes, runner=runner, kv_dtype=kv_dtype, state_dtype=state_dtype, memory=memory
            )
        )
        opened = open_model(model, mtp, any_architecture=backend.any_architecture)
        self._start(opened, engine_config, backend, progress)

    @classmethod
    def from_config(
        cls,
        model: OpenedModel,
        engine_config: EngineConfig,
        runner_config: RunnerConfig,
        progress: LoadProgress | None = None,
    ) -> LLM:
        llm = cls.__new__(cls)
        llm._start(model, engine_config, choose_backend(runner_config), progress)
        return llm

    def _start(
        self,
        model: OpenedModel,
        engine_config: EngineConfig,
        backend: Backend,
        progress: LoadProgress | None,
    ) -> None:
        self.model = model
        self.tokenizer = model.tokenizer
        self._grammars = GrammarCompiler(model.tokenizer)
        self.engine = make_engine(model, engine_config, backend, progress=progress)
        self.engine.start()

    @property
    def speculation(self) -> str:
        """Whether and why drafting is on or off."""
        return self.engine.snapshot().depth_reason

    def snapshot(self) -> StatsSnapshot:
        return self.engine.snapshot()

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Text is encoded as it is; token ids are taken as they are. ``chat`` applies the model's template."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.tokenizer.chat(messages)

    def constraint(self, spec: Spec) -> Constraint:
        """For ``SamplingParams.constraint``: what the output has to be. Raises GrammarError that says where."""
        return self._grammars.compile(spec)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, n: int = 1
    ) -> list[Output]:
        """Answers in the order of the prompts, all of them running together.

        ``n``: answers to each prompt, side by side; the prompt is computed once, answer i has seed + i.
        """
        if isinstance(prompts, str):
            raise RequestError("generate takes a list of prompts, not one string")
        each = _one_each(params, len(prompts))
        groups = [[_Collector() for _ in range(n)] for _ in prompts]
        encoded = [self.tokens_of(prompt) for prompt in prompts]
        ids: list[str] = []
        try:
            for tokens, own, collectors in zip(encoded, each, groups, strict=True):
                ids += self.engine.submit_many(tokens, own, collectors)
            for collectors in groups:
                for collector in collectors:
                    collector.wait()
        finally:
            for request_id in ids:  # what is finished ignores it: this is for a prompt refused, or Ctrl-C
                self.engine.abort(request_id)
        return [
            self._output(tokens, collector)
            for tokens, collectors in zip(encoded, groups, strict=True)
            for collector in collectors
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TextEvent]:
        """One answer as it comes. Leaving the loop early aborts the request."""
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        request_id = self.engine.submit(self.tokens_of(prompt), params or SamplingParams(), events.put)
        detokenizer = StreamingDetokenizer(self.tokenizer)
        done = False
        try:
            while not done:
                event = events.get()
                done = event.finish_reason is not None
                yield _text_event(event, detokenizer)
        finally:
            if not done:
                self.engine.abort(request_id)

    def close(self) -> None:
        self.engine.close()
        self._grammars.close()
        self.tokenizer.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _output(self, prompt: list[int], collector: _Collector) -> Output:
        last = collector.wait()
        assert last.finish_reason is not None
        assert last.stats is not None
        return Output(
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(collector.tokens),
            text=self.tokenizer.decode(_visible(collector.tokens, last.finish_reason)),
            finish_reason=last.finish_reason,
            stats=last.stats,
            error=last.error,
            logprobs=tuple(collector.logprobs),
            prompt_logprobs=tuple(collector.prompt_logprobs),
        )


class _Collector:
    """A sink that keeps everything and wakes one waiter at the end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._last: TokenEvent | None = None
        self._done = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        if event.finish_reason is not None:
            self._last = event
            self._done.set()

    def wait(self) -> TokenEvent:
        self._done.wait()
        assert self._last is not None
        if _engine_died(self._last):
            raise EngineDead(self._last.error)
        return self._last


def _engine_died(event: TokenEvent) -> bool:
    """A stream that cannot go on ends with its own account; the engine's end leaves no time for one."""
    return event.finish_reason == "error" and event.stats is None


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{count} prompts need {count} SamplingParams or one for all, not {len(params)}")
    return params


def _visible(tokens: Sequence[int], reason: FinishReason | None) -> list[int]:
    """The end token is part of the answer's tokens, not of its text."""
    return list(tokens[:-1] if reason == "stop" else tokens)


def _text_event(event: TokenEvent, detokenizer: StreamingDetokenizer) -> TextEvent:
    if _engine_died(event):
        raise EngineDead(event.error)
    text = detokenizer.push(_visible(event.tokens, event.finish_reason))
    if event.finish_reason is not None:
        text += detokenizer.finish()
    return TextEvent(
        text=text,
        tokens=event.tokens,
        num_accepted=event.num_accepted,
        finish_reason=event.finish_reason,
        stats=event.stats,
        error=event.error,
        logprobs=event.logprobs,
        prompt_logprobs=event.prompt_logprobs,
    )
