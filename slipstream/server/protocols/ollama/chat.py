"""Requests of Ollama's `/api/chat`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.server.protocols.body import Body, Items
from slipstream.server.protocols.fields import Content, ShortText
from slipstream.server.protocols.ollama.fields import Images, OllamaFields
from slipstream.server.protocols.openai.chat import ChatMessage
from slipstream.server.protocols.openai.fields import Function
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import chat_prompt
from slipstream.server.text.tools import MAX_TOOLS, tool_use


class OllamaMessage(ChatMessage):
    content: Content | None = ""
    thinking: str | None = None
    tool_name: ShortText | None = None
    images: Images | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        own = {"reasoning_content": self.thinking, "name": self.tool_name}
        return super().for_template(where) | {key: value for key, value in own.items() if value}


class OllamaTool(Body):
    type: ShortText | None = None
    function: Function


class OllamaChatRequest(OllamaFields):
    messages: Items[OllamaMessage] | None = None  # none: the model is to be loaded
    tools: Annotated[list[OllamaTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


def ollama_chat_generation_request(request: OllamaChatRequest, engine: EngineConfig) -> GenerationRequest:
    given = request.messages or []
    messages = [message.for_template(f"messages.{i}") for i, message in enumerate(given)]
    tools = [tool.function.tool() for tool in request.tools or ()]
    return GenerationRequest(
        chat_prompt(messages, request.variables(), continued=given[-1].role == "assistant"),
        tools=tool_use(tools, "auto", None, parallel=True),
        **request.generation_fields(engine),
    )
