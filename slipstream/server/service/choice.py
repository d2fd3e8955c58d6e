"""One choice of a generation: token events in, parts of an answer out, a Finish at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.engine.async_engine import TokenStream
from slipstream.engine.contract import TokenLogprobs
from slipstream.engine.request import TokenEvent
from slipstream.load import Tokenizer
from slipstream.server.errors import ApiError, engine_failed, shutting_down
from slipstream.server.service.histograms import Latencies
from slipstream.server.service.prepare import Prepared
from slipstream.server.service.timings import Finish
from slipstream.server.text.markup.reader import Reader
from slipstream.server.text.output import OutputText
from slipstream.server.text.parts import Call, Part, Text, Thinking, joined
from slipstream.server.text.pieces import Piece, Score

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a choice that is still running."""

    num_prompt: int
    num_cached: int  # of those, not computed again
    num_output: int
    prompt_seconds: float  # until the first token, the queue included
    output_seconds: float  # since then


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The parts since the last delta: possibly several tokens of several steps."""

    index: int  # of the choice
    parts: Sequence[Part]
    finish: Finish | None = None
    tokens: Sequence[int] = ()  # the same parts as token ids, with the end token
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A complete choice."""

    parts: Sequence[Part]
    finish: Finish
    tokens: Sequence[int] = ()

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of its text, without thinking and tool calls."""
        return [piece for part in self.parts if isinstance(part, Text) for piece in part.pieces]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thinking))

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]


class ChoiceStream:
    def __init__(
        self, index: int, stream: TokenStream, tokenizer: Tokenizer, prepared: Prepared, latencies: Latencies
    ) -> None:
        self.index, self.stream = index, stream
        self.finish: Finish | None = None
        self.num_cached = 0  # tokens of the prompt, known with the first event
        self._tokenizer, self._prepared = tokenizer, prepared
        self._output = OutputText(tokenizer, prepared.stops)
        self._reader: Reader = prepared.reader()
        self._latencies = latencies
        self._echo: Sequence[Piece] = prepared.echo
        self._num_thinking = 0
        self._called = False
        self._tokens: list[int] = []  # since the last delta
        self._began = self._last_at = time.monotonic()
        self._first_at: float | None = None
        self._taken = False  # it has had an event
        self._aborted: ApiError | None = None

    @property
    def has_started(self) -> bool:
        return self._taken or self.stream.has_events

    def abort(self, error: ApiError) -> None:
        self._aborted = error
        self.stream.end("abort")

    def take(self) -> ChoiceDelta | None:
        """The next delta. None if all new text is held back: half a character, a possible stop string or marker."""
        parts: list[Part] = []
        for event in self.stream.take():
            self._taken = True
            self._latencies.observe(event)
            self._last_at = event.at
            self._first_at = self._first_at or event.at
            self.num_cached = max(self.num_cached, event.cached_tokens)
            parts += self._read(event)
            if event.finish_reason is not None:
                self.finish = self._finish(event)
        parts = joined(parts)
        if not parts and self.finish is None:
            return None
        tokens, self._tokens = self._tokens, []
        return ChoiceDelta(self.index, parts, self.finish, tokens, self._progress())

    def _progress(self) -> Progress:
        first = self._first_at or self._last_at
        num_prompt, num_output = len(self._prepared.tokens), self._output.num_tokens
        return Progress(num_prompt, self.num_cached, num_output, first - self._began, self._last_at - first)

    @property
    def _complete(self) -> bool:
        """The answer has ended; further tokens are ignored."""
        return self._output.stop is not None or self._reader.done

    def _read(self, event: TokenEvent) -> list[Part]:
        if self._complete:
            return []
        parts = self._echoed(event)
        ended = event.finish_reason == "stop" and bool(event.tokens)
        scores = self._scores(event)
        for token, origin, each in zip(event.tokens[:-1] if ended else event.tokens, event.origins, scores):
            self._num_thinking += self._reader.thinking
            self._tokens.append(token)
            parts += self._reader.push(self._output.push(token, origin, each))
            if self._complete:
                break
        if self._complete and event.finish_reason is None:
            self.stream.end("stop")
        if not self._complete and event.finish_reason is not None:
            self._tokens += event.tokens[-1:] if ended else ()
            parts += self._reader.push(self._output.finish(ended, scores[-1] if ended else None))
        if self._complete or event.finish_reason is not None:
            parts += self._reader.finish()
        self._called = self._called or any(isinstance(part, Call) for part in parts)
        return parts

    def _scores(self, event: TokenEvent) -> Sequence[Score | None]:
        if not event.logprobs:
            return (None,) * len(event.tokens)
        return [_score(self._tokenizer, token, logprobs) for token, logprobs in zip(event.tokens, event.logprobs)]

    def _echoed(self, event: TokenEvent) -> list[Part]:
        """The prompt, at the first event with tokens: its log-probabilities come with that event."""
        if not self._echo or not (event.tokens or event.finish_reason):
            return []
        echo, self._echo = self._echo, ()
        if self._prepared.params.prompt_logprobs is None:
            return [Text(list(echo))]
        logprobs: list[TokenLogprobs | None] = [None, *event.prompt_logprobs]
        scores = [_score(self._tokenizer, *each) for each in zip(self._prepared.tokens, logprobs)]
        return [Text([Piece(piece.text, 0, (each,)) for piece, each in zip(echo, scores)])]

    def _finish(self, event: TokenEvent) -> Finish:
        if event.stats is None or (event.finish_reason == "abort" and not self._complete):
            raise engine_failed() if event.finish_reason == "error" else self._aborted or shutting_down()
        reason: Literal["stop", "length", "tool_calls", "error"] = "tool_calls" if self._called else "stop"
        if event.finish_reason in ("length", "error") and not self._complete:
            reason = event.finish_reason
        return Finish(
            reason,
            self._output.stop,
            len(self._prepared.tokens),
            self._output.num_tokens,
            event.stats,
            self._num_thinking,
            event.error if reason == "error" else "",
        )


def _score(tokenizer: Tokenizer, token: int, logprobs: TokenLogprobs | None) -> Score:
    """``logprobs`` None: the prompt's first token."""
    raw = tokenizer.token_bytes(token, skip_special=False)
    if logprobs is None:
        return Score(raw, None, token=token)
    top = tuple((tokenizer.token_bytes(t, skip_special=False), max(x, MIN_LOGPROB)) for t, x in logprobs.top)
    return Score(raw, max(logprobs.logprob, MIN_LOGPROB), top, token, tuple(t for t, _ in logprobs.top))
