"""Sampling parameters as llama.cpp reports them."""

from __future__ import annotations

from typing import Any

from slipstream.sampling import SamplingParams
from slipstream.server.protocols.fields import stop_list
from slipstream.server.protocols.known_fields import SAMPLERS
from slipstream.server.protocols.llamacpp.completion import LlamaCompletionRequest

SAMPLER_ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
# Samplers that this server does not have, switched off, and the settings of them that clients read.
OFF = ("dynatemp_range", "top_n_sigma", "xtc_probability", "typical_p", "dry_multiplier", "mirostat", "adaptive_target")
SETTINGS = {
    "dynatemp_exponent": 1.0,
    "xtc_threshold": 0.1,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
}


def sampling_settings(params: SamplingParams) -> dict[str, Any]:
    """``repeat_last_n`` -1: penalties look at the whole text."""
    limit = -1 if params.max_tokens is None else params.max_tokens
    return {
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "max_tokens": limit,
        "n_predict": limit,
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "samplers": list(SAMPLER_ORDER),
        "stream": False,
        "timings_per_token": False,
        "post_sampling_probs": False,
        "lora": [],
        **{name: SAMPLERS[name][0] for name in OFF},
        **SETTINGS,
    }


def request_settings(request: LlamaCompletionRequest, params: SamplingParams) -> dict[str, Any]:
    """``params``: the request's, the model's defaults included."""
    return {
        **sampling_settings(params),
        "stop": list(stop_list(request.stop)),
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
        "grammar": request.grammar or "",
        "stream": bool(request.stream),
        "timings_per_token": bool(request.timings_per_token),
    }
