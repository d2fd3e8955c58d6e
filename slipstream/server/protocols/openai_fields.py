"""Fields that OpenAI's protocols share: ignored ones, sampling, response formats, functions."""

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
    Metadata,
    OnlyFalse,
    Penalty,
    SamplingFields,
    ShortText,
    Stops,
    stop_list,
)
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
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class IgnoredFields(Body):
    """Fields that OpenAI's clients send and that have no effect here."""

    metadata: Metadata | None = None
    user: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    prompt_cache_options: Metadata | None = None
    safety_identifier: ShortText | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse | None = None


class ConversationFields(IgnoredFields):
    """Shared by chat and responses."""

    parallel_tool_calls: bool | None = None
    thinking_budget: Count | None = None  # tokens


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: OnlyFalse | None = None


class OpenAiSamplingFields(SamplingFields):
    """Shared by chat and completions."""

    stream_options: StreamOptions | None = None
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

    def generation_fields(self, engine: EngineConfig, max_tokens: int | None, **more: Any) -> dict[str, Any]:
        """The fields of a GenerationRequest that both have; ``more``: further sampling parameters."""
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        params = self.sampling(
            engine,
            max_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=bias or None,
            **more,
        )
        return {
            "params": params,
            "stops": stop_list(self.stop),
            "bad_words": tuple(self.bad_words or ()),
            "num_choices": self.n or 1,
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
                **self.structured(),
            }
        )

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Function(Body):
    """A tool, as in responses; chat nests it one level deeper."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None  # the schema of a required call is enforced either way

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {"type": "object", "properties": {}})


class FunctionName(Body):
    name: Name


def call_for_template(call_id: str | None, name: str, arguments: str, where: str) -> dict[str, Any]:
    """A tool call of an earlier turn; templates expect its arguments as an object."""
    try:
        read = strict_json(arguments or "{}")
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ApiError(400, f"{where}.arguments must be the text of a JSON object", param=f"{where}.arguments")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": read}}
