"""Fields that several protocols share, with their bounds.

Fields without effect are in known_fields.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from slipstream.config import EngineConfig
from slipstream.engine.request import PromptCache
from slipstream.errors import ParamsError
from slipstream.grammar import Spec
from slipstream.sampling import MAX_DEPTH, DraftSetting, SamplingParams
from slipstream.sampling.params import MAX_TOP_LOGPROBS
from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import Body, Items
from slipstream.server.protocols.known_fields import ANY_PROTOCOL, PART, SAMPLER_SETTINGS, SAMPLERS
from slipstream.server.protocols.structured import StructuredOutputs

MAX_TOKENS = 1 << 31
MAX_STOPS = 16
MAX_STOP_LENGTH = 512
MAX_BAD_WORDS = 256

ShortText = Annotated[str, Field(max_length=512)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKENS)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]  # as many as a body may have values
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
BiasedToken = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[dict[BiasedToken, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]
Limit = Count | Literal[-1]  # of tokens to generate; -1: none
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
BadWords = Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_BAD_WORDS)]
Metadata = dict[str, Any]


class Speculative(Body):
    """Speculative decoding of this request; absent fields keep the server's settings."""

    enabled: bool | None = None
    depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    p_min: Unit | None = None

    def setting(self, engine: EngineConfig) -> DraftSetting | None:
        if self.enabled is False:
            return "off"
        if self.depth is not None:
            if self.depth > engine.max_depth:
                raise ApiError(
                    400,
                    f"speculative.depth is {self.depth}, this server drafts at most {engine.max_depth} deep",
                    param="speculative.depth",
                )
            return self.depth
        return "adaptive" if self.enabled and engine.draft in ("off", 0) else None


class SamplingFields(Body):
    """The fields about sampling and drafting that every generating request has."""

    ignored = ANY_PROTOCOL | SAMPLER_SETTINGS
    neutral = SAMPLERS

    model: ShortText | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None  # 0, -1: all
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    seed: Seed | None = None  # -1: a fresh one
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    bad_words: BadWords | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative: Speculative | None = None
    cache: bool | None = None  # false: neither read nor write the prefix cache
    cache_prompt: bool | None = None  # llama.cpp's name of it
    cache_salt: ShortText | None = None  # only requests with the same one share what is cached

    def prompt_cache(self) -> PromptCache:
        return PromptCache(False not in (self.cache, self.cache_prompt), self.cache_salt or "")

    def sampling(self, engine: EngineConfig, max_tokens: int | None, **more: Any) -> SamplingParams:
        """``more``: parameters that only some protocols have. None means absent."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos", "min_tokens")
        given = {name: getattr(self, name) for name in names} | more
        given["top_k"] = None if self.top_k is None else max(0, self.top_k)
        given["seed"] = None if self.seed == -1 else self.seed
        spec = self.speculative or Speculative()
        try:
            return SamplingParams(
                max_tokens=None if max_tokens == -1 else max_tokens,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                draft=spec.setting(engine),
                p_min=spec.p_min,
                **engine.sampling_defaults.merged(given),
            )
        except ParamsError as error:
            raise ApiError(400, str(error), param=str(error).split()[0]) from error

    def structured(self) -> dict[str, Spec | None]:
        return {} if self.structured_outputs is None else self.structured_outputs.specs("structured_outputs")


def stop_list(stops: str | Iterable[str] | None) -> tuple[str, ...]:
    if stops is None:
        return ()
    return (stops,) if isinstance(stops, str) else tuple(dict.fromkeys(stops))


def asks_to_think(variables: Mapping[str, Any], budget: int | None = None) -> bool:
    """By the variables of the template and a budget: a warning for a model that cannot think."""
    enabled = variables.get("enable_thinking")
    return enabled is True or (enabled is None and budget is not None)


class TextPart(Body):
    """A text part of a message. Other kinds (images, audio, files) are refused by their type."""

    ignored = PART

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """Of an earlier answer, by another server."""

    ignored = PART

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


MessagePart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Content = str | Items[MessagePart]


class HasText(Protocol):
    @property
    def text(self) -> str: ...


def text_of(content: str | Sequence[HasText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def left_out(tools: Iterable[tuple[int, str | None, str | None]]) -> tuple[str, ...]:
    """Warnings about tools of types that cannot be offered to the model: index, type and name of each."""
    return tuple(
        f"tools.{i} ({type}{'' if name is None else f' {name}'}) is left out: only function tools are supported"
        for i, type, name in tools
    )
