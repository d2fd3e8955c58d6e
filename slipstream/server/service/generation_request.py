"""What a request asks for, whatever its protocol."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.sampling import SamplingParams
from slipstream.server.service.prompts import Prompt
from slipstream.server.text.response_format import ResponseFormat
from slipstream.server.text.tools import NO_TOOLS, ToolUse


@dataclass(frozen=True, slots=True)
class Job:
    prompt: Prompt
    params: SamplingParams  # what needs the tokenizer (words, grammars) is added when the job is prepared
    stops: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    num_choices: int = 1
    look: ResponseFormat | None = None  # what the answer has to be
    tools: ToolUse = NO_TOOLS
    thinking_budget: int | None = None  # tokens
    must_think: bool = False  # a model that cannot is an error
    echo: bool = False  # the prompt's text comes before the answer's
