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
from slipstream.runners.backend import Progress, ignore_progress
from slipstream.runners.mlx.loaders.folder_weights import check_types, folder_rules, is_packed
from slipstream.runners.mlx.loaders.gguf_weights import gguf_rules
from slipstream.runners.mlx.loaders.models import (
    Tensors,
    name_in_head,
    quantise_like,
    stack_experts,
    without_empty_biases,
)
from slipstream.runners.mlx.loaders.parameters import evaluate, parameters, slab_bytes, source_bytes
from slipstream.runners.mlx.mtp import MtpHead

PLUS_ONE: tuple[Architecture, ...] = ("qwen3_5", "qwen3_5_moe")


def load_head(
    checkpoint: Checkpoint,
    architecture: Architecture,
    args: Any,
    dtype: mx.Dtype,
    progress: Progress | None = ignore_progress,
) -> MtpHead:
    """``args``: mlx-lm's, of the target model. ``progress`` None: no matrix is read, nothing evaluated. Raises
    HeadError when it is not a head of this model."""
    if architecture == "other":
        raise HeadError(f"{checkpoint.path} has an MTP head, but heads of this architecture are not supported.")
    assert not checkpoint.spec.head.own_output
    names = _names(checkpoint)
    head = _with_weights(architecture, args, checkpoint, _stored(checkpoint, names, dtype, progress))
    head.set_dtype(dtype)
    head.eval()
    if progress is not None:
        told = _is_ours(checkpoint, names)
        evaluate(head, 0 if told else sum(map(checkpoint.num_bytes, names)), progress)
    return head


def _with_weights(architecture: Architecture, args: Any, checkpoint: Checkpoint, stored: Tensors) -> MtpHead:
    head = MtpHead(architecture, args)
    weights = without_empty_biases(head, _joined_experts(stored))
    if architecture in PLUS_ONE and not _folded(weights):
        weights = {name: weight + 1.0 if _is_norm(name) else weight for name, weight in weights.items()}
    quantise_like(head, weights)
    try:
        head.load_weights(list(weights.items()))
    except ValueError as error:
        raise HeadError(f"{checkpoint.path} is not an MTP head of this model: {error}") from error
    return head


def head_loading_bytes(checkpoint: Checkpoint, dtype: mx.Dtype) -> int:
    """What loading it takes beside the head, at most."""
    names = _names(checkpoint)
    return slab_bytes(checkpoint, names) if _is_ours(checkpoint, names) else source_bytes(checkpoint, names, dtype)


def _names(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.names() if checkpoint.spec.head.owns(name)]


def _stored(checkpoint: Checkpoint, names: list[str], dtype: mx.Dtype, progress: Progress | None) -> Tensors:
    """Under the names that they have within the head."""
    head = checkpoint.spec.head
    try:
        if not isinstance(checkpoint, GgufCheckpoint):
            check_types(checkpoint, names)
        if not _is_ours(checkpoint, names):
            return _read(Path(checkpoint.path), head)
        rules = gguf_rules if isinstance(checkpoint, GgufCheckpoint) else folder_rules
        made = parameters(checkpoint, names, rules(checkpoint, dtype), progress)
        return {name.removeprefix(head.prefix): array for name, array in made}
    except LoadError as error:
        raise HeadError(str(error)) from error


def _is_ours(checkpoint: Checkpoint, names: list[str]) -> bool:
    """Whether we read its tensors, and not MLX."""
    return isinstance(checkpoint, GgufCheckpoint) or is_packed(checkpoint, names)


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
