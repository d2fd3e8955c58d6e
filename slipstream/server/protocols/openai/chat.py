"""Requests of `/v1/chat/completions`. Responses: chat_writer.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import Body, SomeItems
from slipstream.server.protocols.fields import (
    Content,
    Count,
    Limit,
    SamplingFields,
    ShortText,
    TopLogprobs,
    asks_to_think,
    left_out,
    text_of,
)
from slipstream.server.protocols.known_fields import CALL, CHAT, CHAT_ONLY, MESSAGE, THINKING, TOOL
from slipstream.server.protocols.openai.fields import (
    ConversationFields,
    Effort,
    Function,
    FunctionName,
    OpenAiSamplingFields,
    Reasoning,
    call_for_template,
    thinking_variables,
)
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt, chat_prompt
from slipstream.server.text.tools import MAX_TOOLS, Tool, ToolUse, tool_use

TemplateVariables = Annotated[dict[ShortText, bool | int | float | str | None], Field(max_length=16)]
RESERVED = ("messages", "tools", "add_generation_prompt")  # template variables that the server sets


class CalledFunction(Body):
    ignored = CALL

    name: ShortText
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    ignored = CALL

    id: ShortText | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    ignored = MESSAGE
    neutral = {"function_call": ()}  # noqa: RUF012 - never changed

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: ShortText | None = None
    tool_call_id: ShortText | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of reasoning_content

    def for_template(self, where: str) -> dict[str, Any]:
        if self.content is None and self.role != "assistant":
            raise ApiError(400, f"{where}.content is required", param=f"{where}.content")
        if self.tool_calls and self.role != "assistant":
            raise ApiError(
                400, f"{where}.tool_calls: only messages of the assistant may have them", param=f"{where}.tool_calls"
            )
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
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
    """Only functions are offered to the model; tools of other types are left out."""

    ignored = TOOL

    type: ShortText
    function: Function | None = None

    @property
    def ours(self) -> bool:
        return self.type == "function"

    def tool(self, where: str) -> Tool:
        if self.function is None:
            raise ApiError(400, f"{where}.function is required", param=f"{where}.function")
        return self.function.tool()


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ThinkingSwitch(Body):
    ignored = THINKING

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class ChatRequest(OpenAiSamplingFields, ConversationFields):
    ignored = SamplingFields.ignored | CHAT_ONLY
    neutral = OpenAiSamplingFields.neutral | CHAT

    messages: SomeItems[ChatMessage]
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[ChatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    chat_template_kwargs: TemplateVariables | None = None
    chat_template_args: TemplateVariables | None = None  # another name of chat_template_kwargs
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=8)] | None = None
    continue_final_message: bool | None = None  # false: a last message of the assistant is complete
    add_generation_prompt: bool | None = None

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or "auto"
        named = choice.function.name if isinstance(choice, NamedTool) else None
        tools = [tool.tool(f"tools.{i}") for i, tool in enumerate(self.tools or ()) if tool.ours]
        return tool_use(
            tools, choice if isinstance(choice, str) else "auto", named, self.parallel_tool_calls is not False
        )

    def prompt(self) -> ChatPrompt:
        continued = self.continue_final_message is not False and self.messages[-1].role == "assistant"
        if self.add_generation_prompt is False and not continued:
            raise ApiError(
                400,
                "add_generation_prompt may only be false if the last message is the assistant's, to be continued",
                param="add_generation_prompt",
            )
        return chat_prompt(for_template(self.messages), self.variables(), continued)

    def variables(self) -> dict[str, Any]:
        """Template variables: the client's own, and those that switch thinking on or off."""
        given = (self.chat_template_args or {}) | (self.chat_template_kwargs or {})
        if taken := [name for name in given if name in RESERVED]:
            raise ApiError(400, f"chat_template_kwargs.{taken[0]} is set by the server", param="chat_template_kwargs")
        enabled = self.enable_thinking if self.thinking is None else self.thinking.type != "disabled"
        switch = {} if enabled is None else {"enable_thinking": enabled}
        reasoning = self.reasoning or Reasoning()
        return switch | reasoning.variables() | thinking_variables(self.reasoning_effort) | given

    def budget(self) -> int | None:
        by_reasoning = self.reasoning.max_tokens if self.reasoning else None
        return self.thinking_budget or by_reasoning or (self.thinking.budget_tokens if self.thinking else None)

    @property
    def must_think(self) -> bool:
        adaptive = self.thinking is not None and self.thinking.type == "adaptive"
        return not adaptive and asks_to_think(self.variables(), self.budget())

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def chat_generation_request(request: ChatRequest, engine: EngineConfig) -> GenerationRequest:
    limits = (request.max_tokens, request.max_completion_tokens, request.n_predict)
    max_tokens = next((limit for limit in limits if limit is not None), None)
    others = [(i, tool.type, None) for i, tool in enumerate(request.tools or ()) if not tool.ours]
    return GenerationRequest(
        request.prompt(),
        tools=request.tool_use(),
        warnings=left_out(others),
        thinking_budget=request.budget(),
        must_think=request.must_think,
        **request.generation_fields(engine, max_tokens, logprobs=request.num_logprobs()),
    )
