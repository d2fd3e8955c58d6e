"""An opened model: checkpoint, MTP head, tokenizer. The tokenizer is built when it is first asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slipstream.load.gguf.file import GgufCheckpoint
from slipstream.load.gguf.header import read_header
from slipstream.load.gguf.vocab import tokenizer_from_gguf
from slipstream.load.hf.tokenizer import tokenizer_from_folder
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import Checkpoint
from slipstream.load.tokenizer.tokenizer import Tokenizer


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
        """In the files: target model and head."""
        trunk = sum(self.checkpoint.num_bytes(name) for name in self.checkpoint.names() if not _of_head(name))
        if self.head is None:
            return trunk
        return trunk + sum(self.head.num_bytes(name) for name in self.head.names() if _of_head(name))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if isinstance(self.checkpoint, GgufCheckpoint):  # its header is large: not read twice
            return tokenizer_from_gguf(self.checkpoint.metadata, str(self.path), self.spec.eos_token_ids)
        return open_tokenizer(self.path, self.spec.eos_token_ids)


def open_tokenizer(path: Path, eos_token_ids: tuple[int, ...] = ()) -> Tokenizer:
    """`path`: a folder or a .gguf file. `eos_token_ids`: those of the model's configuration."""
    if path.is_dir():
        return tokenizer_from_folder(path, eos_token_ids)
    return tokenizer_from_gguf(read_header(path).metadata, str(path), eos_token_ids)


def _of_head(name: str) -> bool:
    return name.startswith("mtp.")
