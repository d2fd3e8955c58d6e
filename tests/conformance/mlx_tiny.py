"""Tiny checkpoints on MLX: opened as they are, or packed into 4 or 8 bits first, their head included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import tiny
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config, quantize_model
from script import Script

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.load import open_model
from slipstream.runners.mlx.backend import MlxBackend
from slipstream.runners.mlx.drafter import Ends, Proposal, no_proposal
from slipstream.runners.mlx.grid import Grid
from slipstream.runners.mlx.heads import load_head
from slipstream.runners.mlx.models import load_lazily
from slipstream.runners.mlx.runner import MlxRunner
from slipstream.runners.mlx.trunk import OpenTrunk

GROUP = 32


def open_mlx(
    folder: Path, *, streams: int = 4, max_depth: int = 4, mtp: Path | None = None, dtype: str = "float32"
) -> MlxRunner:
    model = open_model(str(folder), str(mtp) if mtp else None, any_architecture=True)
    engine = EngineConfig(max_streams=streams, block_size=8, max_depth=max_depth)
    return MlxBackend(RunnerConfig(dtype=dtype, kv_memory=100_000_000, draft_vocab=0)).load(model, engine)


def packed(folder: Path, target: Path, bits: int) -> Path:
    """As a converter to MLX would write it: matrices packed, norms with their 1 folded in, the head beside them."""
    opened = open_model(str(folder), any_architecture=True)
    model = load_lazily(opened, "auto")
    head = load_head(opened.head, opened.spec.family, OpenTrunk(model).args, mx.float32)
    model, config = quantize_model(model, load_config(folder), GROUP, bits)
    nn.quantize(head, GROUP, bits, class_predicate=_fits)
    weights = dict(tree_flatten(model.parameters()))
    weights |= {f"mtp.{name}": weight for name, weight in tree_flatten(head.parameters())}
    target.mkdir(exist_ok=True)
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config))
    return target


def _fits(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP == 0


class ScriptedDrafter:
    """Proposes from each stream's true continuation, found by its seed: right, wrong, or a guess."""

    def __init__(self, truth: Mapping[int, Sequence[int]], mode: str, max_depth: int = 4) -> None:
        self.max_depth = max_depth
        self._script = Script(truth, tiny.VOCAB, mode)

    def feed(self, hidden: mx.array, next_tokens: mx.array, grid: Grid) -> mx.array:
        return hidden

    def propose(self, fed: mx.array, ends: Ends) -> Proposal:
        depth = max(ends.propose, default=0)
        if depth == 0:
            return no_proposal(len(ends.rows))
        drafts = [[0] * depth for _ in ends.rows]
        for i, (row, span, accepted) in enumerate(zip(ends.rows, ends.spans, ends.accepted.tolist(), strict=True)):
            cursor = span.start + span.num_certain + accepted
            for j in range(ends.propose[i]):
                drafts[i][j] = self._script.token(row.draw.seed, cursor + 1 + j)
        return Proposal(mx.array(drafts, dtype=mx.int32), mx.array(ends.propose))
