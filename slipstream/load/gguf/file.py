"""A GGUF file as a Checkpoint: canonical names, plain types as arrays, block types as raw rows of bytes.

Tensors come back as Hugging Face has them: architectures.py knows what the converter changed. Dequantising is not done
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from slipstream.errors import CorruptFile, HeadError, LoadError, MissingTensor, UnknownModel
from slipstream.load.gguf.header import GgufHeader, GgufTensor
from slipstream.load.gguf.parts import read_parts
from slipstream.load.gguf.spec import file_tensors, is_head_alone, spec_from_gguf
from slipstream.load.mapped_file import MappedFile
from slipstream.load.shapes import check_model
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import NUMPY_TYPES, Place, RawTensor


class GgufCheckpoint:
    def __init__(self, header: GgufHeader, spec: ModelSpec) -> None:
        self.path = str(header.path)
        self.spec = spec
        self.metadata = header.metadata
        self._header = header
        self._in_file = file_tensors(header)

    def names(self) -> Iterable[str]:
        return self._in_file.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._in_file

    def get(self, name: str) -> RawTensor:
        tensor = self._find(name)
        raw = RawTensor(name, tensor.dtype, tensor.shape, _array(tensor))
        if (scale := self._in_file[name].scale) is not None:
            raw = replace(raw, scale=_matrix_scale(self._header, scale, tensor))
        return self._in_file[name].change.tensor(raw, self.spec)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._in_file[name].change.shape(self._find(name).shape, self.spec)

    def dtype(self, name: str) -> str:
        tensor = self._find(name)
        return "F32" if self._in_file[name].change.computes else tensor.dtype

    def num_bytes(self, name: str) -> int:
        """Its share, where a tensor of the file is several of ours."""
        tensor = self._find(name)
        return tensor.num_bytes * math.prod(self.shape(name)) // math.prod(tensor.shape)

    def places(self, name: str) -> list[Place]:
        return [self._find(name).place]

    def files(self) -> list[Path]:
        return [file.path for file in self._header.files]

    def mapped_files(self) -> list[MappedFile]:
        return list(self._header.files)

    def release(self) -> None:
        for file in self._header.files:
            file.release()

    def _find(self, name: str) -> GgufTensor:
        if name not in self._in_file:
            raise MissingTensor(f"{self.path} has no tensor {name!r}.")
        return self._header.tensors[self._in_file[name].name]


def open_gguf(path: Path) -> GgufCheckpoint:
    if not path.is_file():
        raise LoadError(f"{path} is not a file.")
    header = read_parts(path)
    if is_head_alone(header):
        raise UnknownModel(f"{path} is an MTP head without its model: open the model, and give this file with --mtp.")
    checkpoint = GgufCheckpoint(header, spec_from_gguf(header))
    check_model(checkpoint)
    return checkpoint


def open_gguf_head(path: Path, spec: ModelSpec) -> GgufCheckpoint:
    """The head of a file, whatever else is in it, for a model of that spec. Shapes are not checked."""
    header = read_parts(path)
    head = GgufCheckpoint(header, spec)
    if not any(spec.head.owns(name) for name in head.names()):
        raise HeadError(f"{path} has no MTP head: it holds no nextn.* tensors.")
    return head


def _array(tensor: GgufTensor) -> np.ndarray:
    if tensor.dtype in NUMPY_TYPES:
        return tensor.data.view(NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape)
    return tensor.data.reshape(math.prod(tensor.shape[:-1]), -1)


def _matrix_scale(header: GgufHeader, name: str, matrix: GgufTensor) -> np.ndarray:
    """One number for a matrix, or one for each of a stack; the same for each row here. float32 [rows, 1]"""
    scale, num_rows = header.tensors[name], math.prod(matrix.shape[:-1])
    count = math.prod(scale.shape)
    if scale.dtype != "F32" or count not in (1, *matrix.shape[:-2]):
        raise CorruptFile(f"{header.path}: {name} should hold one float32 for each matrix of {matrix.name}.")
    wide: np.ndarray = np.repeat(scale.data.view("<f4"), num_rows // count)[:, None]
    return wide
