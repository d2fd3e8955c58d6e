"""`/v1/completions`: requests and responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.server.errors import ApiError
from slipstream.server.protocols.api_protocol import (
    DONE,
    ApiWriter,
    data,
    error_field,
    new_id,
    now,
    openai_usage,
    origins,
)
from slipstream.server.protocols.fields import Limit, TokenIds, TopLogprobs
from slipstream.server.protocols.openai.fields import Choices, OpenAiSamplingFields
from slipstream.server.protocols.openai.live_fields import LiveFields
from slipstream.server.protocols.openai.logprobs import legacy_logprobs
from slipstream.server.service.choice import ChoiceDelta, FinishedChoice
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import Prompt, TextPrompt, TokenPrompt
from slipstream.server.service.timings import Finish
from slipstream.server.text.parts import Text
from slipstream.server.text.pieces import Piece, text_of

DEFAULT_TOKENS = 16  # the protocol's default
MAX_PROMPTS = 128
T = TypeVar("T")
Prompts = Annotated[list[T], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]


class CompletionRequest(OpenAiSamplingFields):
    neutral = OpenAiSamplingFields.neutral | {"suffix": ("",)}

    prompt: str | TokenIds | Prompts[str] | Prompts[TokenIds]
    max_tokens: Limit | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None

    @property
    def num_prompts(self) -> int:
        given = self.prompt
        return 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)


class CompletionWriter(ApiWriter):
    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._origins, self._logprobs = bool(request.return_origins), request.logprobs is not None
        self._usage, self._live = request.wants_usage, LiveFields(request)
        self._num_choices = request.n or 1  # of each prompt
        self._begun: set[int] = set()  # choices that have written
        self._head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": model}
        self._offsets = [0] * (
            request.num_prompts * self._num_choices
        )  # length of the text that each choice has written

    def _choice(self, index: int, pieces: Sequence[Piece], finish: Finish | None) -> dict[str, Any]:
        text, offset = text_of(pieces), self._offsets[index]
        self._offsets[index] += len(text)
        logprobs = legacy_logprobs(pieces, offset) if self._logprobs and pieces else None
        reason, error = (None, {}) if finish is None else (finish.reason, error_field(finish))
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **error}
        return {**choice, "origins": origins(pieces)} if self._origins and pieces else choice

    def _finished(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        ids = {"token_ids": list(choice.tokens), **self._prompt_ids(index)} if self._live.token_ids else {}
        return self._choice(index, choice.pieces, choice.finish) | ids

    def opening(self, num_prompt: int, num_cached: int) -> str:
        return ""

    def delta(self, delta: ChoiceDelta) -> str:
        pieces = [piece for part in delta.parts if isinstance(part, Text) for piece in part.pieces]
        choice = self._choice(delta.index, pieces, None) | self._live.of_choice(delta.tokens)
        if self._live.token_ids and delta.index not in self._begun:
            self._begun.add(delta.index)
            choice |= self._prompt_ids(delta.index)
        return data({**self._head, "choices": [choice], **self._live.of_chunk(delta)}) if pieces or self._live else ""

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.prompts[index // self._num_choices])}

    def ended(self, index: int, finish: Finish, total: Finish | None) -> str:
        last = {**self._head, "choices": [self._choice(index, (), finish)]}
        if total is None:
            return data(last)
        usage = {**self._head, "choices": [], "usage": openai_usage(total)}
        last |= self.report(total)
        if not self._usage:
            return data(last | total.metrics()) + DONE
        return data(last) + data(usage | total.metrics()) + DONE

    def whole(self, choices: Sequence[FinishedChoice], total: Finish) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._finished(i, choice) for i, choice in enumerate(choices)],
            "usage": openai_usage(total),
            **self.report(total),
            **total.metrics(),
        }


def completion_generation_request(request: CompletionRequest, engine: EngineConfig) -> GenerationRequest:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of must equal n: every choice is returned", param="best_of")
    given = request.n_predict if request.max_tokens is None else request.max_tokens
    max_tokens = DEFAULT_TOKENS if given is None else given
    echoed = request.logprobs if request.echo else None
    fields = request.generation_fields(engine, max_tokens, logprobs=request.logprobs, prompt_logprobs=echoed)
    first, *others = _prompts(request.prompt)
    return GenerationRequest(first, echo=bool(request.echo), further_prompts=tuple(others), **fields)


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    if isinstance(given, str):
        return [TextPrompt(given)]
    if isinstance(given[0], int):
        return [TokenPrompt([token for token in given if isinstance(token, int)])]
    return [
        TextPrompt(each) if isinstance(each, str) else TokenPrompt(each) for each in given if not isinstance(each, int)
    ]
