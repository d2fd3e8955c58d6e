"""Prepares a generation request for the engine: prompt to tokens, bad words and grammars to constraints.

Runs in worker threads, since long prompts and complex grammars take time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.grammar import GrammarCompiler
from slipstream.load import StreamingDetokenizer, Tokenizer
from slipstream.sampling import SamplingParams
from slipstream.sampling.constraints import AllOf, Constraint
from slipstream.sampling.thinking import AfterThinking, ThinkingBudget
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt, MixedPrompt, TextPrompt, TokenPrompt
from slipstream.server.text.markup import thinking
from slipstream.server.text.markup.chat_format import ChatFormat, ThinkingState
from slipstream.server.text.markup.reader import PlainReader, Reader
from slipstream.server.text.pieces import Piece
from slipstream.server.text.response_format import ResponseFormat
from slipstream.server.text.tools import NO_TOOLS, ToolUse

DOES_NOT_THINK = "thinking has no effect: this model does not think"


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
    echo: Sequence[Piece] = ()  # the prompt's text, one piece per token
    warnings: tuple[str, ...] = ()  # fields that this model cannot follow

    def reader(self) -> Reader:
        return PlainReader() if self.chat_format is None else self.chat_format.reader(self.thinking_state, self.tools)

    @property
    def needs_constraint(self) -> bool:
        limited = self.thinking_budget is not None and self.thinking_state is ThinkingState.STARTED
        return limited or self.response_format is not None


class Preparation:
    """Shared by all requests to one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer)
        self.chat_format = ChatFormat(tokenizer)

    def close(self) -> None:
        self._grammars.close()

    def prepare(self, request: GenerationRequest) -> Prepared:
        """Everything but the constraint, which `constrain` adds."""
        params, prompt = request.params, request.prompt
        if request.bad_words:
            params = replace(params, bad_words=(*params.bad_words, *self._bad_words(request.bad_words)))
        match prompt:
            case ChatPrompt():
                return self._prepare_chat(request, prompt, params)
            case TextPrompt(text, add_special, allow_special):
                tokens = self._tokenizer.encode(text, add_special, allow_special)
                echo = self._echo(tokens, text) if request.echo else ()
                return Prepared(tokens, params, request.stops, request.response_format, echo=echo)
            case TokenPrompt() | MixedPrompt():
                given = prompt.tokens if isinstance(prompt, TokenPrompt) else self._mixed(prompt)
                echo = self._echo(given, None) if request.echo else ()
                return Prepared(given, params, request.stops, request.response_format, echo=echo)

    def _mixed(self, prompt: MixedPrompt) -> list[int]:
        tokens: list[int] = []
        for i, part in enumerate(prompt.parts):
            first = prompt.add_special and i == 0
            tokens += [part] if isinstance(part, int) else self._tokenizer.encode(part, first, prompt.allow_special)
        return tokens

    def _prepare_chat(self, request: GenerationRequest, prompt: ChatPrompt, params: SamplingParams) -> Prepared:
        chat_format = self.chat_format
        response_format = chat_format.enforced_format(request.tools, request.response_format)
        ends_thinking = response_format is not None or request.thinking_budget is not None
        text, state = self.render(prompt, request.tools, ends_thinking)
        return Prepared(
            self._tokenizer.encode(text),
            params,
            request.stops,
            response_format,
            request.thinking_budget,
            chat_format,
            state,
            request.tools,
            warnings=(DOES_NOT_THINK,) if request.must_think and not chat_format.thinks else (),
        )

    def render(self, prompt: ChatPrompt, tools: ToolUse, ends_thinking: bool = False) -> tuple[str, ThinkingState]:
        """The prompt's text. ``ends_thinking``: a constraint must see the end of the thinking."""
        chat_format = self.chat_format
        text = chat_format.render(prompt.messages, tools, prompt.variables)
        if prompt.prefill is not None:
            return chat_format.prefilled(text, prompt.prefill.content, prompt.prefill.thinking)
        text = chat_format.start_thinking(text) if ends_thinking else text
        return text, chat_format.thinking_state(text)

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
