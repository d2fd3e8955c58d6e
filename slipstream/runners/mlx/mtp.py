"""The Qwen-style MTP head as an MLX module: one decoder layer of the target's own kind between an entry and a norm.

x = fc(concat[norm_e(embed(token at p + 1)), norm_h(hidden at p)]), then the layer at position p with its own KV, then
``norm``. Parameters have the names they have in checkpoints after ``mtp.``. Drafts: host/drafter.py.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3, qwen3_5

from slipstream.load.spec import Architecture
from slipstream.runners.mlx.caches import KvCache


def _decoder_layer(architecture: Architecture, args: Any) -> nn.Module:
    match architecture:
        case "llama":
            return llama.TransformerBlock(args)
        case "qwen2":
            return qwen2.TransformerBlock(args)
        case "qwen3":
            return qwen3.TransformerBlock(args)
        case "qwen3_5" | "qwen3_5_moe":
            # Of the kind that every interval ends with: full attention.
            return qwen3_5.DecoderLayer(args, args.full_attention_interval - 1)
        case _:
            raise AssertionError(f"{architecture} has no head that we know")


class MtpHead(nn.Module):
    def __init__(self, architecture: Architecture, args: Any) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [_decoder_layer(architecture, args)]
        self.norm = nn.RMSNorm(size, eps)

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: KvCache) -> mx.array:
        """[rows, width, hidden] after ``norm``: what the output matrix reads, and the next draft's hidden state."""
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(both, axis=-1))
        normed: mx.array = self.norm(self.layers[0](x, cache.make_mask(x.shape[1]), cache))
        return normed
