"""A GGUF file as a Checkpoint: canonical names, plain types as arrays, block types as raw rows of bytes.

Rows come back in Hugging Face's order: architectures.py knows which tensors the converter changed. Dequantising is not
done here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from slipstream.errors import LoadError, MissingTensor
from slipstream.load.gguf.header import GgufHeader, GgufTensor, read_header
from slipstream.load.gguf.spec import file_tensors, spec_from_gguf
from slipstream.load.mapped_file import release_pages
from slipstream.load.shapes import check_model
from slipstream.load.tensor import NUMPY_TYPES, RawTensor


class GgufCheckpoint:
    def __init__(self, header: GgufHeader) -> None:
        self.path = str(header.path)
        self.spec = spec_from_gguf(header)
        self.metadata = header.metadata
        self._header = header
        self._in_file = file_tensors(header)

    def names(self) -> Iterable[str]:
        return self._in_file.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._in_file

    def get(self, name: str) -> RawTensor:
        tensor = self._find(name)
        data = self._in_file[name].transform(_array(self._header, tensor), self.spec)
        return RawTensor(name, tensor.dtype, tensor.shape, data)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        return self._find(name).dtype

    def num_bytes(self, name: str) -> int:
        return self._find(name).num_bytes

    def files(self) -> list[Path]:
        return [self._header.path]

    def release(self) -> None:
        release_pages(self._header.data)

    def _find(self, name: str) -> GgufTensor:
        if name not in self._in_file:
            raise MissingTensor(f"{self.path} has no tensor {name!r}.")
        return self._header.tensors[self._in_file[name].name]


def open_gguf(path: Path) -> GgufCheckpoint:
    if not path.is_file():
        raise LoadError(f"{path} is not a file.")
    checkpoint = GgufCheckpoint(read_header(path))
    check_model(checkpoint)
    return checkpoint


def _array(header: GgufHeader, tensor: GgufTensor) -> np.ndarray:
    # [bytes of the tensor]
    raw = header.data[tensor.start : tensor.start + tensor.num_bytes]
    if tensor.dtype in NUMPY_TYPES:
        return raw.view(NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape)
    num_rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    return raw.reshape(num_rows, -1)
