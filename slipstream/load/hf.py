"""A Hugging Face folder as a Checkpoint: config.json for the shape, safetensors for the tensors.

Owns the mapping from the names on disk to the canonical ones; the vision tower of a multimodal folder is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from slipstream.errors import CorruptFile, LoadError, MissingTensor
from slipstream.load.hf_config import spec_from_config
from slipstream.load.json_file import read_json, read_json_if_there
from slipstream.load.safetensors import TensorStore, open_folder
from slipstream.load.shapes import check_trunk
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import RawTensor

# On disk -> canonical; None hides the tensor. The first prefix that fits decides.
PREFIXES: tuple[tuple[str, str | None], ...] = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.visual.", None),
    ("visual.", None),
)


class HfCheckpoint:
    def __init__(self, path: str, spec: ModelSpec, store: TensorStore) -> None:
        self.path = path
        self.spec = spec
        self._store = store
        self._on_disk = _canonical_names(store)

    def names(self) -> Iterable[str]:
        return self._on_disk.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._on_disk

    def get(self, name: str) -> RawTensor:
        return replace(self._store.get(self._find(name)), name=name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._store.entry(self._find(name)).shape

    def dtype(self, name: str) -> str:
        return self._store.entry(self._find(name)).dtype

    def num_bytes(self, name: str) -> int:
        entry = self._store.entry(self._find(name))
        return entry.stop - entry.start

    def release(self) -> None:
        self._store.release()

    def _find(self, name: str) -> str:
        if name not in self._on_disk:
            raise MissingTensor(f"{self.path} has no tensor {name!r}.")
        return self._on_disk[name]


def open_hf(folder: Path, name: str = "") -> HfCheckpoint:
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder.")
    spec = read_spec(folder, name)
    checkpoint = HfCheckpoint(str(folder), spec, open_folder(folder))
    check_trunk(checkpoint)
    return checkpoint


def read_spec(folder: Path, name: str = "") -> ModelSpec:
    config = folder / "config.json"
    generation = read_json_if_there(folder / "generation_config.json")
    return spec_from_config(read_json(config), generation, str(config), name or folder.resolve().name)


def canonical_name(name: str) -> str | None:
    for prefix, target in PREFIXES:
        if name.startswith(prefix):
            return None if target is None else target + name.removeprefix(prefix)
    return name


def _canonical_names(store: TensorStore) -> dict[str, str]:
    on_disk: dict[str, str] = {}
    for name in store:
        canonical = canonical_name(name)
        if canonical is None:
            continue
        if canonical in on_disk:
            raise CorruptFile(f"{store.path} holds both {name!r} and {on_disk[canonical]!r}, the same tensor twice.")
        on_disk[canonical] = name
    return on_disk
