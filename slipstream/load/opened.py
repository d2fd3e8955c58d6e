"""An opened model: checkpoint, MTP head, tokenizer. The tokenizer is built when it is first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFile, RequestError
from slipstream.load.gguf.file import GgufCheckpoint
from slipstream.load.gguf.header import read_header
from slipstream.load.gguf.vocab import tokenizer_from_gguf
from slipstream.load.hf.tokenizer import tokenizer_from_folder
from slipstream.load.mapped_file import MappedFile
from slipstream.load.sampling import sampling_from_folder, sampling_from_gguf
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import Checkpoint
from slipstream.load.tokenizer.library_faults import library_faults
from slipstream.load.tokenizer.tokenizer import Tokenizer
from slipstream.sampling.defaults import SamplingDefaults

SAMPLE = "Hello, naïve 世界 🙂\n\t 12"


@dataclass(frozen=True)
class OpenedModel:
    name: str  # as clients see it
    path: Path
    checkpoint: Checkpoint
    head: Checkpoint | None
    head_reason: str  # why there is no head, one sentence; "" when there is one
    own_sampling: SamplingDefaults | None = None  # instead of what its files recommend

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def num_bytes(self) -> int:
        """In the files: target model and head."""
        in_head, target, head = self.spec.head.owns, self.checkpoint, self.head
        target_bytes = sum(target.num_bytes(name) for name in target.names() if not in_head(name))
        if head is None:
            return target_bytes
        return target_bytes + sum(head.num_bytes(name) for name in head.names() if in_head(name))

    def mapped_files(self) -> list[MappedFile]:
        """Of target model and head, each once."""
        files = [*self.checkpoint.mapped_files(), *(self.head.mapped_files() if self.head is not None else ())]
        return list(dict.fromkeys(files))

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values, those of the head included where there is one."""
        return self.spec.num_attention_layers + (self.spec.head.num_kv_layers if self.head is not None else 0)

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        if self.own_sampling is not None:
            return self.own_sampling
        if isinstance(self.checkpoint, GgufCheckpoint):
            return sampling_from_gguf(self.checkpoint.metadata, str(self.path))
        return sampling_from_folder(self.path)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        metadata = self.checkpoint.metadata if isinstance(self.checkpoint, GgufCheckpoint) else None
        return open_tokenizer(self.path, self.spec.eos_token_ids, metadata)


def open_tokenizer(
    path: Path, eos_token_ids: tuple[int, ...] = (), metadata: Mapping[str, Any] | None = None
) -> Tokenizer:
    """`path`: a folder or a .gguf file. `eos_token_ids`: those of the model's configuration. `metadata`: of the .gguf
    file where it was read already, since it is large. Encodes a text: some faults show only then."""
    where = path / "tokenizer.json" if path.is_dir() else path
    with library_faults(CorruptFile, f"{where} cannot be used as a tokenizer"):
        if path.is_dir():
            tokenizer = tokenizer_from_folder(path, eos_token_ids)
        else:
            tokenizer = tokenizer_from_gguf(metadata or read_header(path).metadata, str(path), eos_token_ids)
    try:
        tokenizer.encode(SAMPLE)
    except RequestError as error:
        raise CorruptFile(f"{where} cannot be used as a tokenizer: {error}") from error
    return tokenizer
