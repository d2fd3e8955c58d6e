"""From a checkpoint's raw tensors to a model's matrices: merged, converted once, checked for shape.

Owns the choice of storage format. Knows names, shapes and roles, not layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import MissingTensor, UnknownModel
from slipstream.load.dequantize import dequantize
from slipstream.load.tensor import Checkpoint, RawTensor
from slipstream.runners.torch.experts import ExpertList, Experts
from slipstream.runners.torch.ops import DenseLinear, HeadShape, Linear, LinearStack, Ops, ReorderedLinear
from slipstream.runners.torch.unpack import can_unpack, unpacked

CPU = torch.device("cpu")
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def as_tensor(raw: RawTensor, device: torch.device = CPU) -> Tensor:
    """The tensor in its own float type; blocks and FP8 dequantised to float32, on that device if it can do so."""
    if device.type != "cpu" and can_unpack(raw):
        return unpacked(raw, device)
    if raw.dtype not in PLAIN_TYPES:
        return torch.from_numpy(dequantize(raw)).view(raw.shape)
    data = np.array(raw.data, copy=True)  # off the memory map, writable, contiguous
    tensor = torch.from_numpy(data.view(np.int16) if raw.dtype == "BF16" else data)
    return tensor.view(PLAIN_TYPES[raw.dtype]).view(raw.shape)


Parts = Sequence[RawTensor]  # of one matrix, stacked along the output
# How a matrix may be sharded: by output features, by input features, or not at all.
Role = Literal["column", "row", "replicated"]


class LinearFormat(Protocol):
    """How matrices are stored on this device."""

    def of(self, name: str) -> LinearFormat:
        """That of the tensor with this name: some are better stored otherwise."""
        ...

    def linear(self, parts: Sequence[RawTensor], bias: Tensor | None) -> Linear:
        """One matrix of all parts, stacked along the output."""
        ...

    def experts(self, gate_up: Sequence[Parts], down: Sequence[Parts]) -> Experts:
        """The experts of one layer, a matrix of each kind for every one."""
        ...

    def dense_experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        """The same from stacks that are already on the device."""
        ...

    def dense(self, matrix: Tensor, bias: Tensor | None = None) -> Linear:
        """A matrix that is already on the device, [out, in], in a float type."""
        ...

    def stored_bytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        """Memory of a tensor of that type and shape once loaded."""
        ...

    def draft_bytes(self, num_rows: int, shape: tuple[int, int]) -> int:
        """Memory of ``for_drafts(num_rows)`` of a matrix of that shape, besides the matrix."""
        ...

    def unpacked_bytes(self, shape: tuple[int, int]) -> int:
        """Temporary memory of a product with a matrix of that shape, besides its result."""
        ...


class DenseFormat:
    """Every matrix in the activations' own type."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def of(self, name: str) -> LinearFormat:
        return self

    def linear(self, parts: Sequence[RawTensor], bias: Tensor | None) -> Linear:
        return self.dense(self.matrix(parts), bias)

    def matrix(self, parts: Parts) -> Tensor:
        device, dtype = self.ops.device, self.ops.dtype
        made = [as_tensor(part, device).to(device, dtype) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    def experts(self, gate_up: Sequence[Parts], down: Sequence[Parts]) -> Experts:
        return ExpertList([self.linear(p, None) for p in gate_up], [self.linear(p, None) for p in down], self.ops)

    def dense_experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        return ExpertList([self.dense(m) for m in gate_up], [self.dense(m) for m in down], self.ops)

    def dense(self, matrix: Tensor, bias: Tensor | None = None) -> Linear:
        return DenseLinear(matrix.to(self.ops.dtype), bias)

    def stored_bytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * torch.empty(0, dtype=self.ops.dtype).element_size()

    def draft_bytes(self, num_rows: int, shape: tuple[int, int]) -> int:
        return 0

    def unpacked_bytes(self, shape: tuple[int, int]) -> int:
        return 0


def linear_in_order(form: LinearFormat, parts: Parts, bias: Tensor | None, device: torch.device) -> Linear:
    """Of parts whose columns are stored in an order of their own (act-order): their input is brought into it."""
    if all(part.order is None for part in parts):
        return form.linear(parts, bias)
    runs: list[list[RawTensor]] = []
    for part in parts:
        if runs and _same_order(runs[-1][0].order, part.order):
            runs[-1].append(part)
        else:
            runs.append([part])
    made: list[Linear] = []
    start = 0
    for run in runs:
        stop = start + sum(part.shape[0] for part in run)
        linear = form.linear([replace(part, order=None) for part in run], None if bias is None else bias[start:stop])
        order = run[0].order
        made.append(linear if order is None else _reordered(linear, order, device))
        start = stop
    return made[0] if len(made) == 1 else LinearStack(tuple(made))


def _reordered(linear: Linear, order: np.ndarray, device: torch.device) -> Linear:
    forward = torch.from_numpy(order.astype(np.int64))
    return ReorderedLinear(linear, forward.to(device), forward.argsort().to(device))


def _same_order(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


class _OneByOne(Sequence[Parts]):
    """The matrices of experts, read when they are asked for: what is repacked on the way stands in memory alone."""

    def __init__(
        self,
        read: Callable[[Sequence[str], tuple[int, int]], list[RawTensor]],
        names: Sequence[Sequence[str]],
        shape: tuple[int, int],
    ) -> None:
        self._read, self._names, self._shape = read, names, shape

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, at: int) -> Parts: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Parts]: ...

    def __getitem__(self, at: int | slice) -> Parts | Sequence[Parts]:
        if isinstance(at, slice):
            return _OneByOne(self._read, self._names[at], self._shape)
        return self._read(self._names[at], self._shape)


