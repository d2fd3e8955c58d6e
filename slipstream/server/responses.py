"""`/v1/responses`, without memory: nothing is stored, so nothing can be referred to later."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.server.chat import TextFormat
from slipstream.server.errors import ApiError
from slipstream.server.fields import (
    Body,
    Count,
    Metadata,
    NoDict,
    NoList,
    OnlyFalse,
    OnlyZero,
    Sampled,
    ShortText,
    TextPart,
    text_of,
)
from slipstream.server.generation import Delta, Job
from slipstream.server.prompts import ChatPrompt
from slipstream.server.protocol import Protocol, Writer, named, new_id, now
from slipstream.server.timings import Finish


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    # What a client sends back when it repeats an output of ours.
    id: ShortText | None = None
    status: Literal["completed", "incomplete"] | None = None

    def for_template(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class NoReasoning(Body):
    effort: Literal["none"] | None = None
    summary: None = None


class ResponsesRequest(Sampled):
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    # Harmless here.
    metadata: Metadata | None = None
    user: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    prompt_cache_options: Metadata | None = None
    safety_identifier: ShortText | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    include: NoList | None = None
    # Not here, or not here yet.
    store: OnlyFalse | None = None
    background: OnlyFalse | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    truncation: Literal["disabled"] | None = None
    text: TextOptions | None = None
    reasoning: NoReasoning | None = None
    tools: NoList | None = None
    tool_choice: Literal["none", "auto"] | None = None
    top_logprobs: OnlyZero | None = None
    stream_options: NoDict | None = None


class ResponsesWriter(Writer):
    def __init__(self, asked: ResponsesRequest, model: str) -> None:
        self._asked = asked
        self._id, self._item_id = new_id("resp_"), new_id("msg_")
        self._created, self._model = now(), model
        self._text: list[str] = []
        self._num_events = 0

    def opening(self, num_prompt: int) -> str:
        going = self._response("in_progress", [])
        return "".join(
            (
                self._event("response.created", response=going),
                self._event("response.in_progress", response=going),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
                self._content("response.content_part.added", part=_part("")),
            )
        )

    def delta(self, delta: Delta) -> str:
        self._text.append(delta.text)
        return self._content("response.output_text.delta", delta=delta.text, logprobs=[])

    def closing(self, finish: Finish) -> str:
        text = "".join(self._text)
        status, item = _status(finish), self._item(_status(finish), [_part(text)])
        return "".join(
            (
                self._content("response.output_text.done", text=text, logprobs=[]),
                self._content("response.content_part.done", part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{status}", response=self._response(status, [item], finish)),
            )
        )

    def whole(self, delta: Delta, finish: Finish) -> dict[str, Any]:
        status = _status(finish)
        return self._response(status, [self._item(status, [_part(delta.text)])], finish)

    def failure(self, error: ApiError) -> str:
        return self._event("error", code=error.code or "server_error", message=error.message, param=error.param)

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        return named({"type": kind, "sequence_number": number, **fields})

    def _content(self, kind: str, **fields: Any) -> str:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]], finish: Finish | None = None) -> dict[str, Any]:
        asked = self._asked
        told = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True if asked.parallel_tool_calls is None else asked.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if finish is None else _usage(finish),
        }
        return told if finish is None else {**told, "timings": finish.timings()}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(finish: Finish) -> str:
    return "completed" if finish.reason == "stop" else "incomplete"


def _usage(finish: Finish) -> dict[str, Any]:
    return {
        "input_tokens": finish.num_prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": finish.num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": finish.num_prompt + finish.num_output,
    }


def responses_job(asked: ResponsesRequest, engine: EngineConfig) -> Job:
    system = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    if isinstance(asked.input, str):
        messages = [{"role": "user", "content": asked.input}]
    else:
        messages = [message.for_template() for message in asked.input]
    return Job(ChatPrompt([*system, *messages]), asked.sampling(engine, asked.max_output_tokens))


RESPONSES = Protocol(ResponsesRequest, responses_job, ResponsesWriter)
