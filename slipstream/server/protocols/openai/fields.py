"""Fields that OpenAI's protocols share: sampling, response formats, reasoning, functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.grammar import Choice, Regex
from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import Body
from slipstream.server.protocols.fields import (
    Bias,
    Count,
    Limit,
    Metadata,
    Penalty,
    SamplingFields,
    Stops,
    stop_list,
)
from slipstream.server.protocols.known_fields import OUTPUT, SAMPLERS, STREAM_OPTIONS, TOOL
from slipstream.server.protocols.structured import (
    Format,
    Name,
    Options,
    Schema,
    grammar_spec,
    schema_spec,
    single_format,
)
from slipstream.server.text.json_text import strict_json
from slipstream.server.text.response_format import ResponseFormat
from slipstream.server.text.tools import Tool

MAX_CHOICES = 16
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(Body):
    """Of responses, and of OpenRouter's clients on chat."""

    ignored = frozenset({"exclude", "generate_summary", "summary"})  # the output has the reasoning itself

    effort: Effort | None = None
    max_tokens: Count | None = None
    enabled: bool | None = None

    def variables(self) -> dict[str, Any]:
        enabled = None if self.enabled is None else {"enable_thinking": self.enabled}
        return (enabled or {}) | thinking_variables(self.effort)


def thinking_variables(effort: Effort | None) -> dict[str, Any]:
    """Template variables."""
    return {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}


class ConversationFields(SamplingFields):
    """Shared by chat and responses."""

    metadata: Metadata | None = None  # repeated by responses
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    thinking_budget: Count | None = None  # tokens


class StreamOptions(Body):
    ignored = STREAM_OPTIONS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class UsageOptions(Body):
    """Of OpenRouter's clients."""

    include: bool | None = None


class OpenAiSamplingFields(SamplingFields):
    """Shared by chat and completions."""

    neutral = SAMPLERS | OUTPUT

    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    n_predict: Limit | None = None  # llama.cpp's max_tokens
    repeat_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None  # llama.cpp's repetition_penalty
    return_token_ids: bool | None = None
    timings_per_token: bool | None = None
    stop: Stops | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    return_origins: bool | None = None
    n: Choices | None = None
    response_format: Format | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Options | None = None
    guided_grammar: str | None = None
    grammar: str | None = None  # llama.cpp's guided_grammar
    json_schema: Schema | None = None  # llama.cpp's guided_json

    def generation_fields(self, engine: EngineConfig, max_tokens: int | None, **more: Any) -> dict[str, Any]:
        """The fields of a GenerationRequest that both have; ``more``: further sampling parameters."""
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        params = self.sampling(
            engine,
            max_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=bias or None,
            repetition_penalty=self.repetition_penalty or self.repeat_penalty,
            **more,
        )
        return {
            "params": params,
            "stops": stop_list(self.stop),
            "bad_words": tuple(self.bad_words or ()),
            "num_choices": self.n or 1,
            "cache": self.prompt_cache(),
            "response_format": self._response_format(),
        }

    def _response_format(self) -> ResponseFormat | None:
        guided = self.guided_json
        return single_format(
            {
                **({} if self.response_format is None else self.response_format.specs("response_format")),
                "guided_json": None if guided is None else schema_spec(guided, "guided_json"),
                "guided_regex": None if self.guided_regex is None else Regex(self.guided_regex),
                "guided_choice": None if self.guided_choice is None else Choice(self.guided_choice),
                "guided_grammar": None if self.guided_grammar is None else grammar_spec(self.guided_grammar),
                "grammar": grammar_spec(self.grammar) if self.grammar else None,
                "json_schema": None if self.json_schema is None else schema_spec(self.json_schema, "json_schema"),
                **self.structured(),
            }
        )

    @property
    def wants_usage(self) -> bool:
        options, usage = self.stream_options, self.usage
        return bool((options and options.include_usage) or (usage and usage.include))

    @property
    def wants_live_usage(self) -> bool:
        """Usage so far in every event of a stream."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class Function(Body):
    """A tool; chat nests it one level deeper."""

    ignored = TOOL

    name: Name
    description: str | None = None
    parameters: Schema | None = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {"type": "object", "properties": {}})


class FunctionName(Body):
    name: Name


def call_for_template(call_id: str | None, name: str, arguments: str | dict[str, Any], where: str) -> dict[str, Any]:
    """A tool call of an earlier turn; templates expect its arguments as an object."""
    try:
        read = strict_json(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ApiError(400, f"{where}.arguments must be the text of a JSON object", param=f"{where}.arguments")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": read}}
