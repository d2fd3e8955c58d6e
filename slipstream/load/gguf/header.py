"""The header of a GGUF file: its metadata and where each tensor lies, every length checked against the file's size.

Our own reader, because the gguf package's one takes seconds on a large vocabulary and can loop on a damaged file.
Knows no model: keys and names are those of the file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from slipstream.errors import CorruptFile, UnknownModel
from slipstream.load.fields import shown
from slipstream.load.mapped_file import MappedFile
from slipstream.load.quantized.gguf_blocks import BLOCK_TYPES
from slipstream.load.tensor import Place

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_NAME, MAX_KEY = 100, 65535  # bytes; llama.cpp allows 63 to the name of a tensor
TRUNCATED = "so it is truncated: fetch it again, or wait until all of it has come"
MAX_BROKEN = 1 << 16  # bytes of a text that is not UTF-8
MAX_SMALL, NUMBER_BYTES = 4096, 40  # a list of numbers: a short one, and what one takes in memory
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
# By number: name, columns of a block, its bytes.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2)}
TENSOR_TYPES |= {kind.number: (name, kind.columns, kind.num_bytes) for name, kind in BLOCK_TYPES.items()}
# Types of ik_llama.cpp alone, for messages. From 200 on it has those whose rows lie interleaved.
FORK_TYPES = {133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS"}
FORK_TYPES |= {137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K", 156: "IQ3_KS", 157: "IQ2_KL"}
FORK_TYPES |= {153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT", 158: "IQ1_KT"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]  # rows first; the file has them reversed
    place: Place
    file: MappedFile = field(repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        return self.place.stop - self.place.start

    @property
    def data(self) -> np.ndarray:
        """uint8 [bytes]"""
        return self.file.part(self.place.start, self.place.stop)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Of a file, or of all parts of a split one."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    files: tuple[MappedFile, ...]


class _Cursor:
    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.view = data.data
        self.at = 0

    def skip(self, length: int) -> int:
        """Move on by `length` bytes; returns where they start."""
        start = self.at
        if length > len(self.view) - start:
            raise CorruptFile(f"{self.path} ends after {len(self.view)} bytes, inside its header, {TRUNCATED}.")
        self.at = start + length
        return start

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self.view, self.skip(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self.view, self.skip(8))[0])

    def string(self) -> str:
        length = self.u64()
        start = self.skip(length)
        # Vocabularies may hold byte sequences that are not UTF-8 by themselves. A long one is no text at all, and would
        # take four times its bytes.
        try:
            return str(self.view[start : self.at], "utf-8", "strict" if length > MAX_BROKEN else "replace")
        except UnicodeDecodeError:
            raise CorruptFile(f"{self.path} has {length} bytes of no text at byte {start}: it is damaged.") from None

    def name(self, limit: int) -> str:
        """Of a value or a tensor, of at most so many bytes."""
        length = self.u64()
        if length > limit:
            raise CorruptFile(f"{self.path} has a name of {length} bytes at byte {self.at}: it is damaged.")
        return str(self.view[self.skip(length) : self.at], "utf-8", "replace")

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
        if count > MAX_SMALL and count * NUMBER_BYTES > len(self.view):
            raise CorruptFile(
                f"{self.path} has a list of {count} numbers at byte {start}, too many for a model its size."
            )
        values: list[Any] = np.frombuffer(self.view, dtype, count, start).tolist()
        return values


def is_gguf(path: Path) -> bool:
    """By its first bytes, whatever it is called."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # whoever opens it says why


def read_header(path: Path) -> GgufHeader:
    file = MappedFile(path)
    data = file.data
    if data[:4].tobytes() != MAGIC:
        raise CorruptFile(
            f"{path} does not start with the bytes 'GGUF': give a .gguf file, or a folder with config.json and "
            "*.safetensors."
        )
    cursor = _Cursor(path, data)
    cursor.skip(4)
    if (version := cursor.u32()) not in VERSIONS:
        raise UnknownModel(
            f"{path} is GGUF of version {version} (or of another byte order), and only 2 and 3 can be read: take a "
            "newer file of the model."
        )
    num_tensors, num_values = cursor.u64(), cursor.u64()
    metadata = _read_metadata(cursor, num_values)
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    alignment = _alignment(path, metadata)
    base = -(-cursor.at // alignment) * alignment
    return GgufHeader(path, metadata, _locate_tensors(infos, base, file), (file,))


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.name(MAX_KEY)
        if key in metadata:
            raise CorruptFile(f"{cursor.path} has the metadata key {shown(key)} twice.")
        metadata[key] = cursor.value(cursor.u32())
    return metadata


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise CorruptFile(f"{path}: general.alignment should be a power of two from 8 on, it is {shown(alignment)}.")
    return alignment


def _read_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """name, shape with rows first, type, offset from the start of the data."""
    name, num_dims = cursor.name(MAX_NAME), cursor.u32()
    if not 1 <= num_dims <= 4:
        raise CorruptFile(f"{cursor.path}: tensor {name!r} claims {num_dims} dimensions, expected 1 to 4.")
    shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
    return name, shape, cursor.u32(), cursor.u64()


def _locate_tensors(
    infos: list[tuple[str, tuple[int, ...], int, int]], base: int, file: MappedFile
) -> dict[str, GgufTensor]:
    path, tensors = file.path, {}  # type: Path, dict[str, GgufTensor]
    end, before = base, ""
    for name, shape, kind, offset in sorted(infos, key=lambda info: info[3]):
        if name in tensors:
            raise CorruptFile(f"{path} has the tensor {name!r} twice.")
        tensor = tensors[name] = _locate(file, name, shape, kind, base + offset)
        if base + offset < end:
            raise CorruptFile(
                f"{path}: tensors {before!r} and {name!r} overlap, it is damaged or written by a fork: take it once "
                "more, or another file of the model."
            )
        end, before = base + offset + tensor.num_bytes, name
    return {name: tensors[name] for name, *_ in infos}


def _locate(file: MappedFile, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    path, size = file.path, len(file.data)
    if kind not in TENSOR_TYPES:
        raise UnknownModel(
            f"{path}: tensor {name!r} is of type {_type_name(kind)}, which llama.cpp's own quantised files do not "
            "have: take a file in one of its types, such as Q4_K_M, UD-Q4_K_XL, IQ4_XS or Q8_0."
        )
    dtype, block, block_bytes = TENSOR_TYPES[kind]
    if shape[-1] % block or math.prod(shape) == 0:
        raise CorruptFile(f"{path}: tensor {name!r} of shape {list(shape)} cannot be made of {dtype} blocks.")
    num_bytes = math.prod(shape) // block * block_bytes
    if start % 8:
        raise CorruptFile(f"{path}: tensor {name!r} starts at byte {start}, no multiple of 8: it is damaged.")
    if start + num_bytes > size:
        raise CorruptFile(
            f"{path} has {size} bytes, tensor {name!r} needs up to byte {start + num_bytes}, {TRUNCATED}."
        )
    return GgufTensor(name, dtype, shape, Place(path, start, start + num_bytes), file)


def _type_name(kind: int) -> str:
    """Its number, and its name where it has one."""
    names = {int(member): member.name for member in GGMLQuantizationType}
    names |= {number: f"{name} of ik_llama.cpp" for number, name in FORK_TYPES.items()}
    return f"{kind} ({names[kind]})" if kind in names else str(kind)
