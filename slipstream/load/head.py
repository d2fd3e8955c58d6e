"""The MTP head: finds its tensors, in the model's own checkpoint or in a file of its own, and checks that they fit.

Owns the reason for a missing head, one sentence. Does not know how a head is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from slipstream.errors import HeadError, LoadError
from slipstream.load.gguf.file import GgufCheckpoint, open_gguf_head
from slipstream.load.gguf.header import is_gguf
from slipstream.load.hf.folder import HfCheckpoint, read_hints
from slipstream.load.hf.safetensors import SafetensorsFile, TensorStore, open_folder
from slipstream.load.shapes import ExpertLayout, Shapes, layer_shapes, mismatch, mlp_shapes, stored_experts
from slipstream.load.spec import ModelSpec
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


def find_head(checkpoint: Checkpoint, given: Path | None) -> tuple[Checkpoint | None, str]:
    """The head's tensors and "", or None and the reason. HeadError when the given one cannot be used; one that is only
    found never stops the model."""
    if given is not None:
        with _as_head_error():
            return open_head(given, checkpoint.spec), ""
    if not any(checkpoint.spec.head.owns(name) for name in checkpoint.names()):
        beside, why_not = _head_beside(checkpoint) if isinstance(checkpoint, GgufCheckpoint) else (None, "")
        return beside, "" if beside is not None else _why_absent(checkpoint, why_not)
    try:
        check_head(checkpoint, checkpoint.spec)
    except LoadError as error:
        return None, f"no MTP head: {error}"
    return checkpoint, ""


def try_head(path: Path, spec: ModelSpec) -> tuple[Checkpoint | None, str]:
    """As find_head, of a file that was found elsewhere."""
    try:
        return open_head(path, spec), ""
    except LoadError as error:
        return None, f"no MTP head: {error}"


@contextmanager
def _as_head_error() -> Iterator[None]:
    """Of a head that the user named."""
    try:
        yield
    except LoadError as error:
        raise HeadError(f"The MTP head that was given cannot be used: {error}") from error


def heads_beside(path: Path) -> list[Path]:
    """The files that are called as heads are, next to a model's file: the one whose name is most like its own first."""
    found = [each for pattern in HEAD_FILES for each in path.parent.glob(pattern) if each != path]
    return sorted(found, key=lambda each: (-_alike(each.name.removeprefix("mtp-"), path.name), each.name))


def _alike(name: str, other: str) -> int:
    """How many letters both names begin with."""
    pairs = zip(name.lower(), other.lower(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _head_beside(checkpoint: GgufCheckpoint) -> tuple[Checkpoint | None, str]:
    """Or None, and why the likest file is no head of this model: a folder may hold several models."""
    why_not = ""
    for path in heads_beside(Path(checkpoint.path)):
        try:
            return open_head(path, checkpoint.spec), ""
        except LoadError as error:
            why_not = why_not or f"; beside it, {str(error).rstrip('.')}"
    return None, why_not


def find_any_head(checkpoint: HfCheckpoint, given: Path | None) -> tuple[Checkpoint | None, str]:
    """As find_head, but the shapes are not checked: for a runner with loaders of its own."""
    if given is not None:
        with _as_head_error():
            return _open_any_head(given, checkpoint.spec), ""
    if _holds_head(checkpoint):
        return checkpoint, ""
    return None, _why_absent(checkpoint)


def _open_any_head(path: Path, spec: ModelSpec) -> Checkpoint:
    if is_gguf(path):
        return open_gguf_head(path, spec)
    head = HfCheckpoint(str(path), spec, _open_store(path))
    if not _holds_head(head):
        raise HeadError(f"{path} has no MTP head: it holds no {spec.head.prefix}* tensors.")
    return head


def _holds_head(checkpoint: HfCheckpoint) -> bool:
    return any(checkpoint.spec.head.prefix in name for name in checkpoint.names())


def _why_absent(checkpoint: Checkpoint, why_not_beside: str = "") -> str:
    """By the names that the tensors have in the files."""
    head, in_gguf = checkpoint.spec.head, isinstance(checkpoint, GgufCheckpoint)
    missing = f"the checkpoint has no {'nextn.' if in_gguf else head.prefix}* tensors"
    if head.num_declared_layers:
        where = "its metadata" if in_gguf else "config.json"
        missing = f"{where} announces {head.num_declared_layers} MTP layer(s), but {missing}"
    return f"no MTP head: {missing}{why_not_beside}; give one with --mtp"


def check_head(head: Checkpoint, spec: ModelSpec) -> None:
    shapes = head_shapes(spec, expert_layout(head, spec))
    for name, shape in shapes.items():
        if wrong := mismatch(head, name, shape):
            raise HeadError(f"{head.path} is not an MTP head of this model: {wrong}.")
    if isinstance(head, HfCheckpoint):
        head.check_beside(shapes)


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
