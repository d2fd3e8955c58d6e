"""Requests of `/v1/responses`, stateless: no response is stored. Responses: responses_writer.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, WithJsonSchema

from slipstream.config import EngineConfig
from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import Body, Items, SomeItems
from slipstream.server.protocols.fields import Content, Limit, ShortText, TopLogprobs, asks_to_think, left_out, text_of
from slipstream.server.protocols.known_fields import RESPONSES, TOOL
from slipstream.server.protocols.openai.fields import (
    ConversationFields,
    Function,
    Reasoning,
    StreamOptions,
    call_for_template,
)
from slipstream.server.protocols.structured import FlatFormat, Name, Schema, single_format
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt
from slipstream.server.text.tools import MAX_TOOLS, Tool, ToolUse, tool_use

OWN_OUTPUT = frozenset({"cache_control", "id", "phase", "status"})  # most of them of our own output, sent back
NOTHING: dict[str, Any] = {"role": "assistant", "content": ""}
LOGPROBS = "message.output_text.logprobs"


class InputMessage(Body):
    ignored = OWN_OUTPUT

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def for_template(self, where: str) -> dict[str, Any]:
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}


class ReasoningText(Body):
    type: Literal["reasoning_text", "text"]
    text: str


class InputReasoning(Body):
    ignored = OWN_OUTPUT | {"encrypted_content", "summary"}

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        text = "".join(part.text for part in self.content or ())
        return {"role": "assistant", "content": "", "reasoning_content": text}


class InputCall(Body):
    ignored = OWN_OUTPUT

    type: Literal["function_call"]
    call_id: ShortText
    name: ShortText
    arguments: str

    def for_template(self, where: str) -> dict[str, Any]:
        call = call_for_template(self.call_id, self.name, self.arguments, where)
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class InputCustomCall(Body):
    """A call of a custom tool, by another server: its input is a text."""

    ignored = OWN_OUTPUT

    type: Literal["custom_tool_call"]
    call_id: ShortText
    name: ShortText
    input: str

    def for_template(self, where: str) -> dict[str, Any]:
        call = call_for_template(self.call_id, self.name, {"input": self.input}, where)
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class InputResult(Body):
    ignored = OWN_OUTPUT

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ShortText
    output: Content

    def for_template(self, where: str) -> dict[str, Any]:
        return {"role": "tool", "content": text_of(self.output), "tool_call_id": self.call_id}


ITEM_TYPES = {  # to the tag of its model
    "message": "message",
    "reasoning": "reasoning",
    "function_call": "function_call",
    "custom_tool_call": "custom_tool_call",
    "function_call_output": "result",
    "custom_tool_call_output": "result",
}


class OtherItem(Body):
    """An item of a tool that another server ran. It is left out."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[ShortText, WithJsonSchema({"type": "string", "maxLength": 512, "not": {"enum": list(ITEM_TYPES)}})]

    def for_template(self, where: str) -> dict[str, Any]:
        if self.type == "item_reference":
            raise ApiError(400, f"{where}: responses are not stored here, item_reference is not supported", param=where)
        return NOTHING


def _tag(item: Any) -> str:
    type = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return ITEM_TYPES.get(type, "other") if isinstance(type, str) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputResult, Tag("result")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_tag),
]


class TextOptions(Body):
    ignored = frozenset({"verbosity"})

    format: FlatFormat | None = None


class ResponsesTool(Body):
    """Only functions are offered to the model; tools of other types are left out."""

    ignored = TOOL

    type: ShortText
    name: ShortText | None = None
    description: str | None = None
    parameters: Schema | None = None

    @property
    def ours(self) -> bool:
        return self.type == "function"

    def tool(self, where: str) -> Tool:
        try:
            return Function.model_validate(self.model_dump(include={"name", "description", "parameters"})).tool()
        except ValidationError:
            raise ApiError(400, f"{where}.name must have 1 to 128 letters, digits or _.-", param=where) from None


class NamedFunction(Body):
    type: Literal["function"]
    name: Name


class ResponsesRequest(ConversationFields):
    neutral = ConversationFields.neutral | RESPONSES

    input: str | SomeItems[InputItem]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    text: TextOptions | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[ShortText], Field(fail_fast=True, max_length=64)] | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or "auto"
        named = choice.name if isinstance(choice, NamedFunction) else None
        tools = [tool.tool(f"tools.{i}") for i, tool in enumerate(self.tools or ()) if tool.ours]
        return tool_use(
            tools, choice if isinstance(choice, str) else "auto", named, self.parallel_tool_calls is not False
        )

    def messages(self) -> list[dict[str, Any]]:
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        return [*system, *_merged(item.for_template(f"input.{i}") for i, item in enumerate(self.input))]

    def warnings(self) -> tuple[str, ...]:
        tools = [(i, tool.type, tool.name) for i, tool in enumerate(self.tools or ()) if not tool.ours]
        items = self.input if isinstance(self.input, list) else []
        others = [(i, item.type) for i, item in enumerate(items) if isinstance(item, OtherItem)]
        return *left_out(tools), *(f"input.{i} ({type}) is left out: it is not supported" for i, type in others)


def _merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adjacent items of the assistant (reasoning, text, tool calls) merged to one message."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message == NOTHING:
            continue
        before = found[-1] if found else {"role": None}
        if not message["role"] == before["role"] == "assistant":
            found.append(dict(message))
            continue
        for key in ("content", "reasoning_content", "tool_calls"):
            if key in message:
                before[key] = before[key] + message[key] if key in before else message[key]
    return found


def responses_generation_request(request: ResponsesRequest, engine: EngineConfig) -> GenerationRequest:
    reasoning = request.reasoning or Reasoning()
    format = request.text.format.specs("text.format") if request.text and request.text.format else {}
    logprobs = (request.top_logprobs or 0) if request.wants_logprobs else None
    variables, budget = reasoning.variables(), reasoning.max_tokens or request.thinking_budget
    return GenerationRequest(
        ChatPrompt(request.messages(), variables),
        request.sampling(engine, request.max_output_tokens, logprobs=logprobs),
        bad_words=tuple(request.bad_words or ()),
        response_format=single_format({**format, **request.structured()}),
        tools=request.tool_use(),
        thinking_budget=budget,
        must_think=asks_to_think(variables, budget),
        warnings=request.warnings(),
        cache=request.prompt_cache(),
    )
