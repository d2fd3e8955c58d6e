"""A decoder as the rest of the runner sees it: ``embed``, ``forward`` and ``unembed``.

Its input are embeddings, of tokens or of anything else. Families differ in their layers only; each family's file builds
a list of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.load.spec import ModelSpec
from slipstream.runners.torch.batch import Batch
from slipstream.runners.torch.models.layers import Layers, load_norm
from slipstream.runners.torch.ops import Linear, RmsNorm
from slipstream.runners.torch.weights import Weights


@dataclass(frozen=True, slots=True)
class Decoder:
    embedding: Linear
    layers: Layers
    norm: RmsNorm
    output: Linear

    def embed(self, tokens: Tensor) -> Tensor:
        """[tokens, hidden]"""
        return self.embedding.rows(tokens)

    def forward(self, embedded: Tensor, batch: Batch) -> Tensor:
        """Hidden states after the final norm; ``embedded`` may be overwritten. [tokens, hidden]"""
        return self.norm(self.body(embedded, batch))

    def body(self, embedded: Tensor, batch: Batch) -> Tensor:
        """All but the final norm; ``embedded`` may be overwritten. [tokens, hidden]"""
        return self.layers(embedded, batch)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits. [rows, vocab]"""
        return self.output(hidden)


def load_decoder(weights: Weights, spec: ModelSpec, layers: Layers) -> Decoder:
    embedding = weights.linear(["model.embed_tokens"], [spec.vocab_size], spec.hidden_size, role="column")
    norm = load_norm(weights, "model.norm", spec)
    if spec.tied:
        return Decoder(embedding, layers, norm, embedding)
    output = weights.linear(["lm_head"], [spec.vocab_size], spec.hidden_size, role="column")
    return Decoder(embedding, layers, norm, output)
