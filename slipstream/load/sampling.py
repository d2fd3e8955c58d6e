"""The sampling that a model's files recommend: generation_config.json, or `general.sampling.*` of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import CorruptFile, ParamsError
from slipstream.load.json_file import read_json_if_there
from slipstream.sampling.defaults import NAMES, NEUTRAL, SamplingDefaults

GENERATION_CONFIG = "generation_config.json"
GGUF_PREFIX = "general.sampling."
GGUF_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}  # the others are called as ours


def sampling_from_folder(folder: Path) -> SamplingDefaults:
    path = folder / GENERATION_CONFIG
    config = read_json_if_there(path)
    found = {name: config.get(name) for name in NAMES}
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return _defaults(found, str(path), f"from the model's {GENERATION_CONFIG}")


def sampling_from_gguf(metadata: Mapping[str, Any], where: str) -> SamplingDefaults:
    values = {key.removeprefix(GGUF_PREFIX): value for key, value in metadata.items() if key.startswith(GGUF_PREFIX)}
    found = {GGUF_NAMES.get(key, key): value for key, value in values.items()}
    if values.get("penalty_last_n") == 0:  # the penalty looks back at no token
        found["repetition_penalty"] = None
    return _defaults({name: found.get(name) for name in NAMES}, where, "from the model's file")


def _defaults(found: dict[str, Any], where: str, source: str) -> SamplingDefaults:
    """Files write -1 or 0 for a top_k that is off, and a GGUF's numbers are float32."""
    values = {name: _number(value) for name, value in found.items() if value is not None}
    if isinstance(top_k := values.get("top_k"), int) and top_k < 0:
        values["top_k"] = 0
    if not values:
        return NEUTRAL
    try:
        return SamplingDefaults(**values, source=source)
    except ParamsError as error:
        raise CorruptFile(f"{where}: the sampling that it recommends cannot be used: {error}.") from error


def _number(value: Any) -> Any:
    """0.2 as float32 comes back as 0.200000003. The shortest decimal is meant."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
