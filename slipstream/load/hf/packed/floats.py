"""Matrices of small floats: FP8 with scales of blocks, rows or the whole, and FP4 (NVFP4, MXFP4).

compressed-tensors divides FP4 by a global scale, ModelOpt multiplies with one: their names tell them apart.
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.errors import CorruptFile, MissingTensor, UnknownModel
from slipstream.load.dequantize import E4M3_VALUES
from slipstream.load.hf.instead import AGAIN, OTHER_TYPES
from slipstream.load.hf.packed.family import FLOATS, Family
from slipstream.load.hf.packed.groups import groups_of
from slipstream.load.hf.packed.integers import Stored
from slipstream.load.tensor import FP8, FP8_GROUP, FP8_WIDE, RawTensor

E8M0 = ("U8", "F8_E8M0")  # a power of two, as a byte
GLOBAL = ("weight_global_scale", "weight_scale_2")


def fp8(family: Family) -> Stored:
    shape = family.entry("weight").shape
    role = "weight_scale_inv" if "weight_scale_inv" in family else "weight_scale"
    if role not in family:
        label = family.label("weight_scale_inv")
        raise MissingTensor(
            f"{family.where}: {family.name} is stored in FP8, but its scales, {label!r}, are missing: {AGAIN}."
        )
    if len(shape) < 2 or 0 in shape:
        raise CorruptFile(
            f"{family.where}: {family.name} is stored in FP8, but is no matrix, its shape is {list(shape)}: {AGAIN}."
        )
    _check_scales(family, role, shape)
    dtype = FP8 if family.entry(role).dtype == "BF16" else FP8_WIDE

    def read() -> RawTensor:
        return RawTensor(family.name, dtype, shape, family.array("weight"), _row_scales(family.floats(role), shape))

    return Stored(dtype, shape, read)


def _check_scales(family: Family, role: str, shape: tuple[int, ...]) -> None:
    found, blocks = family.entry(role), _blocks(shape)
    if found.dtype not in FLOATS:
        known = ", ".join(FLOATS)
        raise UnknownModel(
            f"{family.where}: {family.label(role)} is stored as {found.dtype}, only {known} can be read: {OTHER_TYPES}."
        )
    if found.shape == blocks:
        return
    if role == "weight_scale" and found.shape in (*_by_row(shape), *_by_matrix(shape)):
        return
    others = ", or one for each row, or one in all" if role == "weight_scale" else ""
    raise CorruptFile(
        f"{family.where}: {family.label(role)} is {list(found.shape)}, but {family.name}, {list(shape)} in FP8, "
        f"needs {list(blocks)}: a scale for each block of {FP8_GROUP} x {FP8_GROUP}{others}; {OTHER_TYPES}."
    )


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    *stack, rows, columns = shape
    return (*stack, -(-rows // FP8_GROUP), -(-columns // FP8_GROUP))


def _by_row(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return (*shape[:-1], 1), shape[:-1]


def _by_matrix(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """One in all, or one for each matrix of a stack."""
    stack = shape[:-2]
    return (), (1,), (1, 1), stack, (*stack, 1), (*stack, 1, 1)


def _row_scales(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """float32 [*rows, groups]"""
    *stack, rows, columns = shape
    if scale.shape == _blocks(shape) and scale.size > 1:
        return np.repeat(scale, FP8_GROUP, axis=-2)[..., :rows, :]
    wide = (*stack, rows, -(-columns // FP8_GROUP))
    if scale.shape in _by_row(shape):
        return np.broadcast_to(scale.reshape(*stack, rows, 1), wide)
    return np.broadcast_to(scale.reshape(*(stack if scale.size > 1 else [1] * len(stack)), 1, 1), wide)


def fp4(family: Family, codes: str) -> Stored:
    """`codes`: the role of the tensor with two of them a byte, the even column low: as in our own type."""
    *stack, rows, num_bytes = family.matrix(codes, ("U8",))
    columns = 2 * num_bytes
    *_, count = family.matrix("weight_scale", (FP8, *E8M0))
    found = family.check("weight_scale", (FP8, *E8M0), (*stack, rows, count))
    groups = groups_of(family, columns, count)
    whole = next((role for role in GLOBAL if role in family), None)
    if found.dtype == FP8:
        family.check(whole or GLOBAL[0], FLOATS, *_by_matrix((*stack, rows, columns)))
    dtype, shape = f"FP4_{groups.size}", (*stack, rows, columns)

    def read() -> RawTensor:
        stored = family.array("weight_scale")
        scale = E4M3_VALUES[stored] if found.dtype == FP8 else _powers_of_two(stored)
        if whole is not None:
            factor = family.floats(whole)
            factor = factor.reshape(*(stack if factor.size > 1 else [1] * len(stack)), 1, 1)
            with np.errstate(all="ignore"):  # of a damaged file: no numbers
                scale = scale / factor if whole == "weight_global_scale" else scale * factor
        return RawTensor(family.name, dtype, shape, family.array(codes), groups.spread(scale))

    return Stored(dtype, shape, read)


def _powers_of_two(stored: np.ndarray) -> np.ndarray:
    made = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
    return np.where(stored == 255, np.float32(math.nan), made).astype(np.float32)
