"""As much of Gluon as our kernels use, on tensors of a CPU: program after program, copies as late as they may come.

The target of a copy is NaN until the program waits for it; data of other kernels may be read after the wait for the
previous kernel only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr


class Block(Tensor):
    """A tensor that splits as Gluon's do."""

    def split(self, *_: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        assert self.shape[-1] == 2
        return self[..., 0], self[..., 1]


def block_of(tensor: Tensor) -> Block:
    return tensor.as_subclass(Block)


@dataclass
class Pdl:
    """The state of one program."""

    waited: bool = False
    launched_next: bool = False


@dataclass
class Pointer:
    memory: Tensor  # flat
    pdl: Pdl
    constant: bool = False  # no kernel writes it: it may be read before the wait
    at: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.pdl, self.constant, self.at + offset)


@dataclass
class Tiles:
    """A descriptor."""

    matrix: Tensor
    block: Sequence[int]
    pdl: Pdl
    constant: bool
    layout: None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    def tile(self, row: int, column: int) -> Tensor:
        """Zeros beyond the matrix."""
        tile = torch.zeros(*self.block, dtype=self.dtype)
        found = self.matrix[row : row + self.block[0], column : column + self.block[1]]
        tile[: found.shape[0], : found.shape[1]] = found
        return tile


@dataclass
class Barrier:
    expected: int = 0
    phase: int = 0
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Barriers:
    def __init__(self, count: int) -> None:
        self._all = [Barrier() for _ in range(count)]

    def index(self, i: int) -> Barrier:
        return self._all[i]


class Shared:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def index(self, i: int) -> Shared:
        return Shared(self.tensor[i])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.tensor.permute(*order))


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Barriers | Shared:
    if dtype == torch.int64:
        return Barriers(shape[0])
    return Shared(torch.full(tuple(shape), float("nan"), dtype=dtype))


def fetch(source: Tiles, at: Sequence[Any], barrier: Barrier, target: Shared, pred: Any = True) -> None:
    if pred:
        assert source.constant or source.pdl.waited, "read before the wait"
        target.tensor.fill_(float("nan"))
        barrier.copies.append((source.tile(int(at[0]), int(at[1])), target.tensor))


def expect(barrier: Barrier, num_bytes: int, pred: Any = True) -> None:
    if pred:
        assert not barrier.expected
        barrier.expected = num_bytes


def wait(barrier: Barrier, phase: int) -> None:
    assert phase == barrier.phase % 2, "it would never end, or not wait at all"
    assert barrier.expected == sum(target.nbytes for _, target in barrier.copies) > 0
    for tile, target in barrier.copies:
        target.copy_(tile)
    barrier.copies.clear()
    barrier.expected = 0
    barrier.phase += 1


def load(pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Tensor:
    assert pointer.constant or pointer.pdl.waited, "read before the wait"
    at = torch.as_tensor(pointer.at)
    if mask is None:
        return block_of(pointer.memory[at])
    there = mask.broadcast_to(at.shape)
    found = pointer.memory[torch.where(there, at, 0)]
    return block_of(torch.where(there, found, torch.tensor(other, dtype=found.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    assert pointer.pdl.waited, "written before the wait"
    at = torch.as_tensor(pointer.at)
    values = torch.as_tensor(value).to(pointer.memory.dtype).broadcast_to(at.shape)
    there = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.broadcast_to(at.shape)
    pointer.memory[at[there]] = values[there]


def atomic_add(pointer: Pointer, value: int, sem: str) -> int:
    before = int(pointer.memory[int(pointer.at)])
    pointer.memory[int(pointer.at)] += value
    return before


def run(kernel: Any, grid: tuple[int, int], arguments: dict[str, Any], pdl: Pdl) -> None:
    """All programs of a ``gluon.jit`` function; its arguments hold ``pdl``, which is reset for each program."""
    where = [0, 0]

    def wait_for_previous() -> None:
        pdl.waited = True

    def launch_dependents() -> None:
        assert pdl.waited
        pdl.launched_next = True

    anything: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    language = SimpleNamespace(
        constexpr=None, int64=torch.int64, float32=torch.float32, static_range=range,
        program_id=lambda axis: torch.tensor(where[axis]), allocate_shared_memory=allocate,
        NVMMADistributedLayout=anything, BlockedLayout=anything, SliceLayout=anything,
        arange=lambda start, end, _: block_of(torch.arange(start, end)),
        zeros=lambda shape, dtype, _: block_of(torch.zeros(*shape, dtype=dtype)),
        convert_layout=lambda value, _: value, load=load, store=store, atomic_add=atomic_add,
        rsqrt=torch.rsqrt, exp=torch.exp, sum=lambda x, axis: x.sum(axis),
        where=lambda a, b, c: block_of(torch.where(a, b, torch.tensor(c, dtype=b.dtype))),
    )  # fmt: skip
    barriers = SimpleNamespace(init=anything, expect=expect, wait=wait, MBarrierLayout=anything)
    functions = {
        "gl": language, "mbarrier": barriers, "fetch": fetch, "barrier": anything,
        "wait_for_previous": wait_for_previous, "launch_dependents": launch_dependents,
        "warpgroup_mma": lambda a, b, total, is_async: total + a.tensor.float() @ b.tensor.float(),
        "warpgroup_mma_wait": lambda num_outstanding, deps: deps[0],
    }  # fmt: skip
    constants = {name: each.value for name, each in kernel.fn.__globals__.items() if isinstance(each, constexpr)}
    body = FunctionType(kernel.fn.__code__, kernel.fn.__globals__ | constants | functions)
    for where[0], where[1] in product(*map(range, grid)):
        pdl.waited = pdl.launched_next = False
        body(**arguments)
        assert pdl.waited
        assert pdl.launched_next
