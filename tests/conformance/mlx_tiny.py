"""Tiny checkpoints on MLX: opened as they are, or packed into 4 or 8 bits first, their head included."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config, quantize_model

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.load import open_model
from slipstream.runners.mlx.backend import MlxBackend
from slipstream.runners.mlx.loaders.heads import load_head
from slipstream.runners.mlx.loaders.models import load_target
from slipstream.runners.mlx.loading import MlxRunner
from slipstream.runners.mlx.target import OpenTarget

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
    model = load_target(opened, "auto")
    head = load_head(opened.head, opened.spec.architecture, OpenTarget(model).args, mx.float32)
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
