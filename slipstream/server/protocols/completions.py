"""`/v1/completions`: requests and responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.server.errors import ApiError
from slipstream.server.protocols.api_protocol import (
    ApiWriter,
    data,
    error_field,
    new_id,
    now,
    openai_usage,
    origins,
)
from slipstream.server.protocols.fields import Count, TokenIds, TopLogprobs
from slipstream.server.protocols.logprobs import legacy_logprobs
from slipstream.server.protocols.openai_fields import Choices, IgnoredFields, OpenAiSamplingFields
from slipstream.server.service.choice import ChoiceDelta, FinishedChoice
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import Prompt, TextPrompt, TokenPrompt
from slipstream.server.service.timings import Finish
from slipstream.server.text.parts import Text
from slipstream.server.text.pieces import Piece, text_of

DEFAULT_TOKENS = 16  # the protocol's default


class CompletionRequest(OpenAiSamplingFields, IgnoredFields):
    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1, max_length=1)]
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None
    # Not supported.
    suffix: Literal[""] | None = None


class CompletionWriter(ApiWriter):
    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._origins, self._logprobs = bool(request.return_origins), request.logprobs is not None
        self._usage = request.wants_usage
        self._head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": model}
        self._offsets = [0] * (request.n or 1)  # length of the text that each choice has written

    def _choice(self, index: int, pieces: Sequence[Piece], finish: Finish | None) -> dict[str, Any]:
        text, offset = text_of(pieces), self._offsets[index]
        self._offsets[index] += len(text)
        logprobs = legacy_logprobs(pieces, offset) if self._logprobs and pieces else None
        reason, error = (None, {}) if finish is None else (finish.reason, error_field(finish))
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **error}
        return {**choice, "origins": origins(pieces)} if self._origins and pieces else choice

    def opening(self, num_prompt: int) -> str:
        return ""

    def delta(self, delta: ChoiceDelta) -> str:
        pieces = [piece for part in delta.parts if isinstance(part, Text) for piece in part.pieces]
        return data({**self._head, "choices": [self._choice(delta.index, pieces, None)]})

    def ended(self, index: int, finish: Finish, total: Finish | None) -> str:
        last = {**self._head, "choices": [self._choice(index, (), finish)]}
        if total is None:
            return data(last)
        usage = {**self._head, "choices": [], "usage": openai_usage(total)}
        return data(last | {"timings": total.timings()}) + (data(usage) if self._usage else "") + "data: [DONE]\n\n"

    def whole(self, choices: Sequence[FinishedChoice], total: Finish) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(i, choice.pieces, choice.finish) for i, choice in enumerate(choices)],
            "usage": openai_usage(total),
            "timings": total.timings(),
        }


def completion_generation_request(request: CompletionRequest, engine: EngineConfig) -> GenerationRequest:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of must equal n: every choice is returned", param="best_of")
    max_tokens = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    echoed = request.logprobs if request.echo else None
    fields = request.generation_fields(engine, max_tokens, logprobs=request.logprobs, prompt_logprobs=echoed)
    return GenerationRequest(_prompt(request.prompt), echo=bool(request.echo), **fields)


def _prompt(given: str | list[int] | list[str]) -> Prompt:
    if isinstance(given, str):
        return TextPrompt(given)
    if isinstance(given[0], str):
        return TextPrompt(given[0])
    return TokenPrompt([token for token in given if isinstance(token, int)])
