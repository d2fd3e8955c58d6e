"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.server.fields import (
    Bias,
    Body,
    Count,
    Metadata,
    NoDict,
    NoList,
    OnlyFalse,
    OnlyOne,
    OnlyZero,
    Penalty,
    Sampled,
    ShortText,
    Stops,
    TextPart,
    stop_list,
    text_of,
)
from slipstream.server.generation import Delta, Job
from slipstream.server.prompts import ChatPrompt
from slipstream.server.protocol import Protocol, Writer, data, new_id, now, openai_usage
from slipstream.server.timings import Finish
from slipstream.server.wire import compact


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: ShortText | None = None
    # What a client sends back when it repeats an answer of ours.
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: NoList | None = None
    annotations: NoList | None = None

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": text_of(self.content), **named}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: OnlyFalse | None = None


class TextFormat(Body):
    type: Literal["text"]


class OpenAiSampled(Sampled):
    """What chat and legacy completions share."""

    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    return_origins: bool | None = None
    n: OnlyOne | None = None
    user: ShortText | None = None

    def job_params(self, engine: EngineConfig, max_tokens: int | None) -> dict[str, Any]:
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        params = self.sampling(
            engine,
            max_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=bias or None,
        )
        return {"params": params, "stops": stop_list(self.stop)}

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(OpenAiSampled):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    # Harmless here.
    metadata: Metadata | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    prompt_cache_options: Metadata | None = None
    safety_identifier: ShortText | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse | None = None
    # Not here yet.
    logprobs: OnlyFalse | None = None
    top_logprobs: OnlyZero | None = None
    tools: NoList | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: NoList | None = None
    function_call: Literal["none", "auto"] | None = None
    response_format: TextFormat | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: NoDict | None = None


class ChatWriter(Writer):
    def __init__(self, asked: ChatRequest, model: str) -> None:
        self._origins = bool(asked.return_origins)
        self._usage = asked.wants_usage
        self._head = {"id": new_id("chatcmpl-"), "created": now(), "model": model}
        # A delta of nothing but text is by far the most frequent line: its fixed part is written once.
        fixed = compact(self._chunk({"content": ""}))
        self._before, self._after = fixed.split('"content":""')
        self._before = f'data: {self._before}"content":'
        self._after += "\n\n"

    def _chunk(self, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def opening(self, num_prompt: int) -> str:
        return data(self._chunk({"role": "assistant", "content": ""}))

    def delta(self, delta: Delta) -> str:
        if self._origins:
            return data(self._chunk({"content": delta.text}, origins=delta.pieces))
        return f"{self._before}{compact(delta.text)}{self._after}"

    def closing(self, finish: Finish) -> str:
        last = self._chunk({}, finish.reason) | {"timings": finish.timings()}
        usage = {"object": "chat.completion.chunk", "choices": [], "usage": openai_usage(finish)}
        return data(last) + (data({**self._head, **usage}) if self._usage else "") + "data: [DONE]\n\n"

    def whole(self, delta: Delta, finish: Finish) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        origins = {"origins": delta.pieces} if self._origins else {}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish.reason, **origins}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": openai_usage(finish),
            "timings": finish.timings(),
        }


def chat_job(asked: ChatRequest, engine: EngineConfig) -> Job:
    prompt = ChatPrompt([message.for_template() for message in asked.messages])
    most = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
    return Job(prompt, **asked.job_params(engine, most))


CHAT = Protocol(ChatRequest, chat_job, ChatWriter)
