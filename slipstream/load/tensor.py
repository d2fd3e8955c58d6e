"""A tensor as a file holds it: bytes, a storage type and a shape. No array library but numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slipstream.load.mapped_file import MappedFile
from slipstream.load.spec import ModelSpec

FP8 = "F8_E4M3"
FP8_WIDE = "F8_E4M3_F32"  # its scales need more bits than bfloat16 has
FP8_TYPES = (FP8, FP8_WIDE)
FP8_GROUP = 128  # columns, and in a file rows, that share a scale

# How the elements of a plain type lie in an array.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    FP8: np.dtype("u1"),  # its scales are a tensor of their own
}


@dataclass(frozen=True, slots=True)
class Place:
    """Some bytes of a file."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RawTensor:
    name: str  # canonical Hugging Face name, text model prefix "model."
    dtype: str  # "F32", "F16", "BF16", one of FP8_TYPES, a GGUF block type ("Q4_1"), or one of quantized/types.py's
    shape: tuple[int, ...]  # logical shape, rows first
    # Plain types: the elements, as uint16 for BF16, uint8 for FP8. Block types: uint8 [rows, bytes per row].
    data: np.ndarray
    # The scale of each group of columns, float32: FP8 [*rows, ceil(columns / FP8_GROUP)], quantized/types.py's
    # [*rows, columns / group], that of each row beside GGUF's blocks [*rows, 1]; else None.
    scale: np.ndarray | None = None
    zero: np.ndarray | None = None  # the code of weight 0 of each group, uint8 [*rows, columns / group]
    order: np.ndarray | None = None  # int32 [columns]: stored column i is column order[i] of the matrix; None: as it is

    def rows(self, which: slice | np.ndarray) -> RawTensor:
        """Some rows as a matrix of their own, those of a stack counted through; a slice copies nothing."""
        num_rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        data = self.data.reshape(num_rows, -1)[which]
        scale, zero = (None if each is None else each.reshape(num_rows, -1)[which] for each in (self.scale, self.zero))
        return replace(self, shape=(len(data), columns), data=data, scale=scale, zero=zero)


class Checkpoint(Protocol):
    """Tensors by canonical name, memory-mapped: nothing is read before it is asked for."""

    spec: ModelSpec
    path: str  # for messages

    def names(self) -> Iterable[str]: ...

    def __contains__(self, name: object) -> bool: ...

    def get(self, name: str) -> RawTensor:
        """Raises MissingTensor with the name and the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """`get(name).shape`, without touching the data."""
        ...

    def dtype(self, name: str) -> str:
        """`get(name).dtype`, without touching the data."""
        ...

    def num_bytes(self, name: str) -> int: ...

    def places(self, name: str) -> list[Place]:
        """Where it lies in the files; those of all, where several are stored as one."""
        ...

    def files(self) -> list[Path]:
        """That the tensors are in."""
        ...

    def mapped_files(self) -> list[MappedFile]:
        """The same as they are open."""
        ...

    def release(self) -> None:
        """Gives the memory of tensors already read back to the system; arrays from `get` stay usable."""
        ...
