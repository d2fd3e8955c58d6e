"""A decoder as the rest of the runner sees it: ``forward -> hidden``, ``unembed``, and its weights' size.

Families differ in their layers only; each family's file builds a list of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.load.spec import ModelSpec
from slipstream.runners.torch.models.layers import Layers, load_norm
from slipstream.runners.torch.ops import Linear, RmsNorm
from slipstream.runners.torch.weights import Weights


@dataclass(frozen=True, slots=True)
class Decoder:
    embedding: Linear
    layers: Layers
    norm: RmsNorm
    output: Linear

    def forward(self, batch: Any) -> Tensor:
        """Hidden states after the final norm. [tokens, hidden]"""
        return self.norm(self.body(batch))

    def body(self, batch: Any) -> Tensor:
        """All but the final norm. [tokens, hidden]"""
        return self.layers(self.embedding.rows(batch.tokens), batch)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits. [rows, vocab]"""
        return self.output(hidden)


def load_decoder(weights: Weights, spec: ModelSpec, layers: Layers) -> Decoder:
    embedding = weights.linear(["model.embed_tokens"], [spec.vocab_size], spec.hidden_size)
    norm = load_norm(weights, "model.norm", spec)
    output = embedding if spec.tied else weights.linear(["lm_head"], [spec.vocab_size], spec.hidden_size)
    return Decoder(embedding, layers, norm, output)
