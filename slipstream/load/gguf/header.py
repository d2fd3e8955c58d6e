"""The header of a GGUF file: its metadata and where each tensor lies, every length checked against the file's size.

Our own reader, because the gguf package's one takes seconds on a large vocabulary and can loop on a damaged file.
Knows no model: keys and names are those of the file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from slipstream.errors import CorruptFile, UnknownModel
from slipstream.load.mapped_file import map_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
TENSOR_TYPES = {
    int(GGMLQuantizationType[name]): name
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]  # rows first; the file has them reversed
    start: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    # [file size]
    data: np.ndarray


class _Cursor:
    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.view = data.data
        self.at = 0

    def skip(self, length: int) -> int:
        """Move on by `length` bytes; returns where they start."""
        start = self.at
        if length > len(self.view) - start:
            raise CorruptFile(f"{self.path} ends after {len(self.view)} bytes, inside its header: it is truncated.")
        self.at = start + length
        return start

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self.view, self.skip(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self.view, self.skip(8))[0])

    def string(self) -> str:
        length = self.u64()
        start = self.skip(length)
        # Vocabularies may hold byte sequences that are not UTF-8 by themselves.
        return str(self.view[start : self.at], "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(self.u32(), self.u64())
        return self._scalars(kind, 1)[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind != STRING:
            return self._scalars(kind, count)
        return [self.string() for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise CorruptFile(f"{self.path} has a metadata value of unknown type {kind} near byte {self.at}.")
        dtype = SCALARS[kind]
        start = self.skip(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self.view, dtype, count, start).tolist()
        return values


def read_header(path: Path) -> GgufHeader:
    data = map_file(path)
    if data[:4].tobytes() != MAGIC:
        raise CorruptFile(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'.")
    cursor = _Cursor(path, data)
    cursor.skip(4)
    if (version := cursor.u32()) not in VERSIONS:
        raise UnknownModel(f"{path} is GGUF of version {version} (or of another byte order), only 2 and 3 can be read.")
    num_tensors, num_values = cursor.u64(), cursor.u64()
    metadata = _read_metadata(cursor, num_values)
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    alignment = _alignment(path, metadata)
    base = -(-cursor.at // alignment) * alignment
    return GgufHeader(path, metadata, _locate_tensors(path, infos, base, len(data)), data)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise CorruptFile(f"{cursor.path} has the metadata key {key!r} twice.")
        metadata[key] = cursor.value(cursor.u32())
    return metadata


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise CorruptFile(f"{path}: general.alignment should be a power of two from 8 on, it is {alignment!r}.")
    return alignment


def _read_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """name, shape with rows first, type, offset from the start of the data."""
    name, num_dims = cursor.string(), cursor.u32()
    if not 1 <= num_dims <= 4:
        raise CorruptFile(f"{cursor.path}: tensor {name!r} claims {num_dims} dimensions, expected 1 to 4.")
    shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
    return name, shape, cursor.u32(), cursor.u64()


def _locate_tensors(
    path: Path, infos: list[tuple[str, tuple[int, ...], int, int]], base: int, size: int
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise CorruptFile(f"{path} has the tensor {name!r} twice.")
        tensors[name] = _locate(path, name, shape, kind, base + offset, size)
    return tensors


def _locate(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int, size: int) -> GgufTensor:
    if kind not in TENSOR_TYPES:
        known = ", ".join(TENSOR_TYPES.values())
        raise UnknownModel(f"{path}: tensor {name!r} is of type {_type_name(kind)}, only {known} can be read.")
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape[-1] % block or math.prod(shape) == 0:
        raise CorruptFile(
            f"{path}: tensor {name!r} of shape {list(shape)} cannot be made of {TENSOR_TYPES[kind]} blocks."
        )
    num_bytes = math.prod(shape) // block * block_bytes
    if start % 8 or start + num_bytes > size:
        raise CorruptFile(f"{path} has {size} bytes, tensor {name!r} needs {start} to {start + num_bytes}: truncated.")
    return GgufTensor(name, TENSOR_TYPES[kind], shape, start, num_bytes)


def _type_name(kind: int) -> str:
    names = {int(member): member.name for member in GGMLQuantizationType}
    return names.get(kind, str(kind))
