"""Fields that Ollama's chat and generate share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from slipstream.config import EngineConfig
from slipstream.grammar import JsonObject, JsonSchema
from slipstream.sampling import SamplingParams
from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import Body
from slipstream.server.protocols.fields import (
    MAX_TOKENS,
    Penalty,
    SamplingFields,
    Seed,
    Stops,
    Temperature,
    TopLogprobs,
    TopP,
    Unit,
    asks_to_think,
    stop_list,
)
from slipstream.server.protocols.known_fields import OLLAMA, OLLAMA_OPTIONS, SAMPLER_SETTINGS, SAMPLERS
from slipstream.server.protocols.structured import Schema, single_format


def _unless_false(value: bool | None) -> bool:
    return value is not False


def _no_images(value: list[Any]) -> list[Any]:
    if value:
        raise PydanticCustomError("images", "images cannot be read here, only text")
    return value


Streamed = Annotated[bool | None, AfterValidator(_unless_false)]
Images = Annotated[list[Any], AfterValidator(_no_images), WithJsonSchema({"type": "array", "maxItems": 0})]


class Options(Body):
    """Sampling parameters. Those about loading a model have no effect: it is loaded."""

    ignored = OLLAMA_OPTIONS | SAMPLER_SETTINGS
    neutral = SAMPLERS

    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: TopP | None = None
    min_p: Unit | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MAX_TOKENS)] | None = None  # below 1: up to the context limit
    repeat_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaFields(SamplingFields):
    ignored = SamplingFields.ignored | OLLAMA

    stream: Streamed = True
    options: Options | None = None
    format: Literal["", "json"] | Schema | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def variables(self) -> dict[str, Any]:
        """Template variables that switch thinking on or off."""
        if self.think is None:
            return {}
        level = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), **level}

    def params(self, engine: EngineConfig) -> SamplingParams:
        options = self.options or Options()
        limit = options.num_predict if options.num_predict is not None and options.num_predict > 0 else None
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        given = {name: value for name in names if (value := getattr(options, name)) is not None}
        return self.model_copy(update=given).sampling(
            engine,
            limit,
            repetition_penalty=options.repeat_penalty or self.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def generation_fields(self, engine: EngineConfig) -> dict[str, Any]:
        """The fields of a GenerationRequest that both have."""
        format = self.format
        spec = JsonSchema(format, lenient=True) if isinstance(format, dict) else JsonObject() if format else None
        return {
            "params": self.params(engine),
            "stops": stop_list(self.options.stop if self.options else None),
            "bad_words": tuple(self.bad_words or ()),
            "response_format": single_format({"format": spec, **self.structured()}),
            "must_think": asks_to_think(self.variables()),
            "cache": self.prompt_cache(),
        }


def refuse(field: str, instead: str) -> ApiError:
    return ApiError(400, f"{field} is not supported: {instead}", param=field)
