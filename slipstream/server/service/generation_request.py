"""A generation request, independent of the protocol it came in."""

from __future__ import annotations

from dataclasses import dataclass

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
    must_think: bool = False  # refuse the request if the model cannot think
    echo: bool = False  # the answer's text begins with the prompt's
