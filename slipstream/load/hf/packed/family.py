"""The tensors that one matrix is stored as. In a quantised folder X.weight is a family of suffixes of X.

Every check of a shape reads the headers only; messages name the file and the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from slipstream.errors import CorruptFile, MissingTensor, UnknownModel
from slipstream.load.dequantize import dequantize
from slipstream.load.hf.instead import AGAIN, OTHER_TYPES
from slipstream.load.hf.safetensors import Entry, TensorStore
from slipstream.load.tensor import Place

MAIN = ("weight", "weight_packed", "qweight")  # one of them makes a family
SCALES = ("weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "scales", "biases")
OTHERS = ("weight_zero_point", "weight_shape", "weight_g_idx", "qzeros", "g_idx", "meta", "SCB", "weight_format")
# Of activations and of the KV cache, which are not quantised here.
UNUSED = (
    *("input_scale", "input_global_scale", "input_zero_point", "input_scale_ub", "activation_scale"),
    *("output_scale", "output_global_scale", "output_zero_point"),
    *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"),
    *("k_zero_point", "v_zero_point", "q_zero_point", "k_global_scale", "v_global_scale", "q_global_scale"),
    *("k_bias", "v_bias"),
)
ROLES = frozenset((*MAIN, *SCALES, *OTHERS, *UNUSED))
BITSANDBYTES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")  # after "X.weight."
STACKS = ("gate_up_proj", "down_proj")  # all experts in one tensor, whose name has no ".weight"
FLOATS = ("BF16", "F32", "F16")


@dataclass(frozen=True, slots=True)
class Hints:
    """What tensors do not say: how GPTQ's zero points are stored. None: the configuration does not say it either."""

    zeros_as_they_are: bool = False  # GPTQ v2; v1 stores them less one
    symmetric: bool | None = None


@dataclass(frozen=True, slots=True)
class Family:
    name: str  # of the matrix, canonical
    where: str  # the folder, for messages
    store: TensorStore
    hints: Hints
    on_disk: dict[str, str] = field(default_factory=dict)  # role -> name in the file

    def __contains__(self, role: str) -> bool:
        return role in self.on_disk

    @property
    def base(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def main(self) -> str:
        return next(role for role in reversed(MAIN) if role in self.on_disk)

    @property
    def num_bytes(self) -> int:
        return sum(self.store.entry(stored).num_bytes for stored in self.on_disk.values())

    @property
    def places(self) -> list[Place]:
        return [self.store.place(stored) for stored in self.on_disk.values()]

    def label(self, role: str) -> str:
        """The name that a tensor has, or would have."""
        if role in self.on_disk:
            return self.on_disk[role]
        if self.name.endswith(".weight"):
            return f"{self.base}.{role}"
        return f"{self.base}_{role.removeprefix('weight_')}"

    def entry(self, role: str) -> Entry:
        if role not in self.on_disk:
            raise MissingTensor(f"{self.where}: {self.label(role)!r} is missing, which {self.name} needs: {AGAIN}.")
        return self.store.entry(self.on_disk[role])

    def array(self, role: str) -> np.ndarray:
        self.entry(role)
        return self.store.array(self.on_disk[role])

    def floats(self, role: str) -> np.ndarray:
        """float32"""
        self.entry(role)
        return dequantize(self.store.get(self.on_disk[role]))

    def check(self, role: str, dtypes: Iterable[str], *shapes: tuple[int, ...]) -> Entry:
        """Its type is one of these, and its shape."""
        entry, dtypes = self.entry(role), tuple(dtypes)
        if entry.dtype not in dtypes:
            known = ", ".join(dtypes)
            raise UnknownModel(
                f"{self.where}: {self.label(role)} is stored as {entry.dtype}, only {known} can be read: {OTHER_TYPES}."
            )
        if entry.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise CorruptFile(
                f"{self.where}: {self.label(role)} is {list(entry.shape)}, but beside {self.label(self.main)}, "
                f"{list(self.entry(self.main).shape)}, it should be {wanted}: {AGAIN}."
            )
        return entry

    def matrix(self, role: str, dtypes: Iterable[str]) -> tuple[int, ...]:
        """The shape of a tensor that is a matrix, or a stack of them, and not empty."""
        shape = self.entry(role).shape
        if len(shape) < 2 or 0 in shape:
            raise CorruptFile(f"{self.where}: {self.label(role)} is no matrix, its shape is {list(shape)}: {AGAIN}.")
        self.check(role, dtypes, shape)
        return shape

    def unreadable(self, why: str) -> UnknownModel:
        return UnknownModel(f"{self.where}: {self.name} {why}, which cannot be read: {OTHER_TYPES}.")


def families(names: Mapping[str, str], where: str, store: TensorStore, hints: Hints) -> dict[str, Family]:
    """By the name of the matrix. Tensors that are no part of one are families of their own. `names`: canonical name ->
    name in the file."""
    found: dict[str, Family] = {}
    for name, stored in names.items():
        matrix, role = _member(name)
        if matrix not in found:
            found[matrix] = Family(matrix, where, store, hints)
        if role in found[matrix].on_disk:
            raise CorruptFile(
                f"{where} holds both {stored!r} and {found[matrix].on_disk[role]!r}, the same tensor twice: {AGAIN}."
            )
        found[matrix].on_disk[role] = stored
    return {name: family for name, family in found.items() if any(role in family for role in MAIN)}


def _member(name: str) -> tuple[str, str]:
    """The matrix that a tensor belongs to, and its role there."""
    base, _, last = name.rpartition(".")
    if last in ROLES:
        return _matrix(base), last
    if base.endswith(".weight") and last in BITSANDBYTES:
        return base, last
    if ".weight.quant_state." in name:
        return name.partition(".quant_state.")[0], "quant_state"
    stack = next((each for each in STACKS if last.startswith(f"{each}_")), None)
    if stack is None or not base.endswith(".experts"):
        return name, "weight"
    role = last.removeprefix(f"{stack}_")
    role = role if role in ROLES else f"weight_{role}"
    return (f"{base}.{stack}", role) if role in ROLES else (name, "weight")


def _matrix(base: str) -> str:
    return base if base.endswith(tuple(f".experts.{each}" for each in STACKS)) else f"{base}.weight"
