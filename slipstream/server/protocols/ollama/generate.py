"""Requests of Ollama's `/api/generate`."""

from __future__ import annotations

from typing import Any

from slipstream.config import EngineConfig
from slipstream.server.protocols.ollama.fields import Images, OllamaFields, refuse
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt, Prompt, TextPrompt


class OllamaGenerateRequest(OllamaFields):
    prompt: str | None = None  # none: the model is to be loaded
    system: str | None = None
    raw: bool | None = None  # the prompt as it is, without a chat template
    images: Images | None = None
    # Not supported.
    suffix: str | None = None
    template: str | None = None
    context: list[Any] | None = None

    def as_prompt(self) -> Prompt:
        if self.suffix:
            raise refuse("suffix", "write the model's own tokens for filling in into the prompt, with raw: true")
        if self.template:
            raise refuse("template", "send the finished prompt, with raw: true")
        if self.context:
            raise refuse("context", "send the conversation to /api/chat")
        assert self.prompt
        if self.raw:
            if self.system:
                raise refuse("system", "with raw: true the prompt is all that the model sees")
            return TextPrompt(self.prompt)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return ChatPrompt([*system, {"role": "user", "content": self.prompt}], self.variables())


def ollama_generate_generation_request(request: OllamaGenerateRequest, engine: EngineConfig) -> GenerationRequest:
    return GenerationRequest(request.as_prompt(), **request.generation_fields(engine))
