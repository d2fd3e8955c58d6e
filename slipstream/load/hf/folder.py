"""A Hugging Face folder as a Checkpoint: config.json for the shape, safetensors for the tensors.

Owns the mapping from the names on disk to the canonical ones; the vision tower of a multimodal folder is hidden.
A matrix that is stored as several tensors is one here. The stored types decide, not config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFile, LoadError, MissingTensor, UnknownModel
from slipstream.load.hf.beside import check_beside
from slipstream.load.hf.config import quantisation, spec_from_config
from slipstream.load.hf.instead import AGAIN, OTHER_TYPES
from slipstream.load.hf.joined_projections import Part, parts_of_joined
from slipstream.load.hf.packed.family import Family, Hints, families
from slipstream.load.hf.packed.integers import Stored
from slipstream.load.hf.packed.stored import stored
from slipstream.load.hf.safetensors import TensorStore, open_folder
from slipstream.load.json_file import read_json, read_json_if_there
from slipstream.load.mapped_file import MappedFile
from slipstream.load.shapes import check_model, model_shapes, stored_experts
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import FP8_TYPES, Place, RawTensor

# On disk -> canonical; None hides the tensor. The first prefix that fits decides.
PREFIXES: tuple[tuple[str, str | None], ...] = (
    ("model.language_model.mtp.", "mtp."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.mtp.", "mtp."),
    ("model.mtp.", "mtp."),
    ("model.visual.", None),
    ("visual.", None),
)
# Where a quantised folder says how, besides config.json.
QUANTISATION_FILES = ("quantize_config.json", "quantization_config.json")
ZEROS_AS_THEY_ARE = ("gptq_v2", "gptq_p")
READ_METHODS = ("fp8", "awq", "gptq", "auto-round", "compressed-tensors", "modelopt")  # or names that begin so


class HfCheckpoint:
    def __init__(self, path: str, spec: ModelSpec, store: TensorStore, hints: Hints | None = None) -> None:
        self.path = path
        self.spec = spec
        self._store = store
        self._families = families(_canonical_names(store), path, store, hints or Hints())
        self._parts: dict[str, Part] = {}  # that another tensor holds, rows of several in turn
        if spec.gdn is not None:
            self._parts = parts_of_joined(self._families, spec.gdn)
        self._names = (self._families.keys() - {part.source for part in self._parts.values()}) | self._parts.keys()
        self._stored: dict[str, Stored] = {}

    def names(self) -> Iterable[str]:
        return (*(name for name in self._families if name in self._names), *self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def get(self, name: str) -> RawTensor:
        if (part := self._parts.get(name)) is None:
            return self._described(name).read()
        self._check_joined(part)
        return replace(self._described(part.source).read().rows(part.rows()), name=name)

    def shape(self, name: str) -> tuple[int, ...]:
        if (part := self._parts.get(name)) is None:
            return self._described(name).shape
        self._check_joined(part)
        return (part.num_rows, self._described(part.source).shape[1])

    def dtype(self, name: str) -> str:
        """As it is in the file where it cannot be read."""
        part = self._parts.get(name)
        source = name if part is None else part.source
        try:
            return self._described(source).dtype
        except LoadError:
            family = self._family(source)
            return family.entry(family.main).dtype

    def is_reordered(self, name: str) -> bool:
        """Whether `get(name).order` is there: act-order. Reads no more than the order."""
        part = self._parts.get(name)
        return self._described(name if part is None else part.source).order() is not None

    def num_bytes(self, name: str) -> int:
        if (part := self._parts.get(name)) is None:
            return self._family(name).num_bytes
        return self._family(part.source).num_bytes * part.num_rows // part.num_source_rows

    def places(self, name: str) -> list[Place]:
        part = self._parts.get(name)
        return self._family(name if part is None else part.source).places

    def check_beside(self, needed: Iterable[str]) -> None:
        """`needed`: what a model reads. Raises UnknownModel for a tensor beside that would change its results."""
        check_beside(self._families, (part.source if (part := self._parts.get(name)) else name for name in needed))

    def files(self) -> list[Path]:
        return [file.path for file in self._store.mapped_files()]

    def mapped_files(self) -> list[MappedFile]:
        return self._store.mapped_files()

    def release(self) -> None:
        self._store.release()

    def _family(self, name: str) -> Family:
        if name not in self._families:
            raise MissingTensor(f"{self.path} has no tensor {name!r}.")
        return self._families[name]

    def _described(self, name: str) -> Stored:
        """A folder that cannot be used is refused when it is opened: before its matrices are read."""
        found = self._stored.get(name)
        if found is None:
            found = self._stored[name] = stored(self._family(name))
        return found

    def _check_joined(self, part: Part) -> None:
        shape = self._described(part.source).shape
        if len(shape) != 2 or shape[0] != part.num_source_rows:
            raise MissingTensor(
                f"{self.path}: {part.source} is {list(shape)}, but this model needs {part.num_source_rows} rows: "
                f"{AGAIN}."
            )


def open_hf(folder: Path, name: str = "") -> HfCheckpoint:
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder.")
    config = folder / "config.json"
    fields = read_json(config)
    generation = read_json_if_there(folder / "generation_config.json")
    spec = spec_from_config(fields, generation, str(config), name or folder.resolve().name)
    quantised = _quantisation(folder, fields)
    checkpoint = HfCheckpoint(str(folder), spec, open_folder(folder), _hints(quantised))
    try:
        check_model(checkpoint)
    except MissingTensor as error:
        method = quantised.get("quant_method")
        if not isinstance(method, str) or method.startswith(READ_METHODS):
            raise
        raise UnknownModel(f"{folder} is quantised by {method!r}, which cannot be read: {OTHER_TYPES}.") from error
    checkpoint.check_beside(model_shapes(spec, partial(stored_experts, checkpoint)))
    checkpoint.spec = replace(spec, fp8=any(checkpoint.dtype(each) in FP8_TYPES for each in checkpoint.names()))
    return checkpoint


def read_hints(folder: Path) -> Hints:
    """Of a folder whose configuration may be missing."""
    return _hints(_quantisation(folder, read_json_if_there(folder / "config.json")))


def _quantisation(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a folder says about its quantisation; empty: nothing."""
    found = quantisation(config, str(folder / "config.json"))
    if found:
        return found
    return next((values for name in QUANTISATION_FILES if (values := read_json_if_there(folder / name))), {})


def _hints(quantised: Mapping[str, Any]) -> Hints:
    symmetric, packing = quantised.get("sym"), quantised.get("packing_format")
    as_they_are = quantised.get("checkpoint_format") in ZEROS_AS_THEY_ARE
    if quantised.get("quant_method") == "auto-round" and isinstance(packing, str):
        as_they_are = "gptq" not in packing
    return Hints(as_they_are, symmetric if isinstance(symmetric, bool) else None)


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
            raise CorruptFile(
                f"{store.path} holds both {name!r} and {on_disk[canonical]!r}, the same tensor twice: {AGAIN}."
            )
        on_disk[canonical] = name
    return on_disk
