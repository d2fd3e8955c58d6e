"""Requests of `/v1/messages` and `/v1/messages/count_tokens`. Responses: anthropic_writer.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.grammar import JsonSchema, Spec
from slipstream.sampling import SamplingParams
from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import Body
from slipstream.server.protocols.fields import (
    Count,
    NoList,
    SamplingFields,
    ShortText,
    StopText,
    TextPart,
    Unit,
    stop_list,
    text_of,
)
from slipstream.server.protocols.structured import Name, Schema, single_format
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt
from slipstream.server.text.tools import MAX_TOOLS, Mode, Tool, ToolUse, tool_use

TOOL_CHOICES: dict[str, Mode] = {"auto": "auto", "any": "required", "none": "none", "tool": "auto"}
CacheHint = dict[str, Any]  # ignored: about billing


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: str | list[TextPart] | None = None
    is_error: bool | None = None
    cache_control: CacheHint | None = None


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: ShortText
    name: ShortText
    input: dict[str, Any]
    cache_control: CacheHint | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = TextPart | ToolResultBlock | ToolUseBlock | ThinkingBlock


class Message(Body):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(min_length=1)]

    def for_template(self, where: str) -> list[dict[str, Any]]:
        blocks: list[Block] = []
        blocks += [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        foreign = (ToolUseBlock, ThinkingBlock) if self.role == "user" else (ToolResultBlock,)
        for i, block in enumerate(blocks):
            if isinstance(block, foreign):
                raise ApiError(
                    400, f"{where}.content.{i}: a message of the {self.role} may not have {block.type}", param=where
                )
        return _user(blocks) if self.role == "user" else [_assistant(blocks)]


def _user(blocks: list[Block]) -> list[dict[str, Any]]:
    """One message per tool result, and one for each text between them."""
    found: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text = text_of(block.content or "")
            found.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id})
        elif isinstance(block, TextPart):
            if not found or found[-1]["role"] != "user":
                found.append({"role": "user", "content": ""})
            found[-1]["content"] += block.text
    return found


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    optional = {"tool_calls": calls, "reasoning_content": thought}
    text = text_of([block for block in blocks if isinstance(block, TextPart)])
    return {"role": "assistant", "content": text, **{key: value for key, value in optional.items() if value}}


class ThinkingDisabled(Body):
    type: Literal["disabled"]


class ThinkingEnabled(Body):
    type: Literal["enabled", "adaptive"]
    budget_tokens: Count | None = None


class MessagesTool(Body):
    """A tool that the client runs. Tools that a server would run are refused by their type."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None
    cache_control: CacheHint | None = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema)


class ToolChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(Body):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class SchemaOutput(Body):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Body):
    format: SchemaOutput | None = None
    effort: Literal["low", "medium", "high", "max"] | None = None  # accepted and ignored


class UserMetadata(Body):
    user_id: ShortText | None = None


class CountTokensRequest(Body):
    """The fields that determine the prompt."""

    model: ShortText | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[TextPart] | None = None
    cache_control: CacheHint | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingEnabled | ThinkingDisabled, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None

    def prompt(self) -> ChatPrompt:
        messages = [] if self.system is None else [{"role": "system", "content": text_of(self.system)}]
        for i, message in enumerate(self.messages):
            messages += message.for_template(f"messages.{i}")
        return ChatPrompt(messages, {"enable_thinking": isinstance(self.thinking, ThinkingEnabled)})

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = [tool.tool() for tool in self.tools or ()]
        named = choice.name if isinstance(choice, NamedToolChoice) else None
        return tool_use(tools, TOOL_CHOICES[choice.type], named, not choice.disable_parallel_tool_use)

    def generation_request(
        self, params: SamplingParams, specs: Mapping[str, Spec | None], **more: Any
    ) -> GenerationRequest:
        """``specs``: response formats from other fields."""
        thinking = self.thinking if isinstance(self.thinking, ThinkingEnabled) else None
        format = self.output_config.format if self.output_config else None
        own = {} if format is None else {"output_config.format.schema": JsonSchema(format.schema_)}
        return GenerationRequest(
            self.prompt(),
            params,
            response_format=single_format({**own, **specs}),
            tools=self.tool_use(),
            thinking_budget=thinking.budget_tokens if thinking else None,
            must_think=thinking is not None and thinking.type == "enabled",
            **more,
        )


class MessagesRequest(CountTokensRequest, SamplingFields):
    max_tokens: Count
    temperature: Unit | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    mcp_servers: NoList | None = None


def messages_generation_request(request: MessagesRequest, engine: EngineConfig) -> GenerationRequest:
    return request.generation_request(
        request.sampling(engine, request.max_tokens),
        request.structured(),
        stops=stop_list(request.stop_sequences),
        bad_words=tuple(request.bad_words or ()),
    )
