"""The bytes a decoding step of one stream cannot avoid to move, from shapes alone: the bandwidth's limit on its speed.

Counted: every weight that takes part but the embedding table (of experts, those that the step is expected to touch);
the KV before the token; the recurrent states, read and written. No step is charged with activations: the limit is a
little too strict, never too mild.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.load import OpenedModel
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import Checkpoint
from slipstream.runners.torch.memory import MemoryPlan
from slipstream.runners.torch.placement import Placement
from slipstream.runners.torch.weights import LinearFormat

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes."""

    spec: ModelSpec
    dense: int  # weights that every step reads, the output matrix among them
    experts: int  # of all layers together, were all of them touched
    head_dense: int
    head_experts: int
    draft_output: int  # the part of the output matrix that a draft pass reads
    kv_per_token: int
    states: int

    def step(self, depth: int, context: int) -> int:
        """Verification of ``depth`` drafts and as many passes of the head behind it."""
        num_tokens = 1 + depth
        trunk = self.dense + int(self.experts * self._touched(num_tokens))
        moved = trunk + context * self.kv_per_token + 2 * self.states
        if depth:
            # The head is fed the step's tokens, which yields the first draft; each further one is a pass of one token.
            moved += self.head_dense + int(self.head_experts * self._touched(num_tokens))
            moved += (depth - 1) * (self.head_dense + int(self.head_experts * self._touched(1)))
            moved += depth * self.draft_output
        return moved

    def _touched(self, num_tokens: int) -> float:
        """The share of experts that some of the tokens choose, if each chooses at random."""
        if self.spec.moe is None:
            return 0.0
        return 1.0 - (1.0 - self.spec.moe.num_active / self.spec.moe.num_experts) ** num_tokens


def floor_of(model: OpenedModel, placement: Placement, plan: MemoryPlan) -> Floor:
    spec, trunk = model.spec, model.checkpoint
    table = EMBEDDING if spec.tied else OUTPUT
    skipped = OUTPUT if spec.tied else EMBEDDING
    names = [name for name in trunk.names() if not spec.head.owns(name) and name != skipped]
    head = [name for name in model.head.names() if spec.head.owns(name)] if model.head else []
    dense, experts = _split(trunk, names, placement.form)
    head_dense, head_experts = _split(model.head or trunk, head, placement.head_form)
    return Floor(
        spec,
        dense,
        experts,
        head_dense,
        head_experts,
        _draft_output(placement, trunk, table),
        plan.kv_per_token,
        _state_bytes(spec),
    )


def _split(checkpoint: Checkpoint, names: list[str], form: LinearFormat) -> tuple[int, int]:
    """What every step reads, and the experts."""
    sizes = {name: form.of(name).stored_bytes(checkpoint.dtype(name), checkpoint.shape(name)) for name in names}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()) - experts, experts


def _draft_output(placement: Placement, trunk: Checkpoint, table: str) -> int:
    vocab, hidden = trunk.shape(table)
    own = placement.head_form.draft_bytes(placement.draft_vocab, (vocab, hidden))
    whole = placement.form.of(table).stored_bytes(trunk.dtype(table), (vocab, hidden))
    return own or whole * placement.draft_vocab // vocab


def _state_bytes(spec: ModelSpec) -> int:
    """Of one stream: the committed float32 states."""
    gdn = spec.gdn
    return 4 * spec.num_gdn_layers * math.prod((gdn.num_v_heads, gdn.k_dim, gdn.v_dim)) if gdn else 0
