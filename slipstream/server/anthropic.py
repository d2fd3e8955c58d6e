"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.server.errors import ApiError, as_anthropic
from slipstream.server.fields import (
    Body,
    Count,
    NoList,
    Sampled,
    ShortText,
    StopText,
    TextPart,
    Unit,
    stop_list,
    text_of,
)
from slipstream.server.generation import Delta, Job
from slipstream.server.prompts import ChatPrompt
from slipstream.server.protocol import Protocol, Writer, named, new_id
from slipstream.server.timings import Finish


class Message(Body):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]


class NoThinking(Body):
    type: Literal["disabled"]


class ToolChoice(Body):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


class UserMetadata(Body):
    user_id: ShortText | None = None


class Counted(Body):
    """What decides about the prompt: all that count_tokens takes."""

    model: ShortText | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[TextPart] | None = None
    cache_control: dict[str, Any] | None = None  # a hint about billing elsewhere
    tools: NoList | None = None
    tool_choice: ToolChoice | None = None
    thinking: NoThinking | None = None

    def prompt(self) -> ChatPrompt:
        system = [] if self.system is None else [{"role": "system", "content": text_of(self.system)}]
        return ChatPrompt([*system, *({"role": m.role, "content": text_of(m.content)} for m in self.messages)])


class MessagesRequest(Counted, Sampled):
    max_tokens: Count
    temperature: Unit | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    mcp_servers: NoList | None = None


class MessagesWriter(Writer):
    keep_alive = named({"type": "ping"})

    def __init__(self, asked: MessagesRequest, model: str) -> None:
        self._message = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}

    def opening(self, num_prompt: int) -> str:
        usage = {"input_tokens": num_prompt, "output_tokens": 0}
        start: dict[str, Any] = {
            **self._message,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return named({"type": "message_start", "message": start}) + named(block)

    def delta(self, delta: Delta) -> str:
        text = {"type": "text_delta", "text": delta.text}
        return named({"type": "content_block_delta", "index": 0, "delta": text})

    def closing(self, finish: Finish) -> str:
        last = {"type": "message_delta", "delta": _stop(finish), "usage": _usage(finish), "timings": finish.timings()}
        return named({"type": "content_block_stop", "index": 0}) + named(last) + named({"type": "message_stop"})

    def whole(self, delta: Delta, finish: Finish) -> dict[str, Any]:
        content = [{"type": "text", "text": delta.text}]
        told = {**self._message, "content": content, **_stop(finish), "usage": _usage(finish)}
        return {**told, "timings": finish.timings()}

    def failure(self, error: ApiError) -> str:
        return named(as_anthropic(error))


def _stop(finish: Finish) -> dict[str, Any]:
    if finish.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
    return {"stop_reason": "end_turn" if finish.reason == "stop" else "max_tokens", "stop_sequence": None}


def _usage(finish: Finish) -> dict[str, int]:
    return {"input_tokens": finish.num_prompt, "output_tokens": finish.num_output}


def messages_job(asked: MessagesRequest, engine: EngineConfig) -> Job:
    params = asked.sampling(engine, asked.max_tokens)
    return Job(asked.prompt(), params, stop_list(asked.stop_sequences))


MESSAGES = Protocol(MessagesRequest, messages_job, MessagesWriter)
