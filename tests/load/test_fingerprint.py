"""The fingerprint of a model: the same for the same files anywhere, another one for whatever the caches depend on."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream.load.fingerprint as module
from slipstream.errors import LoadError
from slipstream.load import open_model
from slipstream.load.fingerprint import fingerprint
from slipstream.load.head import head_shapes
from slipstream.load.hf.any_folder import open_any
from slipstream.load.opened import OpenedModel
from slipstream.load.random.model import open_random


@pytest.fixture
def folder(tmp_path: Path, build: Any) -> Path:
    path: Path = build.llama_folder(tmp_path / "model")
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def of(path: Path, mtp: Path | None = None, **more: object) -> str:
    return fingerprint(open_model(str(path), None if mtp is None else str(mtp)), more)


def test_the_same_files_elsewhere_have_the_same_one(folder: Path, tmp_path: Path) -> None:
    there = Path(shutil.copytree(folder, tmp_path / "another name"))
    os.utime(there / "model.safetensors", (1, 1))
    assert of(folder) == of(folder) == of(there)
    assert len(of(folder)) == 64


def _weights(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "model.safetensors").write_bytes(data)


def _text(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text((path / name).read_text() + " ")


CHANGES = {
    "weights": _weights,
    "tokenizer": _text("tokenizer.json"),
    "template": _text("chat_template.jinja"),
    "configuration": _text("config.json"),
    "another template": lambda path: (path / "chat_template.json").write_text("{}"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(folder: Path, what: str) -> None:
    before = of(folder)
    CHANGES[what](folder)
    assert of(folder) != before


def test_more_is_seen(folder: Path) -> None:
    seen = {of(folder), of(folder, dtype="int8"), of(folder, dtype="int4"), of(folder, device="int8"), of(folder, n=1)}
    assert len(seen) == 5
    assert of(folder, a=1, b=2) == of(folder, b=2, a=1)


def test_the_head_is_seen(folder: Path, tmp_path: Path, build: Any) -> None:
    spec = open_model(str(folder)).spec
    tensors = {name: np.zeros(shape, dtype=np.float32) for name, shape in head_shapes(spec).items()}

    def written(name: str) -> Path:
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(build.safetensors_bytes({name: ("F32", array) for name, array in tensors.items()}))
        return path

    one = written("one")
    tensors["mtp.norm.weight"][3] = 1.0
    assert len({of(folder), of(folder, one), of(folder, written("two"))}) == 3


def test_a_gguf_file(tmp_path: Path, build: Any) -> None:
    one, same = build.gguf(tmp_path / "one.gguf"), build.gguf(tmp_path / "same.gguf")
    other = build.gguf(tmp_path / "other.gguf", metadata={"tokenizer.chat_template": "{{ messages }}"})
    quantized = build.gguf(tmp_path / "quantized.gguf", kind="Q8_0")
    assert of(one) == of(same)
    assert len({of(one), of(other), of(quantized)}) == 3


def test_metadata_of_any_length_count_as_a_whole(tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary is longer than the first megabyte: here the first bytes stand for that."""
    for name in ("END_BYTES", "PLACE_BYTES"):
        monkeypatch.setattr(module, name, 4)
    monkeypatch.setattr(module, "MAX_PLACES", 1)
    templates = ({"tokenizer.chat_template": text} for text in ("{{ messages }}", "{{ massages }}"))
    one, other = (build.gguf(tmp_path / f"{i}.gguf", metadata=each) for i, each in enumerate(templates))
    assert one.stat().st_size == other.stat().st_size
    assert of(one) != of(other)


def test_models_without_files() -> None:
    models = [open_random("tiny"), open_random("tiny-moe"), open_random("tiny", 300)]
    seen = {fingerprint(model, {}) for model in models}
    assert len(seen) == 3
    assert fingerprint(open_random("tiny"), {}) in seen
    assert fingerprint(open_random("tiny"), {"device": "cpu"}) not in seen
    without = replace(models[0], head=None, head_reason="none")
    assert fingerprint(without, {}) not in seen


def _large(folder: Path, build: Any, size: int) -> OpenedModel:
    """Weights of a type that only a runner knows, all zeros: a hole in the file."""
    header = {"model.w": {"dtype": "U32", "shape": [size // 4], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(build.config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(folder / "model.safetensors", 8 + len(text) + size)
    return OpenedModel("large", folder, open_any(folder), None, "")


def test_a_large_file_is_not_read_as_a_whole(tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _large(tmp_path / "large", build, 50 * 10**9)
    read, places = os.pread, []

    def watched(file: int, count: int, place: int) -> bytes:
        places.append((place, count))
        return read(file, count, place)

    monkeypatch.setattr(os, "pread", watched)
    before = fingerprint(model, {})
    assert sum(count for _, count in places) < 20 * 10**6
    at = [place for place, _ in places]
    assert max(after - place for place, after in pairwise(at)) < 13 * 10**6, "no large matrix lies between places"
    path = tmp_path / "large" / "model.safetensors"
    for place in (at[0] + 5000, at[1], at[2000] + 9, path.stat().st_size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        assert fingerprint(model, {}) != before, place
        before = fingerprint(model, {})


def test_a_file_that_is_gone(folder: Path) -> None:
    model = open_model(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model.safetensors cannot be read"):
        fingerprint(model, {})
