"""How a stored type of weights lies in a GPU's memory: bits of a code, and how its scales are kept.

Codes take as many bits as the type has: 4, 5, 6 or 8. A scale is kept in one of two ways, neither of which rounds what
a file holds in 16 bits:

    factors   numbers of 8 bits a group, and a float32 step for every 256 columns: whole numbers of types with
              super-blocks, FP8 of NVFP4
    pairs     two bfloat16 a group that add up to the scale: 16 bits of precision
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.load.quantized.codes import Container
from slipstream.load.quantized.types import container_of

TILE = 256  # columns whose codes lie together
BIAS = 128  # of bytes that stand for signed numbers
ROWS = 16  # scales are padded to a multiple of so many rows: each group's start where the copy engine can read

# Types whose codes have fewer bits than the 8 of their container: bits, and what makes a code positive if added.
_NARROW = {"Q5_K": (5, 0), "Q6_K": (6, 32), "Q5_0": (5, 16), "Q5_1": (5, 0)}
_FLOAT_FACTORS = ("FP4_16",)  # NVFP4 of folders: a scale is FP8 times a number of the whole tensor


@dataclass(frozen=True, slots=True)
class CodeLayout:
    bits: int  # of a code
    offset: int  # taken from a code to make its value; of a table's entries, BIAS
    group: int  # columns that share a scale
    has_factors: bool
    has_minimum: bool
    table: tuple[int, ...] = ()  # 16 values, times ``table_unit`` those of the file
    table_unit: float = 1.0
    float_factors: bool = False  # factors are FP8 (e4m3)

    @property
    def groups(self) -> int:
        """Of a tile."""
        return TILE // self.group

    @property
    def high_bits(self) -> int:
        """Of a code, beside the low four, in a plane of their own."""
        return self.bits - 4 if self.bits in (5, 6) else 0

    @property
    def words(self) -> int:
        """Of 16 bits, a row of a tile."""
        return TILE // 2 if self.bits == 8 else TILE // 4

    @property
    def high_words(self) -> int:
        return self.high_bits * TILE // 16

    @property
    def scale_rows(self) -> int:
        """Rows of scales, of a tile: factors lie two by two in a word, of two groups or with a minimum's."""
        return self.groups // 2 if self.has_factors and not self.has_minimum else self.groups

    @property
    def scale_bytes(self) -> int:
        return 2 if self.has_factors else 4

    @property
    def weight_bytes(self) -> float:
        """With its scales."""
        return self.stored_bytes((ROWS, TILE)) / (ROWS * TILE)

    def num_tiles(self, width: int) -> int:
        return -(-width // TILE)

    def stored_bytes(self, shape: Sequence[int]) -> int:
        num_rows, width = shape
        codes = 2 * (self.words + self.high_words) * num_rows
        minimums = 1 + self.has_minimum
        scales = self.scale_rows * self.scale_bytes * (1 if self.has_factors else minimums)
        steps = 4 * minimums if self.has_factors else 0
        return self.num_tiles(width) * (codes + (scales + steps) * padded_rows(num_rows))


def padded_rows(num_rows: int) -> int:
    return -(-num_rows // ROWS) * ROWS


def layout_of(dtype: str) -> CodeLayout | None:
    """None: not codes and scales."""
    container = container_of(dtype)
    if container is None:
        return None
    bits, offset = _NARROW.get(dtype, (8, BIAS))
    layout = container_layout(container, bits, offset)
    return replace(layout, has_factors=True, float_factors=True) if dtype in _FLOAT_FACTORS else layout


def in_pairs(layout: CodeLayout) -> CodeLayout:
    """The same for scales that are not FP8 times one number."""
    assert layout.float_factors
    return replace(layout, has_factors=False, float_factors=False)


def container_layout(container: Container, bits: int = 8, offset: int = BIAS) -> CodeLayout:
    """``bits`` and ``offset``: of codes in bytes."""
    if container.kind != "int8":
        bits, offset = 4, container.offset
    table, unit = _whole(container.table) if container.table else ((), 1.0)
    # A minimum of two-level types has a factor, too; where spans are no tiles, both factors become one scale.
    has_factors = container.has_factor and container.span == TILE
    has_factors = has_factors and container.has_minimum == container.minimum_has_factor
    return CodeLayout(bits, BIAS if table else offset, container.group, has_factors, container.has_minimum, table, unit)


def _whole(table: tuple[float, ...]) -> tuple[tuple[int, ...], float]:
    """A table as whole numbers and what they are multiplied with, a power of two."""
    unit = 1.0
    while any(value % unit for value in table):
        unit /= 2
    values = tuple(int(value / unit) for value in table)
    assert all(-BIAS <= value < BIAS for value in values), table
    return values, unit
