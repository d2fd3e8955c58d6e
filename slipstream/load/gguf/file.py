"""A GGUF file as a Checkpoint: canonical names, plain types as arrays, block types as raw rows of bytes.

Llama files store the rows of q and k interleaved for their rotary kernel; here they come back half-split, as
Hugging Face has them. Dequantising is not done here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from slipstream.errors import LoadError, MissingTensor
from slipstream.load.gguf.header import GgufHeader, GgufTensor, read_header
from slipstream.load.gguf.spec import canonical_names, spec_from_gguf
from slipstream.load.mapped_file import release_pages
from slipstream.load.shapes import check_trunk
from slipstream.load.tensor import NUMPY_TYPES, RawTensor


class GgufCheckpoint:
    def __init__(self, header: GgufHeader) -> None:
        self.path = str(header.path)
        self.spec = spec_from_gguf(header)
        self.metadata = header.metadata
        self._header = header
        self._in_file = canonical_names(header)
        self._interleaved = header.metadata["general.architecture"] == "llama"

    def names(self) -> Iterable[str]:
        return self._in_file.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._in_file

    def get(self, name: str) -> RawTensor:
        tensor = self._find(name)
        data = _array(self._header, tensor)
        if heads := self._interleaved_heads(name):
            data = half_split_rows(data, heads)
        return RawTensor(name, tensor.dtype, tensor.shape, data)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        return self._find(name).dtype

    def num_bytes(self, name: str) -> int:
        return self._find(name).num_bytes

    def release(self) -> None:
        release_pages(self._header.data)

    def _interleaved_heads(self, name: str) -> int:
        """How many heads' rows are interleaved in this tensor; 0 if none."""
        if not self._interleaved:
            return 0
        part = name.rpartition(".")[0]
        if part.endswith(".q_proj"):
            return self.spec.num_heads
        return self.spec.num_kv_heads if part.endswith(".k_proj") else 0

    def _find(self, name: str) -> GgufTensor:
        if name not in self._in_file:
            raise MissingTensor(f"{self.path} has no tensor {name!r}.")
        return self._header.tensors[self._in_file[name]]


def open_gguf(path: Path) -> GgufCheckpoint:
    if not path.is_file():
        raise LoadError(f"{path} is not a file.")
    checkpoint = GgufCheckpoint(read_header(path))
    check_trunk(checkpoint)
    return checkpoint


def half_split_rows(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows (pair, half) of each head -> rows (half, pair). Works on raw blocks too: a row is never cut."""
    # [heads, head_dim / 2, 2, anything behind the rows]
    pairs = data.reshape(heads, -1, 2, *data.shape[1:])
    return pairs.swapaxes(1, 2).reshape(data.shape)


def _array(header: GgufHeader, tensor: GgufTensor) -> np.ndarray:
    # [bytes of the tensor]
    raw = header.data[tensor.start : tensor.start + tensor.num_bytes]
    if tensor.dtype in NUMPY_TYPES:
        return raw.view(NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape)
    num_rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    return raw.reshape(num_rows, -1)
