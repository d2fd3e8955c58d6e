"""Requests of `/v1/messages` and `/v1/messages/count_tokens`. Responses: writer.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.grammar import JsonSchema, Spec
from slipstream.sampling import SamplingParams
from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import Body, Items, SomeItems
from slipstream.server.protocols.fields import (
    MAX_STOPS,
    Content,
    Count,
    SamplingFields,
    ShortText,
    StopText,
    TextPart,
    left_out,
    stop_list,
    text_of,
)
from slipstream.server.protocols.known_fields import ANY_PROTOCOL, CACHE, MESSAGES, PART, THINKING, TOOL
from slipstream.server.protocols.structured import Name, Schema, single_format
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt, chat_prompt
from slipstream.server.text.tools import MAX_TOOLS, Mode, Tool, ToolUse, tool_use

BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
TOOL_CHOICES: dict[str, Mode] = {"auto": "auto", "any": "required", "none": "none", "tool": "auto"}


class ToolReference(Body):
    """The result of a search for tools."""

    ignored = PART

    type: Literal["tool_reference"]
    tool_name: ShortText

    @property
    def text(self) -> str:
        return f"{self.tool_name}\n"


ResultPart = Annotated[TextPart | ToolReference, Field(discriminator="type")]


class ToolResultBlock(Body):
    ignored = PART

    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: str | Items[ResultPart] | None = None
    is_error: bool | None = None


class ToolUseBlock(Body):
    ignored = PART | {"caller"}

    type: Literal["tool_use"]
    id: ShortText
    name: ShortText
    input: dict[str, Any]


class ThinkingBlock(Body):
    ignored = PART | {"signature"}

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Of another server: its thinking cannot be read."""

    ignored = PART | {"data"}

    type: Literal["redacted_thinking"]


Block = TextPart | ToolResultBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class Message(Body):
    ignored = PART

    role: Literal["user", "assistant", "system"]
    content: str | Items[Annotated[Block, Field(discriminator="type")]]

    def for_template(self, where: str) -> list[dict[str, Any]]:
        blocks: list[Block] = []
        blocks += [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        if self.role == "system":
            return [{"role": "system", "content": text_of([b for b in blocks if isinstance(b, TextPart)])}]
        thoughts = (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock)
        foreign = thoughts if self.role == "user" else (ToolResultBlock,)
        for i, block in enumerate(blocks):
            if isinstance(block, foreign):
                raise ApiError(
                    400, f"{where}.content.{i}: a message of the {self.role} may not have {block.type}", param=where
                )
        return _user(blocks) if self.role == "user" else [_assistant(blocks)]


def _user(blocks: list[Block]) -> list[dict[str, Any]]:
    """One message per tool result, and one for each text between them. Of no blocks, an empty one."""
    found: list[dict[str, Any]] = [] if blocks else [{"role": "user", "content": ""}]
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            found.append({"role": "tool", "content": text_of(block.content or ""), "tool_call_id": block.tool_use_id})
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
    ignored = THINKING

    type: Literal["disabled"]


class ThinkingEnabled(Body):
    ignored = THINKING

    type: Literal["enabled", "adaptive"]
    budget_tokens: Count | None = None


class MessagesTool(Body):
    """A tool that the client runs. Tools that a server would run have another type; they are left out."""

    ignored = TOOL

    type: ShortText | None = None
    name: Name
    description: str | None = None
    input_schema: Schema | None = None

    @property
    def ours(self) -> bool:
        return self.type in (None, "custom")

    def tool(self, where: str) -> Tool:
        if self.input_schema is None:
            raise ApiError(400, f"{where}.input_schema is required", param=f"{where}.input_schema")
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
    ignored = frozenset({"effort"})

    format: SchemaOutput | None = None


def system_text(system: Content) -> str:
    """Without the line about billing that Claude Code puts first: it changes with every request, and with it the
    beginning of every prompt."""
    first, *others = [system] if isinstance(system, str) else [part.text for part in system] or [""]
    return "".join((BILLING_LINE.sub("", first), *others))


class CountTokensRequest(Body):
    """The fields that determine the prompt."""

    ignored = ANY_PROTOCOL | CACHE | {"betas", "inference_geo", "speed"}
    neutral = MESSAGES

    model: ShortText | None = None
    messages: SomeItems[Message]
    system: Content | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingEnabled | ThinkingDisabled, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaOutput | None = None  # an older name of output_config.format

    def prompt(self) -> ChatPrompt:
        messages = [] if self.system is None else [{"role": "system", "content": system_text(self.system)}]
        for i, message in enumerate(self.messages):
            messages += message.for_template(f"messages.{i}")
        variables = {"enable_thinking": isinstance(self.thinking, ThinkingEnabled)}
        return chat_prompt(messages, variables, continued=self.messages[-1].role == "assistant")

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = [tool.tool(f"tools.{i}") for i, tool in enumerate(self.tools or ()) if tool.ours]
        named = choice.name if isinstance(choice, NamedToolChoice) else None
        return tool_use(tools, TOOL_CHOICES[choice.type], named, not choice.disable_parallel_tool_use)

    def generation_request(
        self, params: SamplingParams, specs: Mapping[str, Spec | None], **more: Any
    ) -> GenerationRequest:
        """``specs``: response formats from other fields."""
        thinking = self.thinking if isinstance(self.thinking, ThinkingEnabled) else None
        format = (self.output_config.format if self.output_config else None) or self.output_format
        own = {} if format is None else {"output_config.format.schema": JsonSchema(format.schema_)}
        return GenerationRequest(
            self.prompt(),
            params,
            response_format=single_format({**own, **specs}),
            tools=self.tool_use(),
            thinking_budget=thinking.budget_tokens if thinking else None,
            must_think=thinking is not None and thinking.type == "enabled",
            warnings=left_out((i, tool.type, tool.name) for i, tool in enumerate(self.tools or ()) if not tool.ours),
            **more,
        )


class MessagesRequest(CountTokensRequest, SamplingFields):
    ignored = CountTokensRequest.ignored | SamplingFields.ignored
    neutral = MESSAGES | SamplingFields.neutral

    max_tokens: Count
    stop_sequences: Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None


def messages_generation_request(request: MessagesRequest, engine: EngineConfig) -> GenerationRequest:
    return request.generation_request(
        request.sampling(engine, request.max_tokens),
        request.structured(),
        stops=stop_list(request.stop_sequences),
        bad_words=tuple(request.bad_words or ()),
        cache=request.prompt_cache(),
    )
