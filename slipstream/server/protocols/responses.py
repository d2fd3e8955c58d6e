"""Requests of `/v1/responses`, stateless: no response is stored. Responses: responses_writer.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.server.protocols.body import Body
from slipstream.server.protocols.chat import thinking_variables
from slipstream.server.protocols.fields import (
    Count,
    NoDict,
    NoList,
    OnlyFalse,
    SamplingFields,
    ShortText,
    TextPart,
    TopLogprobs,
    text_of,
)
from slipstream.server.protocols.openai_fields import ConversationFields, Effort, Function, call_for_template
from slipstream.server.protocols.structured import FlatFormat, Name, single_format
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt
from slipstream.server.text.tools import MAX_TOOLS, ToolUse, tool_use

Status = Literal["in_progress", "completed", "incomplete"]
LOGPROBS = "message.output_text.logprobs"


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    # Fields of our own output, which clients send back.
    id: ShortText | None = None
    status: Status | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Body):
    type: Literal["reasoning"]
    id: ShortText | None = None
    content: list[ReasoningText] | None = None
    summary: NoList | None = None
    encrypted_content: None = None
    status: Status | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        text = "".join(part.text for part in self.content or ())
        return {"role": "assistant", "content": "", "reasoning_content": text}


class InputCall(Body):
    type: Literal["function_call"]
    call_id: ShortText
    name: ShortText
    arguments: str
    id: ShortText | None = None
    status: Status | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        call = call_for_template(self.call_id, self.name, self.arguments, where)
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class InputResult(Body):
    type: Literal["function_call_output"]
    call_id: ShortText
    output: str | list[TextPart]
    id: ShortText | None = None
    status: Status | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        return {"role": "tool", "content": text_of(self.output), "tool_call_id": self.call_id}


InputItem = InputMessage | InputReasoning | InputCall | InputResult


class TextOptions(Body):
    format: FlatFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: Effort | None = None
    max_tokens: Count | None = None
    summary: Literal["auto"] | None = None  # there is no summary: the output has the reasoning itself


class ResponsesTool(Function):
    type: Literal["function"]


class NamedFunction(Body):
    type: Literal["function"]
    name: Name


class ResponsesRequest(SamplingFields, ConversationFields):
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    # Not supported.
    background: OnlyFalse | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    truncation: Literal["disabled"] | None = None
    stream_options: NoDict | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or "auto"
        named = choice.name if isinstance(choice, NamedFunction) else None
        tools = [tool.tool() for tool in self.tools or ()]
        return tool_use(
            tools, choice if isinstance(choice, str) else "auto", named, self.parallel_tool_calls is not False
        )

    def messages(self) -> list[dict[str, Any]]:
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        return [*system, *_merged(item.for_template(f"input.{i}") for i, item in enumerate(self.input))]


def _merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adjacent items of the assistant (reasoning, text, tool calls) merged to one message."""
    found: list[dict[str, Any]] = []
    for message in messages:
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
    return GenerationRequest(
        ChatPrompt(request.messages(), thinking_variables(reasoning.effort)),
        request.sampling(engine, request.max_output_tokens, logprobs=logprobs),
        bad_words=tuple(request.bad_words or ()),
        response_format=single_format({**format, **request.structured()}),
        tools=request.tool_use(),
        thinking_budget=reasoning.max_tokens or request.thinking_budget,
    )
