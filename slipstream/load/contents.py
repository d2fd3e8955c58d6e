"""What a model's files hold: formats, types of weights, bits a weight, and which part of the model a tensor is of."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from slipstream.errors import LoadError
from slipstream.load.gguf.file import GgufCheckpoint
from slipstream.load.opened import OpenedModel
from slipstream.load.tensor import Checkpoint

Part = Literal["embedding and output", "attention", "recurrent layers", "MLP", "experts", "norms and others"]


@dataclass(frozen=True, slots=True)
class Contents:
    format: str
    num_weights: int  # 0: only the runner can count them, as in MLX's own folders
    num_bytes: int
    types: tuple[tuple[str, float], ...]  # the share of the weights in each, the largest first

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights if self.num_weights else 0.0


def target_contents(model: OpenedModel) -> Contents:
    return _contents(model.checkpoint, _target_names(model))


def main_type(model: OpenedModel) -> str:
    """The type of most weights of the target model; of most bytes where only its runner can count weights."""
    if types := target_contents(model).types:
        return types[0][0]
    stored: Counter[str] = Counter()
    for name in _target_names(model):
        stored[model.checkpoint.dtype(name)] += model.checkpoint.num_bytes(name)
    return stored.most_common(1)[0][0]


def head_contents(model: OpenedModel) -> Contents | None:
    head = model.head
    return None if head is None else _contents(head, [name for name in head.names() if model.spec.head.owns(name)])


def head_place(model: OpenedModel) -> str:
    """Where the head lies, as a clause."""
    if model.head is None or not model.head.files():
        return ""
    if model.head is model.checkpoint:
        return "in the model's own files"
    files = model.head.files()
    return f"in {files[0].name}" if len(files) == 1 else f"in {len(files)} files of {files[0].parent.name}"


def part_of(name: str) -> Part:
    """By canonical name."""
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return "embedding and output"
    if "norm" in name.rsplit(".", 2)[-2]:
        return "norms and others"
    parts: dict[str, Part] = {
        "self_attn": "attention",
        "linear_attn": "recurrent layers",
        "experts": "experts",
        "mlp": "MLP",
    }
    return next((part for key, part in parts.items() if f".{key}." in name), "norms and others")


def file_format(checkpoint: Checkpoint) -> str:
    if not checkpoint.files():
        return "random weights"
    return "GGUF" if isinstance(checkpoint, GgufCheckpoint) else "safetensors"


def _target_names(model: OpenedModel) -> list[str]:
    return [name for name in model.checkpoint.names() if not model.spec.head.owns(name)]


def _contents(checkpoint: Checkpoint, names: list[str]) -> Contents:
    num_bytes = sum(checkpoint.num_bytes(name) for name in names)
    weights: Counter[str] = Counter()
    try:
        for name in names:
            weights[checkpoint.dtype(name)] += math.prod(checkpoint.shape(name))
    except LoadError:
        return Contents(file_format(checkpoint), 0, num_bytes, ())
    total = sum(weights.values())
    types = tuple((dtype, count / total) for dtype, count in weights.most_common())
    return Contents(file_format(checkpoint), total, num_bytes, types)
