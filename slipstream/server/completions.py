"""`/v1/completions`: continue a text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.server.chat import OpenAiSampled
from slipstream.server.fields import Count, OnlyFalse, OnlyOne, ShortText, TokenIds
from slipstream.server.generation import Delta, Job
from slipstream.server.prompts import Prompt, TextPrompt, TokenPrompt
from slipstream.server.protocol import Protocol, Writer, data, new_id, now, openai_usage
from slipstream.server.timings import Finish

DEFAULT_TOKENS = 16  # the protocol's own


class CompletionRequest(OpenAiSampled):
    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1, max_length=1)]
    max_tokens: Count | None = None
    # Not here yet.
    suffix: Literal[""] | None = None
    echo: OnlyFalse | None = None
    best_of: OnlyOne | None = None
    logprobs: None = None
    service_tier: ShortText | None = None


class CompletionWriter(Writer):
    def __init__(self, asked: CompletionRequest, model: str) -> None:
        self._origins = bool(asked.return_origins)
        self._usage = asked.wants_usage
        self._head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": model}

    def _choice(self, text: str, reason: str | None, delta: Delta | None) -> dict[str, Any]:
        origins = {"origins": delta.pieces} if self._origins and delta is not None else {}
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, **origins}

    def opening(self, num_prompt: int) -> str:
        return ""

    def delta(self, delta: Delta) -> str:
        return data({**self._head, "choices": [self._choice(delta.text, None, delta)]})

    def closing(self, finish: Finish) -> str:
        last = {**self._head, "choices": [self._choice("", finish.reason, None)], "timings": finish.timings()}
        usage = {**self._head, "choices": [], "usage": openai_usage(finish)}
        return data(last) + (data(usage) if self._usage else "") + "data: [DONE]\n\n"

    def whole(self, delta: Delta, finish: Finish) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(delta.text, finish.reason, delta)],
            "usage": openai_usage(finish),
            "timings": finish.timings(),
        }


def completion_job(asked: CompletionRequest, engine: EngineConfig) -> Job:
    most = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
    return Job(_prompt(asked.prompt), **asked.job_params(engine, most))


def _prompt(given: str | list[int] | list[str]) -> Prompt:
    if isinstance(given, str):
        return TextPrompt(given)
    if isinstance(given[0], str):
        return TextPrompt(given[0])
    return TokenPrompt([token for token in given if isinstance(token, int)])


COMPLETIONS = Protocol(CompletionRequest, completion_job, CompletionWriter)
