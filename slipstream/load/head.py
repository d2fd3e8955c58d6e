"""The MTP head: finds its tensors, in the model's own checkpoint or in a file of its own, and checks that they fit.

Owns the reason for a missing head, one sentence. Does not know how a head is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from slipstream.errors import HeadError, LoadError
from slipstream.load.hf.folder import HfCheckpoint, read_hints
from slipstream.load.hf.safetensors import SafetensorsFile, TensorStore, open_folder
from slipstream.load.shapes import Shapes, layer_shapes, mismatch, mlp_shapes, separate_experts
from slipstream.load.spec import HeadSpec, ModelSpec
from slipstream.load.tensor import Checkpoint

ExpertLayout = Literal["none", "fused", "separate"]


def open_head(path: Path, spec: ModelSpec) -> Checkpoint:
    """The head in a safetensors file, or in a folder of them. HeadError when it is not one of this model."""
    head = HfCheckpoint(str(path), spec, _open_store(path), read_hints(path if path.is_dir() else path.parent))
    check_head(head, spec)
    return head


def find_head(checkpoint: Checkpoint, mtp_path: Path | None) -> tuple[Checkpoint | None, str]:
    """The head's tensors and "", or None and the reason: a head that cannot be used never stops the model."""
    try:
        if mtp_path is not None:
            return open_head(mtp_path, checkpoint.spec), ""
        if not any(checkpoint.spec.head.owns(name) for name in checkpoint.names()):
            return None, _why_absent(checkpoint.spec.head)
        check_head(checkpoint, checkpoint.spec)
    except LoadError as error:
        return None, f"no MTP head: {error}"
    return checkpoint, ""


def find_any_head(checkpoint: HfCheckpoint, mtp_path: Path | None) -> tuple[Checkpoint | None, str]:
    """As find_head, but the shapes are not checked: for a runner with loaders of its own."""
    if mtp_path is not None:
        return HfCheckpoint(str(mtp_path), checkpoint.spec, _open_store(mtp_path)), ""
    head = checkpoint.spec.head
    if any(head.prefix in name for name in checkpoint.names()):
        return checkpoint, ""
    return None, _why_absent(head)


def _why_absent(head: HeadSpec) -> str:
    missing = f"the checkpoint has no {head.prefix}* tensors"
    if head.num_declared_layers:
        missing = f"config.json announces {head.num_declared_layers} MTP layer(s), but {missing}"
    return f"no MTP head: {missing}; give one with --mtp"


def check_head(head: Checkpoint, spec: ModelSpec) -> None:
    for name, shape in head_shapes(spec, expert_layout(head, spec)).items():
        if wrong := mismatch(head, name, shape):
            raise HeadError(f"{head.path} is not an MTP head of this model: {wrong}.")


def head_shapes(spec: ModelSpec, layout: ExpertLayout) -> Shapes:
    """fc first: when a head belongs to another model, its shape says so best."""
    head, hidden = spec.head, spec.hidden_size
    shapes: Shapes = {f"{head.fc}.weight": (hidden, len(head.inputs) * hidden)}
    shapes |= {f"{norm}.weight": (hidden,) for norm in (*head.input_norms, head.norm)}
    for layer in head.layers:
        shapes |= layer_shapes(spec, f"{layer}.", head.layer_kind == "full_attention")
        shapes |= mlp_shapes(spec, f"{layer}.mlp.", layout == "separate")
    return shapes


def expert_layout(head: Checkpoint, spec: ModelSpec) -> ExpertLayout:
    if spec.moe is None:
        return "none"
    return "separate" if separate_experts(head, f"{spec.head.layers[0]}.") else "fused"


def _open_store(path: Path) -> TensorStore:
    if path.is_dir():
        return open_folder(path)
    if not path.exists():
        raise HeadError(f"{path}, given as the MTP head, does not exist.")
    return SafetensorsFile(path)
