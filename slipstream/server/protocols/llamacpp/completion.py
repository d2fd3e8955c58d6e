"""Requests of llama.cpp's `/completion`: those of `/v1/completions` with its own prompts, biases and samplers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from slipstream.config import EngineConfig
from slipstream.sampling import SamplingParams
from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import MAX_NAME, Unknown
from slipstream.server.protocols.fields import MAX_TOKENS, Bias, ShortText, TokenId, TopLogprobs
from slipstream.server.protocols.openai.completions import MAX_PROMPTS
from slipstream.server.protocols.openai.fields import OpenAiSamplingFields
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import MixedPrompt, Prompt, TextPrompt

NEVER = -100.0  # the bias of a token that is to be left out
# By the sampler's name: what its parameters are where a request does not list it.
SWITCHED_OFF: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
LETTERS = {
    "a": "adaptive_p",
    "d": "dry",
    "e": "penalties",
    "i": "infill",
    "k": "top_k",
    "m": "min_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "t": "temperature",
    "x": "xtc",
    "y": "typ_p",
}
OTHER_NAMES = {
    "nucleus": "top_p",
    "temp": "temperature",
    "tfs": "tfs_z",
    "typ": "typ_p",
    "typical": "typ_p",
    "typical_p": "typ_p",
}
# llama.cpp has them too; here they are off unless a field asks for one, which is refused.
ALWAYS_OFF = frozenset({"adaptive_p", "dry", "infill", "tfs_z", "top_n_sigma", "typ_p", "xtc"})


def _as_bias(given: object) -> object:
    """[[token, bias], ...] as a dictionary; a bias of false leaves the token out."""
    if isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        given = {str(token): bias for token, bias in given}
    if not isinstance(given, dict):
        raise PydanticCustomError("bias", "neither an object nor a list of pairs of a token id and a number")
    return {token: NEVER if bias is False else bias for token, bias in given.items()}


_BIAS_VALUE = {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]}
_BIAS_SCHEMA = {
    "anyOf": [{"type": "object", "additionalProperties": _BIAS_VALUE}, {"type": "array", "items": {"type": "array"}}]
}
PairedBias = Annotated[Bias, BeforeValidator(_as_bias), WithJsonSchema(_BIAS_SCHEMA)]
Names = Annotated[list[ShortText], Field(fail_fast=True, max_length=64)]
TokensAndTexts = Annotated[list[str | TokenId], Field(fail_fast=True, min_length=1)]


class LlamaCompletionRequest(OpenAiSamplingFields):
    prompt: str | Annotated[list[str | TokenId | TokensAndTexts], Field(fail_fast=True, min_length=1)]
    n_predict: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None  # 0 means 1
    max_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None  # another name of it
    n_probs: TopLogprobs | None = None
    logit_bias: PairedBias | None = None
    samplers: Names | ShortText | None = None  # names, or a letter each; their order is the server's
    return_tokens: bool | None = None
    response_fields: Names | None = None

    def prompts(self) -> list[Prompt]:
        """Tokens mixed with texts are one prompt; several texts, or lists, are several prompts."""
        if isinstance(self.prompt, str):
            return [TextPrompt(self.prompt)]
        parts = [part for part in self.prompt if not isinstance(part, list)]
        if any(isinstance(part, int) for part in parts):
            if len(parts) < len(self.prompt):
                raise ApiError(400, "prompt: token ids and lists cannot stand side by side", param="prompt")
            return [MixedPrompt(parts)]
        if len(self.prompt) > MAX_PROMPTS:
            raise ApiError(400, f"prompt: at most {MAX_PROMPTS} prompts in one request", param="prompt")
        return [
            TextPrompt(each) if isinstance(each, str) else MixedPrompt(each)
            for each in self.prompt
            if not isinstance(each, int)
        ]

    @property
    def num_predict(self) -> int | None:
        """Tokens to generate; None: up to the context limit."""
        given = self.max_tokens if self.n_predict is None else self.n_predict
        return None if given == -1 else given

    def listed_samplers(self) -> dict[str, str]:
        """The samplers by the names, or letters, that the request gives them."""
        given = list(self.samplers or ())
        if isinstance(self.samplers, str):
            return {letter: LETTERS.get(letter, letter) for letter in given}
        plain = {name: name.replace("-", "_") for name in given}
        return {name: OTHER_NAMES.get(usual, usual) for name, usual in plain.items()}

    def unknown_values(self) -> Iterable[Unknown]:
        for given, sampler in self.listed_samplers().items():
            if sampler not in SWITCHED_OFF and sampler not in ALWAYS_OFF:
                yield Unknown("samplers", f"samplers: {given[:MAX_NAME]!r} is not a sampler this server knows")

    def without_samplers(self, params: SamplingParams) -> SamplingParams:
        """The parameters with those samplers switched off that the request does not list."""
        if self.samplers is None:
            return params
        listed = self.listed_samplers().values()
        missing = [values for name, values in SWITCHED_OFF.items() if name not in listed]
        return replace(params, **{name: value for values in missing for name, value in values.items()})


def llama_completion_generation_request(request: LlamaCompletionRequest, engine: EngineConfig) -> GenerationRequest:
    limit = None if request.num_predict is None else max(1, request.num_predict)
    fields = request.generation_fields(engine, limit, logprobs=request.n_probs or None)
    fields["params"] = request.without_samplers(fields["params"])
    first, *others = request.prompts()
    return GenerationRequest(first, further_prompts=tuple(others), **fields)
