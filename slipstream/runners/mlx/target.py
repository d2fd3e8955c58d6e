"""An mlx-lm model as the runner sees it: ``forward -> hidden``, ``unembed``, ``embed``, and which caches it needs.

An architecture whose head we know gives its hidden states; any other gives logits, and never drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from slipstream.errors import UnknownModel
from slipstream.runners.mlx.caches import FeedHolder, KvCache
from slipstream.runners.mlx.gdn import GdnCache, TapedGdn
from slipstream.runners.mlx.states import RecurrentCache

Cache = KvCache | GdnCache | RecurrentCache


class TargetModel(Protocol):
    def forward(self, tokens: mx.array, caches: Sequence[Cache]) -> mx.array:
        """What ``unembed`` reads of every token. [rows, width, ...]"""
        ...

    def unembed(self, hidden: mx.array) -> mx.array:
        """Logits. [..., vocab]"""
        ...


class OpenTarget:
    """Hidden states after the final norm, the embedding and the output matrix are in reach."""

    def __init__(self, model: Any) -> None:
        text = getattr(model, "language_model", model)
        self.args = text.args
        self._decoder = text.model
        self._output = text.lm_head if "lm_head" in text else text.model.embed_tokens.as_linear

    def forward(self, tokens: mx.array, caches: Sequence[Cache]) -> mx.array:
        hidden: mx.array = self._decoder(tokens, cache=list(caches))
        return hidden

    def unembed(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self._output(hidden)
        return logits

    def embed(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self._decoder.embed_tokens(tokens)
        return embedded

    def output_rows(self, num_rows: int) -> Callable[[mx.array], mx.array]:
        """The output matrix's first rows: drafting over a part of the vocabulary is cheaper."""
        matrix = self._output if isinstance(self._output, nn.Module) else self._decoder.embed_tokens
        return _FirstRows(matrix, num_rows)


class OpaqueTarget:
    """Any model of mlx-lm: from tokens to logits, nothing in between."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def forward(self, tokens: mx.array, caches: Sequence[Cache]) -> mx.array:
        logits: mx.array = self._model(tokens, cache=list(caches))
        return logits

    def unembed(self, hidden: mx.array) -> mx.array:
        return hidden


class _FirstRows:
    """The first rows of an output matrix, packed or not."""

    def __init__(self, matrix: Any, num_rows: int) -> None:
        self._weight: mx.array = matrix["weight"][:num_rows]
        self._packing: dict[str, Any] = {}
        if "scales" in matrix:
            self._packing = {name: matrix[name][:num_rows] for name in ("scales", "biases") if name in matrix}
            self._packing |= {name: getattr(matrix, name) for name in ("group_size", "bits", "mode")}

    def __call__(self, hidden: mx.array) -> mx.array:
        if self._packing:
            return mx.quantized_matmul(hidden, self._weight, **self._packing)
        return hidden @ self._weight.T


def tape_recurrences(model: Any, *, tiled: bool = False) -> None:
    """Gives every Gated DeltaNet layer of the model its tape. ``tiled``: as in GdnSpec."""
    for layer in model.layers:
        if isinstance(getattr(layer, "linear_attn", None), GatedDeltaNet):
            layer.linear_attn = TapedGdn(layer.linear_attn, tiled)


def make_caches(model: Any, holder: FeedHolder, max_rows: int, max_length: int, max_depth: int) -> list[Cache]:
    """One of ours for each that mlx-lm would make."""
    caches: list[Cache] = []
    for layer, theirs in zip(model.layers, make_prompt_cache(model), strict=True):
        if isinstance(getattr(layer, "linear_attn", None), TapedGdn):
            caches.append(GdnCache(holder, max_depth))
        elif type(theirs) is ArraysCache:
            caches.append(RecurrentCache(holder, len(theirs.cache)))
        elif type(theirs) is KVCache:
            caches.append(KvCache(holder, max_rows, max_length))
        elif type(theirs) is RotatingKVCache and theirs.keep == 0:
            caches.append(KvCache(holder, max_rows, max_length, window=theirs.max_size))
        else:
            raise UnknownModel(f"A layer of this model keeps a {type(theirs).__name__}, which cannot be batched yet.")
    return caches
