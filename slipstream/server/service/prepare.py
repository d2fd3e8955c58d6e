"""Prepares a generation request for the engine: prompt to tokens, bad words and grammars to constraints.

Runs in worker threads, since long prompts and complex grammars take time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from slipstream.engine.request import DEFAULT_CACHE, PromptCache
from slipstream.errors import PromptTooLong
from slipstream.grammar import GrammarCompiler
from slipstream.load import StreamingDetokenizer, Tokenizer
from slipstream.sampling import SamplingParams
from slipstream.sampling.constraints import AllOf, Constraint
from slipstream.sampling.thinking import AfterThinking, ThinkingBudget
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt, MixedPrompt, TextPrompt, TokenPrompt
from slipstream.server.service.sampled_calls import SampledCalls
from slipstream.server.text.markup import thinking
from slipstream.server.text.markup.boundaries import MessageBoundaries
from slipstream.server.text.markup.calls import OnCall, ignore_call
from slipstream.server.text.markup.chat_format import ChatFormat, ThinkingState
from slipstream.server.text.markup.reader import PlainReader, Reader
from slipstream.server.text.pieces import Piece
from slipstream.server.text.response_format import ResponseFormat
from slipstream.server.text.tools import NO_TOOLS, ToolUse

DOES_NOT_THINK = "thinking has no effect: this model does not think"
LONG_TOKEN = 16  # characters; texts have fewer to a token


@dataclass(frozen=True, slots=True)
class Prepared:
    tokens: Sequence[int]
    params: SamplingParams
    stops: tuple[str, ...]
    response_format: ResponseFormat | None  # to be enforced by a grammar
    thinking_budget: int | None = None
    chat_format: ChatFormat | None = None  # None: a text completion
    thinking_state: ThinkingState = ThinkingState.OFF
    tools: ToolUse = NO_TOOLS
    cache: PromptCache = DEFAULT_CACHE
    on_call: OnCall = ignore_call  # given every complete tool call of the answer
    echo: Sequence[Piece] = ()  # the prompt's text, one piece per token
    warnings: tuple[str, ...] = ()  # fields that this model cannot follow

    def reader(self) -> Reader:
        if self.chat_format is None:
            return PlainReader()
        return self.chat_format.reader(self.thinking_state, self.tools, self.on_call)

    @property
    def needs_constraint(self) -> bool:
        limited = self.thinking_budget is not None and self.thinking_state is ThinkingState.STARTED
        return limited or self.response_format is not None


@dataclass(frozen=True, slots=True)
class RenderedChat:
    text: str
    thinking_state: ThinkingState
    response_format: ResponseFormat | None  # to be enforced by a grammar


class Preparation:
    """Shared by all requests to one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer)
        self.chat_format = ChatFormat(tokenizer)
        self._boundaries = MessageBoundaries(tokenizer)
        self.sampled_calls = SampledCalls()

    def close(self) -> None:
        self._grammars.close()
        self._tokenizer.close()

    def render(self, request: GenerationRequest, prompt: ChatPrompt) -> RenderedChat:
        """The text of a chat. Waits for the process that renders it."""
        chat_format = self.chat_format
        self._boundaries.learn()
        messages = chat_format.as_sampled(prompt.messages, partial(self.sampled_calls.recall, request.cache.salt))
        text = chat_format.render(messages, request.tools, prompt.variables)
        response_format = chat_format.enforced_format(request.tools, request.response_format)
        if prompt.prefill is not None:
            text, state = chat_format.prefilled(text, prompt.prefill.content, prompt.prefill.thinking)
            return RenderedChat(text, state, response_format)
        if response_format is not None or request.thinking_budget is not None:
            text = chat_format.start_thinking(text)
        return RenderedChat(text, chat_format.thinking_state(text), response_format)

    def prepare(
        self, request: GenerationRequest, rendered: RenderedChat | None = None, max_tokens: int | None = None
    ) -> Prepared:
        """Everything but the constraint, which `constrain` adds. ``rendered``: the text of a chat, if it is there.
        A prompt of more than ``max_tokens`` is refused."""
        params, prompt = request.params, request.prompt
        if request.bad_words:
            params = replace(params, bad_words=(*params.bad_words, *self._bad_words(request.bad_words)))
        match prompt:
            case ChatPrompt():
                return self._prepare_chat(request, rendered or self.render(request, prompt), params, max_tokens)
            case TextPrompt(text, add_special, allow_special):
                self._check_length(text, max_tokens)
                tokens = self._tokenizer.encode(text, add_special, allow_special)
                echo = self._echo(tokens, text) if request.echo else ()
                return Prepared(tokens, params, request.stops, request.response_format, cache=request.cache, echo=echo)
            case TokenPrompt() | MixedPrompt():
                given = prompt.tokens if isinstance(prompt, TokenPrompt) else self._mixed(prompt, max_tokens)
                _check_count(len(given), max_tokens)
                echo = self._echo(given, None) if request.echo else ()
                return Prepared(given, params, request.stops, request.response_format, cache=request.cache, echo=echo)

    def _mixed(self, prompt: MixedPrompt, max_tokens: int | None) -> list[int]:
        tokens: list[int] = []
        for i, part in enumerate(prompt.parts):
            if isinstance(part, int):
                tokens.append(part)
                continue
            self._check_length(part, max_tokens)
            tokens += self._tokenizer.encode(part, prompt.add_special and i == 0, prompt.allow_special)
        return tokens

    def _prepare_chat(
        self, request: GenerationRequest, rendered: RenderedChat, params: SamplingParams, max_tokens: int | None
    ) -> Prepared:
        chat_format = self.chat_format
        self._check_length(rendered.text, max_tokens)
        tokens = self._tokenizer.encode(rendered.text)
        return Prepared(
            tokens,
            params,
            request.stops,
            rendered.response_format,
            request.thinking_budget,
            chat_format,
            rendered.thinking_state,
            request.tools,
            replace(request.cache, boundaries=self._boundaries.of(tokens)),
            partial(self.sampled_calls.remember, request.cache.salt),
            warnings=(DOES_NOT_THINK,) if request.must_think and not chat_format.thinks else (),
        )

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        """Tokenises the beginning of a text that is long, then more of it: megabytes would take seconds.

        A beginning may have a few tokens more than the same text has inside the whole, hence the margin.
        """
        if max_tokens is None:
            return
        size = max_tokens * LONG_TOKEN
        while size < len(text):
            _check_count(len(self._tokenizer.encode(text[:size])) * 7 // 8, max_tokens)
            size *= 2

    def constrain(self, prepared: Prepared) -> Prepared:
        """Adds the constraint. May take long, and may raise GrammarError."""
        response_format = prepared.response_format
        parts: list[Constraint] = []
        if response_format is not None:
            parts.append(self._grammars.compile(response_format.spec, response_format.where))
        if prepared.thinking_state is ThinkingState.STARTED:
            parts = self._around_thinking(parts, prepared.thinking_budget)
        return replace(prepared, params=replace(prepared.params, constraint=AllOf(tuple(parts))))

    def _around_thinking(self, parts: Sequence[Constraint], budget: int | None) -> list[Constraint]:
        """The answer's constraints apply after the thinking; the budget applies to the thinking."""
        marker, closing = self._encode(thinking.END), self._encode(f"\n{thinking.END}")
        limits = [] if budget is None else [ThinkingBudget(budget, closing, marker)]
        return [*limits, *(AfterThinking(part, marker) for part in parts)]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens: at the beginning of a text, and after a space."""
        texts = [text for word in words for text in (word, f" {word}")]
        return tuple(dict.fromkeys(tuple(self._tokenizer.encode(text, allow_special=False)) for text in texts))

    def _echo(self, tokens: Sequence[int], given: str | None) -> list[Piece]:
        detokenizer = StreamingDetokenizer(self._tokenizer, skip_special=False)
        texts = [detokenizer.push((token,)) for token in tokens] or [""]
        texts[-1] += detokenizer.finish()
        if given is not None and not given.startswith(texts[0]):
            texts[0] = ""  # a special token that the tokenizer added, such as BOS
        return [Piece(text, 0) for text in texts]


def _check_count(num_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        raise PromptTooLong(
            f"the prompt has more than {num_tokens - 1} tokens; with one to generate, at most {max_tokens} fit"
        )
