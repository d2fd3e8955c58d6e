"""The MTP head: finds its tensors, in the model's own checkpoint or in a file of its own, and checks that they fit.

Owns the sentence that says why there is no head. Does not know how a head is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from slipstream.errors import HeadError, LoadError
from slipstream.load.hf.folder import HfCheckpoint
from slipstream.load.hf.safetensors import SafetensorsFile, TensorStore, open_folder
from slipstream.load.shapes import Shapes, layer_shapes, mismatch, mlp_shapes, separate_experts
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import Checkpoint

NO_HEAD = "no MTP head: the checkpoint has no mtp.* tensors; give one with --mtp"
LAYER = "mtp.layers.0."
ExpertLayout = Literal["none", "fused", "separate"]


def open_head(path: Path, spec: ModelSpec) -> Checkpoint:
    """The head in a safetensors file, or in a folder of them. HeadError when it is not one of this model."""
    head = HfCheckpoint(str(path), spec, _open_store(path))
    check_head(head, spec)
    return head


def find_head(checkpoint: Checkpoint, mtp_path: Path | None) -> tuple[Checkpoint | None, str]:
    """The head's tensors and "", or None and the reason: a head that cannot be used never stops the model."""
    try:
        if mtp_path is not None:
            return open_head(mtp_path, checkpoint.spec), ""
        if not any(name.startswith("mtp.") for name in checkpoint.names()):
            return None, NO_HEAD
        check_head(checkpoint, checkpoint.spec)
    except LoadError as error:
        return None, f"no MTP head: {error}"
    return checkpoint, ""


def find_any_head(checkpoint: HfCheckpoint, mtp_path: Path | None) -> tuple[Checkpoint | None, str]:
    """As find_head, but the shapes are not checked: for a runner that knows more architectures than we do."""
    if mtp_path is not None:
        return HfCheckpoint(str(mtp_path), checkpoint.spec, _open_store(mtp_path)), ""
    if any("mtp." in name for name in checkpoint.names()):
        return checkpoint, ""
    return None, NO_HEAD


def check_head(head: Checkpoint, spec: ModelSpec) -> None:
    for name, shape in head_shapes(spec, expert_layout(head, spec)).items():
        if wrong := mismatch(head, name, shape):
            raise HeadError(f"{head.path} is not an MTP head of this model: {wrong}.")


def head_shapes(spec: ModelSpec, layout: ExpertLayout) -> Shapes:
    """fc first: when a head belongs to another model, its shape says so best."""
    hidden = spec.hidden_size
    shapes: Shapes = {"mtp.fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{norm}.weight": (hidden,) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes |= layer_shapes(spec, LAYER, full_attention=True)
    return shapes | mlp_shapes(spec, LAYER + "mlp.", layout == "separate")


def expert_layout(head: Checkpoint, spec: ModelSpec) -> ExpertLayout:
    if spec.moe is None:
        return "none"
    return "separate" if separate_experts(head, LAYER) else "fused"


def _open_store(path: Path) -> TensorStore:
    if path.is_dir():
        return open_folder(path)
    if not path.exists():
        raise HeadError(f"{path}, given as the MTP head, does not exist.")
    return SafetensorsFile(path)
