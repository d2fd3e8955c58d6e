"""A Hugging Face folder as a Checkpoint: config.json for the shape, safetensors for the tensors.

Owns the mapping from the names on disk to the canonical ones; the vision tower of a multimodal folder is hidden.
Joins an FP8 matrix with its scales, which are a tensor of their own. The stored types decide, not config.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from slipstream.errors import CorruptFile, LoadError, MissingTensor, UnknownModel
from slipstream.load.dequantize import dequantize
from slipstream.load.hf.config import spec_from_config
from slipstream.load.hf.safetensors import Entry, TensorStore, check_type, open_folder
from slipstream.load.json_file import read_json, read_json_if_there
from slipstream.load.shapes import check_model
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import FP8, FP8_GROUP, RawTensor

# On disk -> canonical; None hides the tensor. The first prefix that fits decides.
PREFIXES: tuple[tuple[str, str | None], ...] = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.visual.", None),
    ("visual.", None),
)
SCALE = "_scale_inv"  # after the name of an FP8 matrix: its scales. They multiply it, despite the name
SCALE_TYPES = ("BF16", "F32", "F16")


class HfCheckpoint:
    def __init__(self, path: str, spec: ModelSpec, store: TensorStore) -> None:
        self.path = path
        self.spec = spec
        self._store = store
        found = _canonical_names(store)
        self._on_disk = {name: stored for name, stored in found.items() if not name.endswith(SCALE)}
        # By the name of the matrix.
        self._scales = {name: found[name + SCALE] for name in self._on_disk if name + SCALE in found}

    def names(self) -> Iterable[str]:
        return self._on_disk.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._on_disk

    def get(self, name: str) -> RawTensor:
        self._check_stored(name)
        raw = replace(self._store.get(self._find(name)), name=name)
        return raw if raw.dtype != FP8 else replace(raw, scale=self._row_scales(name, raw.shape))

    def shape(self, name: str) -> tuple[int, ...]:
        self._check_stored(name)
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        return self._entry(name).dtype

    def num_bytes(self, name: str) -> int:
        scale = self._scales.get(name)
        return self._entry(name).num_bytes + (self._store.entry(scale).num_bytes if scale is not None else 0)

    def files(self) -> list[Path]:
        return self._store.files()

    def release(self) -> None:
        self._store.release()

    def _find(self, name: str) -> str:
        if name not in self._on_disk:
            raise MissingTensor(f"{self.path} has no tensor {name!r}.")
        return self._on_disk[name]

    def _entry(self, name: str) -> Entry:
        return self._store.entry(self._find(name))

    def _check_stored(self, name: str) -> None:
        """From the headers alone: a folder that cannot be used is refused when it is opened."""
        entry, scale = self._entry(name), self._scales.get(name)
        check_type(self.path, name, entry)
        if entry.dtype != FP8:
            if scale is not None:
                raise CorruptFile(f"{self.path}: {name} is stored as {entry.dtype}, but has FP8 scales beside it.")
        elif scale is None:
            raise MissingTensor(f"{self.path}: {name} is stored in FP8, but its scales, {name + SCALE!r}, are missing.")
        else:
            self._check_blocks(name, entry.shape, self._store.entry(scale))

    def _check_blocks(self, name: str, shape: tuple[int, ...], scale: Entry) -> None:
        if len(shape) < 2:
            raise CorruptFile(f"{self.path}: {name} is stored in FP8, but is no matrix: its shape is {list(shape)}.")
        *count, rows, columns = shape
        wanted = (*count, -(-rows // FP8_GROUP), -(-columns // FP8_GROUP))
        if scale.shape != wanted:
            raise CorruptFile(
                f"{self.path}: {name + SCALE} is {list(scale.shape)}, but {name}, {list(shape)} in FP8, "
                f"needs {list(wanted)}: a scale for each block of {FP8_GROUP} x {FP8_GROUP}."
            )
        if scale.dtype not in SCALE_TYPES:
            known = ", ".join(SCALE_TYPES)
            raise UnknownModel(f"{self.path}: {name + SCALE} is stored as {scale.dtype}, only {known} can be read.")

    def _row_scales(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A block's scale for each of its rows. float32 [*rows, groups]"""
        blocks = dequantize(self._store.get(self._scales[name]))
        return np.repeat(blocks, FP8_GROUP, axis=-2)[..., : shape[-2], :]


def open_hf(folder: Path, name: str = "") -> HfCheckpoint:
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder.")
    spec = read_spec(folder, name)
    checkpoint = HfCheckpoint(str(folder), spec, open_folder(folder))
    check_model(checkpoint)
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
