"""The MTP head: finds its tensors, in the model's own checkpoint or in a file of its own, and checks that they fit.

Owns the reason for a missing head, one sentence. Does not know how a head is run.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from slipstream.errors import HeadError, LoadError
from slipstream.load.gguf.file import GgufCheckpoint, open_gguf_head
from slipstream.load.gguf.header import is_gguf
from slipstream.load.hf.folder import HfCheckpoint, read_hints
from slipstream.load.hf.safetensors import SafetensorsFile, TensorStore, open_folder
from slipstream.load.shapes import ExpertLayout, Shapes, layer_shapes, mismatch, mlp_shapes, stored_experts
from slipstream.load.spec import HeadSpec, ModelSpec
from slipstream.load.tensor import Checkpoint

HEAD_FILES = ("mtp-*.gguf", "MTP/mtp-*.gguf")  # beside a model's .gguf file


def open_head(path: Path, spec: ModelSpec) -> Checkpoint:
    """The head in a .gguf or safetensors file, or in a folder. HeadError when it is not one of this model."""
    head: Checkpoint
    if is_gguf(path):
        head = open_gguf_head(path, spec)
    else:
        head = HfCheckpoint(str(path), spec, _open_store(path), read_hints(path if path.is_dir() else path.parent))
    check_head(head, spec)
    return head


def find_head(checkpoint: Checkpoint, mtp_path: Path | None) -> tuple[Checkpoint | None, str]:
    """The head's tensors and "", or None and the reason: a head that cannot be used never stops the model."""
    try:
        if mtp_path is not None:
            return open_head(mtp_path, checkpoint.spec), ""
        if not any(checkpoint.spec.head.owns(name) for name in checkpoint.names()):
            beside = _head_beside(checkpoint) if isinstance(checkpoint, GgufCheckpoint) else None
            return beside, "" if beside is not None else _why_absent(checkpoint.spec.head)
        check_head(checkpoint, checkpoint.spec)
    except LoadError as error:
        return None, f"no MTP head: {error}"
    return checkpoint, ""


def heads_beside(path: Path) -> list[Path]:
    """The files that are called as heads are, next to a model's file: the one whose name is most like its own first."""
    found = [each for pattern in HEAD_FILES for each in path.parent.glob(pattern) if each != path]
    return sorted(found, key=lambda each: (-_alike(each.name.removeprefix("mtp-"), path.name), each.name))


def _alike(name: str, other: str) -> int:
    """How many letters both names begin with."""
    pairs = zip(name.lower(), other.lower(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _head_beside(checkpoint: GgufCheckpoint) -> Checkpoint | None:
    """None when there is none that fits: a folder may hold several models."""
    for path in heads_beside(Path(checkpoint.path)):
        try:
            return open_head(path, checkpoint.spec)
        except LoadError:
            continue
    return None


def find_any_head(checkpoint: HfCheckpoint, mtp_path: Path | None) -> tuple[Checkpoint | None, str]:
    """As find_head, but the shapes are not checked: for a runner with loaders of its own."""
    if mtp_path is not None:
        if is_gguf(mtp_path):
            return open_gguf_head(mtp_path, checkpoint.spec), ""
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


def head_shapes(spec: ModelSpec, layout: ExpertLayout = "fused") -> Shapes:
    """fc first: when a head belongs to another model, its shape says so best. `layout`: of experts, if it has some."""
    head, hidden = spec.head, spec.hidden_size
    shapes: Shapes = {f"{head.fc}.weight": (hidden, len(head.inputs) * hidden)}
    shapes |= {f"{norm}.weight": (hidden,) for norm in (*head.input_norms, head.norm)}
    for layer in head.layers:
        shapes |= layer_shapes(spec, f"{layer}.", head.layer_kind == "full_attention")
        shapes |= mlp_shapes(spec, f"{layer}.mlp.", layout)
    return shapes


def expert_layout(head: Checkpoint, spec: ModelSpec) -> ExpertLayout:
    return stored_experts(head, f"{spec.head.layers[0]}.")


def _open_store(path: Path) -> TensorStore:
    if path.is_dir():
        return open_folder(path)
    if not path.exists():
        raise HeadError(f"{path}, given as the MTP head, does not exist.")
    return SafetensorsFile(path)
