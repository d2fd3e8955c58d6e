"""Models without files: the spec of a real model with random weights.

For benchmarks and memory plans. The tensors have names, shapes and types as in a real checkpoint; the runner generates
their values. Text is bytes, one token each; ids from 256 on decode to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import tokenizers
from tokenizers import models, pre_tokenizers

from slipstream.errors import LoadError, MissingTensor
from slipstream.load.head import head_shapes
from slipstream.load.mapped_file import MappedFile
from slipstream.load.opened import OpenedModel
from slipstream.load.random.stored import StoredRandomCheckpoint
from slipstream.load.shapes import Shapes, model_shapes
from slipstream.load.spec import GdnSpec, HeadSpec, LayerKind, ModelSpec, MoeSpec, RopeSpec
from slipstream.load.tensor import Place
from slipstream.load.tokenizer.chat_template import ChatTemplate
from slipstream.load.tokenizer.token_bytes import BYTE_OF
from slipstream.load.tokenizer.tokenizer import Tokenizer
from slipstream.sampling.defaults import NEUTRAL

ITEM_BYTES = 2  # everything is bfloat16
INTERVAL = 4  # every fourth layer is full attention


def _hybrid_layers(num_layers: int) -> tuple[LayerKind, ...]:
    kinds: tuple[LayerKind, LayerKind] = ("linear_attention", "full_attention")
    return tuple(kinds[(i + 1) % INTERVAL == 0] for i in range(num_layers))


_QWEN35_27B = ModelSpec(
    architecture="qwen3_5",
    hidden_size=5120,
    num_layers=64,
    num_heads=24,
    num_kv_heads=4,
    head_dim=256,
    intermediate_size=17408,
    vocab_size=248320,
    max_context=262144,
    norm_eps=1e-6,
    rope=RopeSpec(theta=1e7, rotary_dim=64),
    tied=False,
    layer_kinds=_hybrid_layers(64),
    qk_norm=True,
    gated_attention=True,
    norm_plus_one=True,
    gdn=GdnSpec(num_k_heads=16, num_v_heads=48, k_dim=128, v_dim=128, conv_kernel=4),
    head=HeadSpec(num_declared_layers=1),
)
_QWEN35_4B = replace(
    _QWEN35_27B,
    hidden_size=2560,
    num_layers=32,
    num_heads=16,
    intermediate_size=9216,
    tied=True,
    layer_kinds=_hybrid_layers(32),
    gdn=GdnSpec(num_k_heads=16, num_v_heads=32, k_dim=128, v_dim=128, conv_kernel=4),
)
_QWEN35_35B_A3B = replace(
    _QWEN35_4B,
    architecture="qwen3_5_moe",
    hidden_size=2048,
    num_layers=40,
    num_kv_heads=2,
    intermediate_size=0,
    tied=False,
    layer_kinds=_hybrid_layers(40),
    moe=MoeSpec(num_experts=256, num_active=8, expert_size=512, shared_size=512),
)
_QWEN35_2B = replace(
    _QWEN35_4B,
    hidden_size=2048,
    num_layers=24,
    num_heads=8,
    num_kv_heads=2,
    intermediate_size=6144,
    layer_kinds=_hybrid_layers(24),
    gdn=GdnSpec(num_k_heads=16, num_v_heads=16, k_dim=128, v_dim=128, conv_kernel=4),
)
_QWEN35_08B = replace(_QWEN35_2B, hidden_size=1024, intermediate_size=3584)
_SMALL_MOE = replace(  # not a released model: experts that fit into a small machine
    _QWEN35_08B,
    architecture="qwen3_5_moe",
    num_layers=16,
    intermediate_size=0,
    layer_kinds=_hybrid_layers(16),
    moe=MoeSpec(num_experts=64, num_active=8, expert_size=256, shared_size=256),
)
_TINY = replace(
    _QWEN35_27B,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=96,
    vocab_size=512,
    max_context=2048,
    rope=RopeSpec(theta=1e4, rotary_dim=8),
    layer_kinds=_hybrid_layers(4),
    gdn=GdnSpec(num_k_heads=2, num_v_heads=4, k_dim=16, v_dim=16, conv_kernel=4),
)
_TINY_MOE = replace(
    _TINY,
    architecture="qwen3_5_moe",
    intermediate_size=0,
    moe=MoeSpec(num_experts=8, num_active=2, expert_size=32, shared_size=32),
)

RANDOM_SHAPES: dict[str, ModelSpec] = {
    "qwen3.5-27b": _QWEN35_27B,
    "qwen3.5-4b": _QWEN35_4B,
    "qwen3.5-2b": _QWEN35_2B,
    "qwen3.5-0.8b": _QWEN35_08B,
    "qwen3.5-35b-a3b": _QWEN35_35B_A3B,
    "small-moe": _SMALL_MOE,
    "tiny": _TINY,
    "tiny-moe": _TINY_MOE,
}


class RandomCheckpoint:
    """Names, shapes and types. The runner that loads it generates the tensors."""

    path = "random weights"

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._shapes: Shapes = model_shapes(spec) | head_shapes(spec)

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def get(self, name: str) -> NoReturn:
        raise LoadError(f"{name} has random weights: there is no file to read it from.")

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise MissingTensor(f"a model of {self.spec.architecture} shape has no tensor {name!r}.")
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return "BF16"

    def num_bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * ITEM_BYTES

    def places(self, name: str) -> list[Place]:
        return []

    def files(self) -> list[Path]:
        return []

    def mapped_files(self) -> list[MappedFile]:
        return []

    def release(self) -> None:
        """Nothing is held."""


class RandomModel(OpenedModel):
    @cached_property
    def tokenizer(self) -> Tokenizer:
        return byte_tokenizer()


def open_random(shape: str, vocab: int | None = None, stored_as: str | None = None) -> OpenedModel:
    """Target model and MTP head of a shape, its vocabulary limited to ``vocab``. LoadError for an unknown shape.

    ``stored_as``: the weights are made up on the host, in the types of a quantised file (mixes.py).
    """
    if shape not in RANDOM_SHAPES:
        raise LoadError(f"{shape!r} is not one of the shapes {', '.join(RANDOM_SHAPES)}.")
    spec = replace(RANDOM_SHAPES[shape], name=shape)
    if vocab is not None and not len(BYTE_OF) <= vocab <= spec.vocab_size:
        raise LoadError(f"{shape} has a vocabulary of {spec.vocab_size}: it cannot be limited to {vocab}.")
    return random_model(replace(spec, vocab_size=vocab or spec.vocab_size), stored_as)


def random_model(spec: ModelSpec, stored_as: str | None = None) -> OpenedModel:
    checkpoint = RandomCheckpoint(spec) if stored_as is None else StoredRandomCheckpoint(spec, stored_as)
    return RandomModel(spec.name, Path(), checkpoint, checkpoint, "", own_sampling=NEUTRAL)


def byte_tokenizer() -> Tokenizer:
    """Text as its bytes; no end token, no chat template."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return Tokenizer(backend, "byte_level", ChatTemplate({}, {}))
