"""A generation request, independent of the protocol it came in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.engine.request import DEFAULT_CACHE, PromptCache
from slipstream.sampling import SamplingParams
from slipstream.server.service.prompts import Prompt
from slipstream.server.text.response_format import ResponseFormat
from slipstream.server.text.tools import NO_TOOLS, ToolUse


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    prompt: Prompt
    params: SamplingParams  # without bad words and constraint: prepare.py adds them, with the tokenizer
    stops: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    num_choices: int = 1
    response_format: ResponseFormat | None = None
    tools: ToolUse = NO_TOOLS
    thinking_budget: int | None = None  # tokens
    must_think: bool = False  # warn if the model cannot think
    echo: bool = False  # the answer's text begins with the prompt's
    further_prompts: tuple[Prompt, ...] = ()  # answered in the same response, each with as many choices
    cache: PromptCache = DEFAULT_CACHE  # without boundaries and the caller's key: prepare.py and service.py add them
    warnings: tuple[str, ...] = ()  # what this server leaves out of the request

    def by_prompt(self) -> list[GenerationRequest]:
        return [replace(self, prompt=prompt, further_prompts=()) for prompt in (self.prompt, *self.further_prompts)]
