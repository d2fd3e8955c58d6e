"""Groups of columns that share a scale, as the kernels know them; and codes of 4 bits, two in a byte."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.load.hf.packed.family import Family
from slipstream.load.quantized.codes import GROUPS
from slipstream.load.quantized.types import unpacked_nibbles

TILE = 128  # rows and columns that are transposed at once
SLAB = 1024  # rows


@dataclass(frozen=True, slots=True)
class Groups:
    size: int  # columns of a group: one of GROUPS
    times: int  # so many groups in a row have the same scale: what the file has as one

    def spread(self, scale: np.ndarray) -> np.ndarray:
        """For each group. [..., groups in the file] -> [..., groups], contiguous"""
        return np.ascontiguousarray(scale if self.times == 1 else np.repeat(scale, self.times, axis=-1))


def groups_of(family: Family, columns: int, count: int) -> Groups:
    """`count`: scales of a row in the file; 1: the whole row has one."""
    if columns % count == 0:
        stored = columns // count
        for size in reversed(GROUPS):
            if stored % size == 0:
                return Groups(size, stored // size)
    raise family.unreadable(f"has {columns} columns and {count} scales a row, no groups of a multiple of {GROUPS[0]}")


def sorted_columns(family: Family, role: str, columns: int, count: int) -> np.ndarray | None:
    """GPTQ's act-order: the columns in the order of their groups; None: they are already. int32 [columns]"""
    if role not in family:
        return None
    family.check(role, ("I32", "I64"), (columns,))
    group_of = family.array(role)
    if np.array_equal(group_of, np.arange(columns) // (columns // count)):
        return None
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    if not np.array_equal(group_of[order], np.arange(columns) // (columns // count)):
        if not (group_of == -1).all() and not (group_of == 0).all():  # written, but not used
            raise family.unreadable(f"has groups of different sizes in {family.label(role)}")
        return None
    return order


def with_columns(data: np.ndarray, order: np.ndarray, bits: int) -> np.ndarray:
    """Codes with their columns in another order, some rows at a time. uint8 [rows, bytes]"""
    made = np.empty_like(data)
    for start in range(0, len(data), SLAB):
        slab = data[start : start + SLAB]
        columns = transposed(slab if bits == 8 else unpacked_nibbles(slab))[order]
        made[start : start + SLAB] = transposed(columns if bits == 8 else columns[::2] | columns[1::2] << 4)
    return made


def transposed(matrix: np.ndarray) -> np.ndarray:
    """Contiguous. Tile by tile, each copied first: columns of a large matrix do not stay in a cache."""
    num_rows, num_columns = matrix.shape
    made = np.empty((num_columns, num_rows), matrix.dtype)
    for row in range(0, num_rows, TILE):
        for column in range(0, num_columns, TILE):
            tile = matrix[row : row + TILE, column : column + TILE]
            made[column : column + TILE, row : row + TILE] = tile.copy().T
    return made
