"""From a path or a name to an opened model: checkpoint, MTP head, tokenizer. No array library but numpy.

The runner reads `OpenedModel.checkpoint` and `.head`; the server reads `.tokenizer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slipstream.errors import LoadError
from slipstream.load.default_model import default_head_path, default_model_path
from slipstream.load.dequantize import dequantize
from slipstream.load.gguf.file import GgufCheckpoint, open_gguf
from slipstream.load.gguf.header import read_header
from slipstream.load.gguf.vocab import tokenizer_from_gguf
from slipstream.load.head import find_head, open_head
from slipstream.load.hf.any_folder import find_any_head, open_any
from slipstream.load.hf.folder import open_hf
from slipstream.load.hf.hub import fetch_folder, is_hub_id
from slipstream.load.spec import GdnSpec, ModelSpec, MoeSpec, RopeSpec
from slipstream.load.tensor import Checkpoint, RawTensor
from slipstream.load.tokenizer.detokenizer import StreamingDetokenizer
from slipstream.load.tokenizer.hf import tokenizer_from_folder
from slipstream.load.tokenizer.tokenizer import Tokenizer

__all__ = [
    "Checkpoint",
    "GdnSpec",
    "ModelSpec",
    "MoeSpec",
    "OpenedModel",
    "RawTensor",
    "RopeSpec",
    "StreamingDetokenizer",
    "Tokenizer",
    "default_head_path",
    "default_model_path",
    "dequantize",
    "find_head",
    "open_head",
    "open_model",
    "open_tokenizer",
]

DEFAULT_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class OpenedModel:
    name: str  # as clients see it
    path: Path
    checkpoint: Checkpoint
    head: Checkpoint | None
    head_reason: str  # why there is no head, one sentence; "" when there is one

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def num_bytes(self) -> int:
        """In the files: trunk and head."""
        trunk = sum(self.checkpoint.num_bytes(name) for name in self.checkpoint.names() if not _of_head(name))
        if self.head is None:
            return trunk
        return trunk + sum(self.head.num_bytes(name) for name in self.head.names() if _of_head(name))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if isinstance(self.checkpoint, GgufCheckpoint):  # whose header takes long to read
            return tokenizer_from_gguf(self.checkpoint.metadata, str(self.path), self.spec.eos_token_ids)
        return open_tokenizer(self.path, self.spec.eos_token_ids)


def _of_head(name: str) -> bool:
    return name.startswith("mtp.")


def open_model(model: str | None = None, mtp: str | None = None, *, any_architecture: bool = False) -> OpenedModel:
    """`model`: None for the default one, a folder, a .gguf file, or a hub id. `mtp`: a head in a file of its own.
    `any_architecture`: the runner knows what to make of a folder, also if we do not."""
    name, path = _resolve(model)
    if any_architecture and path.is_dir():
        folder = open_any(path, name)
        return OpenedModel(name, path, folder, *find_any_head(folder, _head_path(model, mtp)))
    checkpoint = open_hf(path, name) if path.is_dir() else open_gguf(path)
    head, reason = find_head(checkpoint, _head_path(model, mtp))
    return OpenedModel(name, path, checkpoint, head, reason)


def open_tokenizer(path: Path, eos_token_ids: tuple[int, ...] = ()) -> Tokenizer:
    """`path`: what `OpenedModel.path` is. `eos_token_ids`: those the model's configuration names."""
    if path.is_dir():
        return tokenizer_from_folder(path, eos_token_ids)
    return tokenizer_from_gguf(read_header(path).metadata, str(path), eos_token_ids)


def _resolve(model: str | None) -> tuple[str, Path]:
    if model is None:
        return DEFAULT_NAME, default_model_path()
    if not model:
        raise LoadError("The model's name is empty: expected a model folder, a .gguf file, or a hub id.")
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name, path
    if path.is_file():
        return path.stem, path
    if _looks_like_path(model):
        raise LoadError(f"{model} does not exist: expected a model folder, a .gguf file, or a hub id.")
    return model, fetch_folder(model)


def _looks_like_path(model: str) -> bool:
    return not is_hub_id(model) or model.endswith((".gguf", ".safetensors"))


def _head_path(model: str | None, mtp: str | None) -> Path | None:
    if mtp is None:
        return default_head_path() if model is None else None
    path = Path(mtp).expanduser()
    if not path.exists():
        raise LoadError(f"{mtp}, given as the MTP head, does not exist.")
    return path
