"""`/v1/messages` and what `/v1/messages/count_tokens` takes. How it is answered: anthropic_writer.py."""

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
    Sampled,
    ShortText,
    StopText,
    TextPart,
    Unit,
    stop_list,
    text_of,
)
from slipstream.server.protocols.structured import Name, Schema, only_one
from slipstream.server.service.generation_request import Job
from slipstream.server.service.prompts import ChatPrompt
from slipstream.server.text.tools import MAX_TOOLS, Mode, Tool, ToolUse, tool_use

CHOICES: dict[str, Mode] = {"auto": "auto", "any": "required", "none": "none", "tool": "auto"}
CacheHint = dict[str, Any]  # about billing elsewhere


class ToolResult(Body):
    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: str | list[TextPart] | None = None
    is_error: bool | None = None
    cache_control: CacheHint | None = None


class UsedTool(Body):
    type: Literal["tool_use"]
    id: ShortText
    name: ShortText
    input: dict[str, Any]
    cache_control: CacheHint | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = TextPart | ToolResult | UsedTool | ThinkingBlock


class Message(Body):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(min_length=1)]

    def for_template(self, where: str) -> list[dict[str, Any]]:
        blocks: list[Block] = []
        blocks += [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        foreign = (UsedTool, ThinkingBlock) if self.role == "user" else (ToolResult,)
        for i, block in enumerate(blocks):
            if isinstance(block, foreign):
                raise ApiError(400, f"{where}.content.{i}: no {block.type} from the {self.role}", param=where)
        return _user(blocks) if self.role == "user" else [_assistant(blocks)]


def _user(blocks: list[Block]) -> list[dict[str, Any]]:
    """Each result is a message of its own; text between them another."""
    found: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResult):
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
        if isinstance(block, UsedTool)
    ]
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    told = {"tool_calls": calls, "reasoning_content": thought}
    text = text_of([block for block in blocks if isinstance(block, TextPart)])
    return {"role": "assistant", "content": text, **{key: value for key, value in told.items() if value}}


class NoThinking(Body):
    type: Literal["disabled"]


class SomeThinking(Body):
    type: Literal["enabled", "adaptive"]
    budget_tokens: Count | None = None


class MessagesTool(Body):
    """A client's own. Those that a server would run are refused by their type."""

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
    effort: Literal["low", "medium", "high", "max"] | None = None  # a hint that nothing here reads


class UserMetadata(Body):
    user_id: ShortText | None = None


class Counted(Body):
    """What decides about the prompt: all that count_tokens takes."""

    model: ShortText | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[TextPart] | None = None
    cache_control: CacheHint | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[SomeThinking | NoThinking, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None

    def prompt(self) -> ChatPrompt:
        messages = [] if self.system is None else [{"role": "system", "content": text_of(self.system)}]
        for i, message in enumerate(self.messages):
            messages += message.for_template(f"messages.{i}")
        return ChatPrompt(messages, {"enable_thinking": isinstance(self.thinking, SomeThinking)})

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = [tool.tool() for tool in self.tools or ()]
        named = choice.name if isinstance(choice, NamedToolChoice) else None
        return tool_use(tools, CHOICES[choice.type], named, not choice.disable_parallel_tool_use)

    def job(self, params: SamplingParams, specs: Mapping[str, Spec | None], **more: Any) -> Job:
        """``specs``: what else says what the answer looks like."""
        thinking = self.thinking if isinstance(self.thinking, SomeThinking) else None
        format = self.output_config.format if self.output_config else None
        own = {} if format is None else {"output_config.format.schema": JsonSchema(format.schema_)}
        return Job(
            self.prompt(),
            params,
            look=only_one({**own, **specs}),
            tools=self.tool_use(),
            thinking_budget=thinking.budget_tokens if thinking else None,
            must_think=thinking is not None and thinking.type == "enabled",
            **more,
        )


class MessagesRequest(Counted, Sampled):
    max_tokens: Count
    temperature: Unit | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    mcp_servers: NoList | None = None


def messages_job(asked: MessagesRequest, engine: EngineConfig) -> Job:
    return asked.job(
        asked.sampling(engine, asked.max_tokens),
        asked.structured(),
        stops=stop_list(asked.stop_sequences),
        bad_words=tuple(asked.bad_words or ()),
    )
