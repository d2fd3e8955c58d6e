"""From a checkpoint's tensors to an MtpHead: raw or packed, in the model's own checkpoint or in a file of their own.

mlx-lm folds the 1 of Qwen3.5's ``1 + w`` norms into the weights when it reads a raw checkpoint. The norms of a head may
be stored either way, so their numbers decide: stored as ``w`` they lie around 0, folded around 1.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from slipstream.errors import HeadError, LoadError
from slipstream.load import Checkpoint
from slipstream.load.gguf.file import GgufCheckpoint
from slipstream.load.spec import Architecture, HeadSpec
from slipstream.runners.mlx.loaders.folder_weights import folder_parameters, is_packed
from slipstream.runners.mlx.loaders.gguf_weights import parameters
from slipstream.runners.mlx.loaders.models import Tensors, has_fp8_scales, name_in_head, quantise_like, stack_experts
from slipstream.runners.mlx.mtp import MtpHead

PLUS_ONE: tuple[Architecture, ...] = ("qwen3_5", "qwen3_5_moe")


def load_head(checkpoint: Checkpoint, architecture: Architecture, args: Any, dtype: mx.Dtype) -> MtpHead:
    """``args``: mlx-lm's, of the target model. Raises HeadError when it is not a head of this model."""
    if architecture == "other":
        raise HeadError(f"{checkpoint.path} has an MTP head, but heads of this architecture are not supported.")
    assert not checkpoint.spec.head.own_output
    stored = _stored(checkpoint, dtype)
    weights = _joined_experts(stored)
    if architecture in PLUS_ONE and not _folded(weights):
        weights = {name: weight + 1.0 if _is_norm(name) else weight for name, weight in weights.items()}
    head = MtpHead(architecture, args)
    quantise_like(head, weights)
    try:
        head.load_weights(list(weights.items()))
    except ValueError as error:
        raise HeadError(f"{checkpoint.path} is not an MTP head of this model: {error}") from error
    head.set_dtype(dtype)
    head.eval()
    return head


def _stored(checkpoint: Checkpoint, dtype: mx.Dtype) -> Tensors:
    """Under the names that they have within the head."""
    head = checkpoint.spec.head
    names = [name for name in checkpoint.names() if head.owns(name)]
    if isinstance(checkpoint, GgufCheckpoint):
        return {name.removeprefix(head.prefix): array for name, array in parameters(checkpoint, dtype, names)}
    if is_packed(checkpoint, names):
        try:
            return {name.removeprefix(head.prefix): each for name, each in folder_parameters(checkpoint, names, dtype)}
        except LoadError as error:
            raise HeadError(str(error)) from error
    stored = _read(Path(checkpoint.path), head)
    if has_fp8_scales(stored):
        raise HeadError(f"{checkpoint.path} has its MTP head in FP8, which only the torch runner reads.")
    return stored


def _read(path: Path, head: HeadSpec) -> Tensors:
    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        tensors: Tensors = mx.load(str(file))  # type: ignore[assignment]
        found |= {own: weight for name, weight in tensors.items() if (own := name_in_head(name, head)) is not None}
    return found


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight") or "pre_fc_norm" in name


def _folded(weights: Tensors) -> bool:
    means = [float(weight.astype(mx.float32).mean()) for name, weight in weights.items() if _is_norm(name)]
    return median(means) > 0.5


def _joined_experts(weights: Tensors) -> Tensors:
    """Experts, fused or apart, as mlx-lm's layers hold them: one array for all of them, by projection."""
    joined = dict(weights)
    mlp = "layers.0.mlp"
    if f"{mlp}.experts.gate_up_proj" in weights:
        gate, up = mx.split(joined.pop(f"{mlp}.experts.gate_up_proj"), 2, axis=-2)
        down = joined.pop(f"{mlp}.experts.down_proj")
        for part, weight in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
            joined[f"{mlp}.switch_mlp.{part}.weight"] = weight
    return stack_experts(joined)
