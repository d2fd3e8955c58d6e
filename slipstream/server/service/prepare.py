"""A job made ready for the engine: its prompt as tokens, what its words and grammars forbid, who reads its answer.

Runs in worker threads: texts may be long and grammars hard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.grammar import GrammarCompiler
from slipstream.load import StreamingDetokenizer, Tokenizer
from slipstream.sampling import SamplingParams
from slipstream.sampling.constraints import AllOf, Constraint
from slipstream.sampling.thinking import AfterThinking, ThinkingBudget
from slipstream.server.errors import ApiError
from slipstream.server.service.generation_request import Job
from slipstream.server.service.prompts import ChatPrompt, TextPrompt, TokenPrompt
from slipstream.server.text.markup import thinking
from slipstream.server.text.markup.chat_format import Dialect, Thought
from slipstream.server.text.markup.reader import PlainReader, Reader
from slipstream.server.text.pieces import Piece
from slipstream.server.text.response_format import ResponseFormat
from slipstream.server.text.tools import NO_TOOLS, ToolUse


@dataclass(frozen=True, slots=True)
class Prepared:
    tokens: Sequence[int]
    params: SamplingParams
    stops: tuple[str, ...] = ()
    dialect: Dialect | None = None  # None: a text, not an answer
    thought: Thought = Thought.NONE
    tools: ToolUse = NO_TOOLS
    echo: Sequence[Piece] = ()  # the prompt's text, a piece a token

    def reader(self) -> Reader:
        return PlainReader() if self.dialect is None else self.dialect.reader(self.thought, self.tools)


class Preparation:
    """What all jobs on one model share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer)
        self.dialect = Dialect(tokenizer)

    def close(self) -> None:
        self._grammars.close()

    def prepare(self, job: Job) -> Prepared:
        """Without the constraint: see `constrain`."""
        params = replace(job.params, bad_words=self._runs(job.bad_words)) if job.bad_words else job.params
        match job.prompt:
            case ChatPrompt(messages, variables):
                text = self._rendered(job, self.dialect.render(messages, job.tools, variables))
                thought = self.dialect.thought(text)
                return Prepared(self._tokenizer.encode(text), params, job.stops, self.dialect, thought, job.tools)
            case TextPrompt(text, add_special):
                tokens = self._tokenizer.encode(text, add_special=add_special)
                return Prepared(tokens, params, job.stops, echo=self._echo(tokens, text) if job.echo else ())
            case TokenPrompt(given):
                return Prepared(given, params, job.stops, echo=self._echo(given, None) if job.echo else ())

    def _rendered(self, job: Job, text: str) -> str:
        if job.must_think and not self.dialect.thinks:
            raise ApiError(400, "thinking: this model does not think", param="thinking")
        counts = self._look(job) is not None or job.thinking_budget is not None
        return self.dialect.begin_thinking(text) if counts else text

    def _look(self, job: Job) -> ResponseFormat | None:
        return self.dialect.look(job.tools, job.look) if isinstance(job.prompt, ChatPrompt) else job.look

    def constrains(self, job: Job, prepared: Prepared) -> bool:
        return self._look(job) is not None or (job.thinking_budget is not None and prepared.thought is Thought.BEGUN)

    def constrain(self, job: Job, prepared: Prepared) -> Prepared:
        """May take long, and raise GrammarError."""
        look = self._look(job)
        parts: list[Constraint] = [] if look is None else [self._grammars.compile(look.spec, look.where)]
        if prepared.thought is Thought.BEGUN:
            parts = self._around_thinking(parts, job.thinking_budget)
        return replace(prepared, params=replace(prepared.params, constraint=AllOf(tuple(parts))))

    def _around_thinking(self, parts: Sequence[Constraint], budget: int | None) -> list[Constraint]:
        """What is said of the answer holds behind the thinking."""
        marker, closing = self._run(thinking.END), self._run(f"\n{thinking.END}")
        limits = [] if budget is None else [ThinkingBudget(budget, closing, marker)]
        return [*limits, *(AfterThinking(part, marker) for part in parts)]

    def _run(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def _runs(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """As they stand at the beginning of a text, and behind a space."""
        texts = [text for word in words for text in (word, f" {word}")]
        return tuple(dict.fromkeys(tuple(self._tokenizer.encode(text, allow_special=False)) for text in texts))

    def _echo(self, tokens: Sequence[int], given: str | None) -> list[Piece]:
        detokenizer = StreamingDetokenizer(self._tokenizer, skip_special=False)
        texts = [detokenizer.push((token,)) for token in tokens] or [""]
        texts[-1] += detokenizer.finish()
        if given is not None and not given.startswith(texts[0]):
            texts[0] = ""  # not the client's, but what the model wants before every text
        return [Piece(text, 0) for text in texts]
