"""From a checkpoint's tensors to the parameters of mlx-lm's modules, one by one and each some rows at a time.

An array is evaluated as soon as it is made, and written into its place slab by slab: beside the parameters themselves
only a slab is in memory, and what a reader needs to bring a tensor of a file into rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from slipstream.errors import UnknownModel
from slipstream.load import Checkpoint, RawTensor
from slipstream.load.quantized.types import is_folder_type
from slipstream.runners.backend import Progress
from slipstream.runners.mlx.loaders.layouts import Arrays

SLAB = 1 << 20  # elements that become MLX's at once
SLAB_BYTES = 20  # for each of them: codes, and floats in between; 19 at most, measured for every type
FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
MATRICES_APART = re.compile(r"(?P<mlp>.+\.mlp)\.experts\.(?P<expert>\d+)\.(?P<part>\w+_proj)\.weight")


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or the first or second half of each matrix of a stack."""

    name: str
    half: int | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        if self.half is None:
            return whole
        *stack, rows, columns = whole
        return (*stack, rows // 2, columns)

    def num_bytes(self, checkpoint: Checkpoint) -> int:
        """In the file."""
        whole = checkpoint.num_bytes(self.name)
        return whole if self.half is None else (whole + self.half) // 2

    def slabs(self, raw: RawTensor) -> Iterator[RawTensor]:
        """The rows of all matrices, one after the other."""
        num_rows, total, step = raw.shape[-2], math.prod(raw.shape[:-1]), max(1, SLAB // raw.shape[-1])
        runs = [(0, total)]
        if self.half is not None:
            firsts = range(self.half * (num_rows // 2), total, num_rows)
            runs = [(first, first + num_rows // 2) for first in firsts]
        for start, stop in runs:
            yield from (raw.rows(slice(at, min(at + step, stop))) for at in range(start, stop, step))


@dataclass(frozen=True, slots=True)
class Rules:
    """Of a kind of checkpoint: what its tensors become."""

    become: Callable[[RawTensor], Arrays]  # some rows of a matrix, or a whole tensor
    # Of a name, a type and a shape: arrays of the same shapes and types, never to be evaluated.
    like: Callable[[str, str, tuple[int, ...]], Arrays]


def parameters(
    checkpoint: Checkpoint, names: Iterable[str], rules: Rules, progress: Progress | None
) -> Iterator[tuple[str, mx.array]]:
    """Under the names of mlx-lm's modules, evaluated. Progress in bytes of the files. None: only the same shapes and
    types, from headers alone, never to be evaluated."""
    for module, pieces in _modules(names).items():
        if progress is None:
            yield from _named(module, _like(checkpoint, module, pieces, rules))
            continue
        yield from _named(module, _read(checkpoint, pieces, rules))
        progress(sum(piece.num_bytes(checkpoint) for piece in pieces))
        checkpoint.release()  # converted: the file's own pages are not needed any more


def slab_bytes(checkpoint: Checkpoint, names: Iterable[str]) -> int:
    """What reading takes beside the parameters, at most: a slab, and a folder's tensor brought into rows."""
    brought = (checkpoint.num_bytes(name) for name in names if is_folder_type(checkpoint.dtype(name)))
    return SLAB * SLAB_BYTES + 2 * max(brought, default=0)


def source_bytes(checkpoint: Checkpoint, names: Iterable[str], dtype: mx.Dtype | None) -> int:
    """The same where MLX reads the file: what an array is made of, if it is not read as it is. ``dtype``: that floats
    are converted to; None: to none."""
    return max((_sources(checkpoint, pieces, dtype) for pieces in _modules(names).values()), default=0)


def _sources(checkpoint: Checkpoint, pieces: list[Piece], dtype: mx.Dtype | None) -> int:
    name = pieces[0].name
    source = sum(place.stop - place.start for piece in pieces for place in checkpoint.places(piece.name))
    if len(pieces) > 1:  # a stack, beside what it is stacked from
        return 2 * source
    is_part = source > checkpoint.num_bytes(name)
    is_cast = dtype is not None and FLOATS.get(checkpoint.dtype(name), dtype) != dtype
    return source if is_part or is_cast else 0


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Its rows may be taken apart."""
    return len(shape) > 1 and not name.endswith("conv1d.weight")


def _modules(names: Iterable[str]) -> dict[str, list[Piece]]:
    """By the name of the parameter. mlx-lm's experts are one module with a stack of each kind."""
    found: dict[str, list[Piece]] = {}
    apart: dict[str, dict[int, Piece]] = {}
    for name in names:
        mlp, _, stack = name.partition(".experts.")
        if match := MATRICES_APART.fullmatch(name):
            experts = apart.setdefault(f"{match['mlp']}.switch_mlp.{match['part']}.weight", {})
            experts[int(match["expert"])] = Piece(name)
        elif stack == "gate_up_proj":
            found[f"{mlp}.switch_mlp.gate_proj.weight"] = [Piece(name, 0)]
            found[f"{mlp}.switch_mlp.up_proj.weight"] = [Piece(name, 1)]
        else:
            found[f"{mlp}.switch_mlp.{stack}.weight" if stack else name] = [Piece(name)]
    return found | {module: [experts[i] for i in sorted(experts)] for module, experts in apart.items()}


def _named(module: str, arrays: Arrays) -> Iterator[tuple[str, mx.array]]:
    for part, array in arrays.items():
        yield (module if part == "weight" else f"{module.removesuffix('weight')}{part}"), array


def _described(checkpoint: Checkpoint, pieces: list[Piece]) -> tuple[str, tuple[int, ...]]:
    """The type and the shape of what they are together. Experts are all of one type and shape."""
    types = {checkpoint.dtype(piece.name) for piece in pieces}
    shapes = {piece.shape(checkpoint.shape(piece.name)) for piece in pieces}
    if len(types) > 1 or len(shapes) > 1:
        found = ", ".join(sorted(types) if len(types) > 1 else map(str, sorted(shapes)))
        raise UnknownModel(
            f"{checkpoint.path}: {pieces[0].name} and the other experts are stored in several types or shapes "
            f"({found}), which is not read on MLX: use --runner torch."
        )
    [stored], [shape] = types, shapes
    return stored, shape if len(pieces) == 1 else (len(pieces), *shape)


def _like(checkpoint: Checkpoint, module: str, pieces: list[Piece], rules: Rules) -> Arrays:
    return rules.like(module, *_described(checkpoint, pieces))


def _read(checkpoint: Checkpoint, pieces: list[Piece], rules: Rules) -> Arrays:
    _, shape = _described(checkpoint, pieces)
    if not is_matrix(pieces[0].name, shape):
        return _evaluated(rules.become(checkpoint.get(pieces[0].name)))
    slabs = (rules.become(slab) for piece in pieces for slab in piece.slabs(checkpoint.get(piece.name)))
    made = _joined(slabs, math.prod(shape[:-1]))
    return _evaluated({part: array.reshape(*shape[:-1], -1) for part, array in made.items()})


def _joined(slabs: Iterable[Arrays], num_rows: int) -> Arrays:
    """Each slab is written where it belongs: no array is there twice."""
    made: Arrays = {}
    at = 0
    for slab in slabs:
        rows = len(slab["weight"])
        if rows == num_rows:
            return slab
        for part, array in slab.items():
            if part not in made:
                made[part] = mx.zeros((num_rows, array.shape[1]), array.dtype)
            made[part][at : at + rows] = array
        mx.eval(*made.values())
        at += rows
    return made


def _evaluated(arrays: Arrays) -> Arrays:
    mx.eval(*arrays.values())
    return arrays


def evaluate(module: nn.Module, num_bytes: int, progress: Progress) -> None:
    """Its arrays, one by one. ``num_bytes``: of all of them in the files, where progress is counted; 0: it was told."""
    arrays = [array for _, array in tree_flatten(module.parameters())]
    total, done, told = sum(array.nbytes for array in arrays), 0, 0
    for array in arrays:
        mx.eval(array)
        done += array.nbytes
        if (read := num_bytes * done // total) > told:
            progress(read - told)
            told = read
