"""The Qwen-style MTP head: one decoder layer of the target model's own kind between an entry and a norm.

x = fc(concat[norm_e(embed(token at p + 1)), norm_h(hidden at p)]), then the layer at position p with its own KV, then
`norm`. It shares the target model's embedding and output matrix. It drafts nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.load.spec import ModelSpec
from slipstream.runners.torch.batch import Batch
from slipstream.runners.torch.models.layers import Layers, load_norm
from slipstream.runners.torch.ops import Linear, Ops, RmsNorm
from slipstream.runners.torch.weights import Weights


@dataclass(frozen=True, slots=True)
class MtpHead:
    norm_embedding: Tensor  # [hidden]
    norm_hidden: Tensor  # [hidden]
    fc: Linear
    layer: Layers
    norm: RmsNorm
    ops: Ops

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        """[tokens, hidden] after `norm`: the input of the output matrix, and the next draft's hidden state."""
        entry = self.ops.concat_norm(embedded, self.norm_embedding, hidden, self.norm_hidden, self.norm.eps)
        return self.norm(self.layer(self.fc(entry), batch))


def load_head(weights: Weights, spec: ModelSpec, layer: Layers) -> MtpHead:
    assert spec.head.inputs == ("embedding", "hidden")
    assert not spec.head.own_output
    norm_embedding, norm_hidden = (load_norm(weights, name, spec).weight for name in spec.head.input_norms)
    return MtpHead(
        norm_embedding,
        norm_hidden,
        weights.linear([spec.head.fc], [spec.hidden_size], 2 * spec.hidden_size, role="replicated"),
        layer,
        load_norm(weights, spec.head.norm, spec),
        weights.ops,
    )
