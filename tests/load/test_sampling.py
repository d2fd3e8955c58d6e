"""The sampling that a model's files recommend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import CorruptFile
from slipstream.load import open_model
from slipstream.load.random.model import open_random
from slipstream.sampling import NEUTRAL, SamplingDefaults, SamplingParams

SOURCE = "from the model's generation_config.json"


def from_folder(folder: Path, build: Any, **generation: Any) -> SamplingDefaults:
    build.llama_folder(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return open_model(str(folder)).sampling_defaults


def from_gguf(path: Path, build: Any, **values: Any) -> SamplingDefaults:
    metadata = {f"general.sampling.{name}": value for name, value in values.items()}
    return open_model(str(build.gguf(path, metadata=metadata))).sampling_defaults


def test_a_folder(tmp_path: Path, build: Any) -> None:
    found = from_folder(
        tmp_path / "a", build, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0, repetition_penalty=1.05
    )
    assert found == SamplingDefaults(0.6, 20, 0.95, 0, 1.05, SOURCE)
    assert str(found) == f"temperature 0.6, top_k 20, top_p 0.95, min_p 0, repetition_penalty 1.05 ({SOURCE})"
    some = from_folder(tmp_path / "b", build, top_p=0.9, temperature=None, top_k=-1)
    assert some == SamplingDefaults(top_k=0, top_p=0.9, source=SOURCE)
    assert from_folder(tmp_path / "c", build, do_sample=False, temperature=0.7).temperature == 0.0
    assert from_folder(tmp_path / "d", build, eos_token_id=2) == NEUTRAL


def test_a_folder_without_the_file_and_a_shape_are_neutral(tmp_path: Path, build: Any) -> None:
    assert open_model(str(build.llama_folder(tmp_path / "a"))).sampling_defaults == NEUTRAL
    assert open_random("tiny").sampling_defaults == NEUTRAL
    assert str(NEUTRAL) == "temperature 1 (neutral)"


def test_a_gguf_file(tmp_path: Path, build: Any) -> None:
    found = from_gguf(tmp_path / "a.gguf", build, temp=0.2, top_k=40, top_p=0.9, min_p=0.05, penalty_repeat=1.1)
    assert found == SamplingDefaults(0.2, 40, 0.9, 0.05, 1.1, "from the model's file")
    off = from_gguf(tmp_path / "b.gguf", build, temp=0.2, penalty_repeat=1.1, penalty_last_n=0, mirostat=0)
    assert off == SamplingDefaults(0.2, source="from the model's file")
    assert from_gguf(tmp_path / "c.gguf", build) == NEUTRAL


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 7}, {"top_k": 1.5}, {"min_p": "0.1"}, {"repetition_penalty": 0}]
)
def test_values_that_cannot_be_used_are_named(tmp_path: Path, build: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(CorruptFile, match=rf"generation_config\.json: .*{next(iter(wrong))} must be"):
        from_folder(tmp_path / "a", build, **wrong)


def test_what_is_given_comes_before_the_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.3, top_k=5)
    merged = defaults.merged({"temperature": 0.0, "top_k": None, "seed": 4})
    assert SamplingParams(**merged) == SamplingParams(temperature=0.0, top_k=5, seed=4)
