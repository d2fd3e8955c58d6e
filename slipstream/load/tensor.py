"""A tensor as a file holds it: bytes, a storage type and a shape. No array library but numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slipstream.load.spec import ModelSpec

FP8_GROUP = 128  # columns of a row of FP8 codes that share a scale


@dataclass(frozen=True, slots=True)
class RawTensor:
    name: str  # canonical Hugging Face name, text model prefix "model."
    dtype: str  # "F32", "F16", "BF16" or a GGUF block type such as "Q4_1"
    shape: tuple[int, ...]  # logical shape, rows first
    # Plain types: the elements, as uint16 for BF16. Block types: uint8 [rows, bytes per row].
    data: np.ndarray
    scale: np.ndarray | None = None  # of F8_E4M3: float32 [rows, columns / FP8_GROUP, rounded up]


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
        """What `get(name).shape` would be, without touching the data."""
        ...

    def dtype(self, name: str) -> str:
        """What `get(name).dtype` would be."""
        ...

    def num_bytes(self, name: str) -> int: ...

    def release(self) -> None:
        """Gives the memory of what was read back to the system; arrays from `get` stay usable."""
        ...
