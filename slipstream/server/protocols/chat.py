"""Requests of `/v1/chat/completions`. Responses: chat_writer.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import Body
from slipstream.server.protocols.fields import Count, NoList, ShortText, TextPart, TopLogprobs, text_of
from slipstream.server.protocols.openai_fields import (
    ConversationFields,
    Effort,
    Function,
    FunctionName,
    OpenAiSamplingFields,
    call_for_template,
)
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt
from slipstream.server.text.tools import MAX_TOOLS, ToolUse, tool_use

RESERVED = ("messages", "tools", "add_generation_prompt")  # template variables that the server sets


class CalledFunction(Body):
    name: ShortText
    arguments: str


class ToolCall(Body):
    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # sent back by clients that keep our stream's chunks


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: ShortText | None = None
    tool_call_id: ShortText | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    reasoning_content: str | None = None
    # Fields of our own responses, which clients send back.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: NoList | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ApiError(400, f"{where}.content is required", param=f"{where}.content")
        if self.tool_calls and self.role != "assistant":
            raise ApiError(
                400, f"{where}.tool_calls: only messages of the assistant may have them", param=f"{where}.tool_calls"
            )
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [
                call_for_template(call.id, call.function.name, call.function.arguments, f"{where}.tool_calls.{i}")
                for i, call in enumerate(self.tool_calls or ())
            ],
        }
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text_of(self.content or ""), **{k: v for k, v in optional.items() if v}}


def for_template(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [message.for_template(f"messages.{i}") for i, message in enumerate(messages)]


class ChatTool(Body):
    type: Literal["function"]
    function: Function


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(OpenAiSamplingFields, ConversationFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[ShortText, bool | int | float | str | None], Field(max_length=16)] | None = (
        None
    )
    # Not supported.
    functions: NoList | None = None
    function_call: Literal["none", "auto"] | None = None
    verbosity: Literal["medium"] | None = None
    modalities: list[Literal["text"]] | None = None

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or "auto"
        named = choice.function.name if isinstance(choice, NamedTool) else None
        tools = [tool.function.tool() for tool in self.tools or ()]
        return tool_use(
            tools, choice if isinstance(choice, str) else "auto", named, self.parallel_tool_calls is not False
        )

    def variables(self) -> dict[str, Any]:
        """Template variables: the client's own, and those that switch thinking on or off."""
        given = dict(self.chat_template_kwargs or {})
        if taken := [name for name in given if name in RESERVED]:
            raise ApiError(400, f"chat_template_kwargs.{taken[0]} is set by the server", param="chat_template_kwargs")
        return thinking_variables(self.reasoning_effort) | given

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def thinking_variables(effort: Effort | None) -> dict[str, Any]:
    return {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}


def chat_generation_request(request: ChatRequest, engine: EngineConfig) -> GenerationRequest:
    max_tokens = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    return GenerationRequest(
        ChatPrompt(for_template(request.messages), request.variables()),
        tools=request.tool_use(),
        thinking_budget=request.thinking_budget,
        **request.generation_fields(engine, max_tokens, logprobs=request.num_logprobs()),
    )
