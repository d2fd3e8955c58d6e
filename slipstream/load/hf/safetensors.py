"""Memory-mapped safetensors: one file, or the shards of an index. Names are those of the file.

Every offset is checked against the file's size when it is opened; a tensor is read when it is asked for.
Knows no model.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from slipstream.errors import CorruptFile, LoadError, MissingTensor, UnknownModel
from slipstream.load.hf.instead import AGAIN, OTHER_TYPES
from slipstream.load.json_file import parse_json, read_json
from slipstream.load.mapped_file import MappedFile
from slipstream.load.tensor import NUMPY_TYPES, Place, RawTensor

# Parts of quantised matrices. "F8_E8M0": a power of two, as a byte.
PACKED_TYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}
STORED_TYPES = NUMPY_TYPES | PACKED_TYPES
EXTRA = ("*mtp*.safetensors", "*extra*.safetensors")  # files that an index may not name: heads
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def check_type(where: Path | str, name: str, entry: Entry) -> None:
    if entry.dtype not in NUMPY_TYPES:
        known = ", ".join(NUMPY_TYPES)
        raise UnknownModel(
            f"{where}: tensor {name!r} is stored as {entry.dtype}, only {known} can be read: {OTHER_TYPES}."
        )


class TensorStore(Protocol):
    """Tensors under the names a file gives them."""

    path: Path

    def __iter__(self) -> Iterator[str]: ...

    def __contains__(self, name: object) -> bool: ...

    def entry(self, name: str) -> Entry: ...

    def get(self, name: str) -> RawTensor: ...

    def array(self, name: str) -> np.ndarray:
        """The elements of a tensor of any type that we read, also those that are no floats."""
        ...

    def place(self, name: str) -> Place: ...

    def mapped_files(self) -> list[MappedFile]: ...

    def release(self) -> None: ...


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self._entries = _read_header(path, self._file.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise MissingTensor(f"{self.path} has no tensor {name!r}.")
        return self._entries[name]

    def get(self, name: str) -> RawTensor:
        entry = self.entry(name)
        check_type(self.path, name, entry)
        return RawTensor(name, entry.dtype, entry.shape, self.array(name))

    def array(self, name: str) -> np.ndarray:
        entry = self.entry(name)
        if entry.dtype not in STORED_TYPES:
            raise UnknownModel(
                f"{self.path}: tensor {name!r} is stored as {entry.dtype}, which cannot be read: {OTHER_TYPES}."
            )
        dtype = STORED_TYPES[entry.dtype]
        # [bytes of the tensor]
        raw = self._file.part(entry.start, entry.stop)
        if entry.start % dtype.itemsize:
            raw = raw.copy()
        return raw.view(dtype).reshape(entry.shape)

    def place(self, name: str) -> Place:
        entry = self.entry(name)
        return Place(self.path, entry.start, entry.stop)

    def mapped_files(self) -> list[MappedFile]:
        return [self._file]

    def release(self) -> None:
        self._file.release()


class SafetensorsShards:
    """Several files of one checkpoint as one store."""

    def __init__(self, folder: Path, files: Iterable[SafetensorsFile], extra: Iterable[Path] = ()) -> None:
        """`extra`: files that no index names. What the others hold already is not taken from them."""
        self.path = folder
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in files:
            self._file_of |= dict.fromkeys(file, file)
        for path in extra:
            file = SafetensorsFile(path)
            self._file_of = dict.fromkeys(file, file) | self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise MissingTensor(f"{self.path} has no tensor {name!r}.")
        return self._file_of[name]

    def entry(self, name: str) -> Entry:
        return self._file(name).entry(name)

    def get(self, name: str) -> RawTensor:
        return self._file(name).get(name)

    def array(self, name: str) -> np.ndarray:
        return self._file(name).array(name)

    def place(self, name: str) -> Place:
        return self._file(name).place(name)

    def mapped_files(self) -> list[MappedFile]:
        files = {file.path: file for file in self._file_of.values()}
        return [mapped for path in sorted(files) for mapped in files[path].mapped_files()]

    def release(self) -> None:
        for file in set(self._file_of.values()):
            file.release()


def open_folder(folder: Path) -> TensorStore:
    """The weights of a Hugging Face folder: the index's shards, or the only safetensors file there is; and heads in
    files beside them."""
    if (folder / SINGLE_NAME).exists():
        first = [SafetensorsFile(folder / SINGLE_NAME)]
    elif (folder / INDEX_NAME).exists():
        first = open_shards(folder / INDEX_NAME)
    else:
        first = [_only_file(folder)]
    extra = _files_beside(folder, {file.path for file in first})
    return SafetensorsShards(folder, first, extra) if extra or len(first) > 1 else first[0]


def open_shards(index: Path) -> list[SafetensorsFile]:
    """All that the index names, each tensor where it says."""
    wanted = _read_index(index)
    files = {shard: _open_shard(index, shard) for shard in sorted(set(wanted.values()))}
    held: set[str] = set()
    for shard, file in files.items():
        for name in file:
            if name in held or wanted.get(name, shard) != shard:
                raise CorruptFile(
                    f"{file.path} holds tensor {name!r}, which belongs to another shard of the index: {AGAIN}."
                )
            held.add(name)
    for name, shard in wanted.items():
        if name not in held:
            raise CorruptFile(f"{index} places tensor {name!r} in {shard}, which does not hold it: {AGAIN}.")
    return list(files.values())


def _files_beside(folder: Path, known: set[Path]) -> list[Path]:
    return sorted({path for pattern in EXTRA for path in folder.glob(pattern)} - known)


def _only_file(folder: Path) -> SafetensorsFile:
    found = sorted(folder.glob("*.safetensors"))
    others = [path for path in found if path not in _files_beside(folder, set())] or found
    if len(others) == 1:
        return SafetensorsFile(others[0])
    if found:
        raise LoadError(
            f"{folder} has {len(found)} safetensors files but no {INDEX_NAME} that says what they hold: fetch it, too."
        )
    raise LoadError(
        f"{folder} has no safetensors weights, {SINGLE_NAME} or {INDEX_NAME}: take a folder that has them, or a GGUF."
    )


def _read_header(path: Path, data: np.ndarray) -> dict[str, Entry]:
    if len(data) < 8:
        raise CorruptFile(f"{path} is {len(data)} bytes long, too short for a safetensors file: {AGAIN}.")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > len(data) - 8:
        raise CorruptFile(
            f"{path} claims a header of {length} bytes but has {len(data)} in all, truncated or damaged: {AGAIN}."
        )
    header = parse_json(data[8 : 8 + length].tobytes(), f"The header of {path}")
    header.pop("__metadata__", None)
    return {name: _read_entry(path, name, value, 8 + length, len(data)) for name, value in header.items()}


def _read_entry(path: Path, name: str, value: Any, base: int, size: int) -> Entry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise CorruptFile(
            f"{path}: the header entry of tensor {name!r} lacks a proper dtype, shape or data_offsets: {AGAIN}."
        )
    entry = Entry(dtype, tuple(shape), base + offsets[0], base + offsets[1])
    if entry.start > entry.stop or entry.stop > size:
        raise CorruptFile(
            f"{path} has {size} bytes, tensor {name!r} needs up to byte {entry.stop}, so it is truncated: {AGAIN}."
        )
    if dtype in STORED_TYPES and entry.num_bytes != math.prod(shape) * STORED_TYPES[dtype].itemsize:
        raise CorruptFile(
            f"{path}: tensor {name!r} of type {dtype} and shape {shape} has the wrong number of bytes: {AGAIN}."
        )
    return entry


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFile(f"{index} should have a 'weight_map' from tensor names to shards: {AGAIN}.")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CorruptFile(f"{index} names a shard {shard!r}, which is not a file name: {AGAIN}.")
    return weight_map


def _open_shard(index: Path, shard: str) -> SafetensorsFile:
    path = index.parent / shard
    if not path.exists():
        raise LoadError(f"{index} names the shard {shard}, which is missing from the folder: {AGAIN}.")
    return SafetensorsFile(path)