class Weights:
    def __init__(self, checkpoint: Checkpoint, ops: Ops, form: LinearFormat, progress: Callable[[int], None]) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self.form = form
        self.roles: dict[str, Role] = {}  # of each matrix that a model asked for, by name
        self._progress = progress
        self._read: set[str] = set()  # whose progress is told

    def raw(self, name: str, shape: tuple[int, ...]) -> RawTensor:
        raw = self.checkpoint.get(name)
        if raw.shape != shape:
            raise MissingTensor(
                f"{self.checkpoint.path}: {name} is {list(raw.shape)}, but this model's config asks for {list(shape)}"
            )
        if name not in self._read:
            self._read.add(name)
            self._progress(self.checkpoint.num_bytes(name))
        return raw

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return as_tensor(self.raw(name, shape)).to(self.ops.device, dtype or self.ops.dtype)

    def vector(self, name: str, size: int) -> Tensor:
        """Norm weights and the like: at least float32."""
        return self.tensor(name, (size,), torch.promote_types(self.ops.dtype, torch.float32))

    def linear(
        self, names: Sequence[str], outs: Sequence[int], num_in: int, *, role: Role, bias: bool = False
    ) -> Linear:
        """The matrices of ``names``, stacked along the output. ``role`` is recorded; nothing is sharded yet."""
        self.roles |= dict.fromkeys(names, role)
        return self._linear(names, outs, num_in, bias)

    def _linear(self, names: Sequence[str], outs: Sequence[int], num_in: int, bias: bool) -> Linear:
        parts = [self.raw(f"{n}.weight", (out, num_in)) for n, out in zip(names, outs, strict=True)]
        biases = [self.tensor(f"{n}.bias", (out,)) for n, out in zip(names, outs, strict=True)] if bias else []
        return self._matrix(self.form.of(names[0]), parts, torch.cat(biases) if biases else None)

    def gated_qkv(self, names: Sequence[str], heads: HeadShape, num_in: int) -> Linear:
        """q_proj holds query and gate alternating by head: brought into the order q, k, v, gate."""
        self.roles |= dict.fromkeys(names, "column")
        return self._gated_qkv(names, heads, num_in)

    def _gated_qkv(self, names: Sequence[str], heads: HeadShape, num_in: int) -> Linear:
        q_rows, kv_rows = heads.num_q * heads.dim, heads.num_kv * heads.dim
        mixed = self.raw(f"{names[0]}.weight", (2 * q_rows, num_in))
        k, v = (self.raw(f"{n}.weight", (kv_rows, num_in)) for n in names[1:])
        # [query heads, query or gate, dim]
        rows = np.arange(2 * q_rows).reshape(heads.num_q, 2, heads.dim)
        query, gate = (mixed.rows(rows[:, i].ravel()) for i in (0, 1))
        return self._matrix(self.form.of(names[0]), [query, k, v, gate])

    def experts(self, name: str, count: int, inner: int, hidden: int) -> Experts:
        """All experts of a layer, stored as two stacks, as three, or one by one."""
        gate_up: Sequence[Parts]
        down: Sequence[Parts]
        if f"{name}.gate_up_proj" in self.checkpoint:
            gate_up = self._stack(f"{name}.gate_up_proj", (count, 2 * inner, hidden))
            down = self._stack(f"{name}.down_proj", (count, hidden, inner))
        elif f"{name}.gate_proj" in self.checkpoint:
            gates, ups = (self._stack(f"{name}.{part}_proj", (count, inner, hidden)) for part in ("gate", "up"))
            gate_up = [gate + up for gate, up in zip(gates, ups, strict=True)]
            down = self._stack(f"{name}.down_proj", (count, hidden, inner))
        else:
            each = [f"{name}.{e}" for e in range(count)]
            gate_up = _OneByOne(self._expert, [(f"{e}.gate_proj", f"{e}.up_proj") for e in each], (inner, hidden))
            down = _OneByOne(self._expert, [(f"{e}.down_proj",) for e in each], (hidden, inner))
        made = self.form.experts(gate_up, down)
        self.checkpoint.release()
        return made

    def _stack(self, name: str, shape: tuple[int, int, int]) -> list[list[RawTensor]]:
        raw = self._unordered(self.raw(name, shape))
        count, num_rows, _ = shape
        return [[raw.rows(slice(e * num_rows, (e + 1) * num_rows))] for e in range(count)]

    def _expert(self, names: Sequence[str], shape: tuple[int, int]) -> list[RawTensor]:
        return [self._unordered(self.raw(f"{name}.weight", shape)) for name in names]

    def _unordered(self, raw: RawTensor) -> RawTensor:
        if raw.order is not None:
            raise UnknownModel(
                f"{self.checkpoint.path}: {raw.name} was quantised in act-order (desc_act), which experts cannot be: "
                "take the model quantised without it."
            )
        return raw

    def _matrix(self, form: LinearFormat, parts: Sequence[RawTensor], bias: Tensor | None = None) -> Linear:
        made = linear_in_order(form, parts, bias, self.ops.device)
        self.checkpoint.release()  # converted: the file's own pages are not needed any more
        return made
