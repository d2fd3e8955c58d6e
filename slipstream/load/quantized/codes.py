"""A quantised matrix as codes and scales, whatever file it came from: what every runner's kernels are packed from.

A weight is value(code) * scale + minimum. `group` columns of a row share a scale and a minimum. Both are products: of a
float32 that `span` columns share, and a small whole number of each group. So nothing is rounded on the way from a file
to a kernel, and a kernel may keep the two factors apart, in fewer bits. Three kinds of codes hold every format:

    affine4   a code from 0 to 15 is its own value, less `offset` where there is no minimum
    table4    a code from 0 to 15 stands for an entry of `table`
    int8      a code is a signed byte, its own value
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["affine4", "table4", "int8"]
GROUPS = (16, 32, 64, 128)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # FP4


@dataclass(frozen=True, slots=True)
class Container:
    """How a type of weights is coded: all that a kernel must know before it sees data, and all that a plan counts."""

    kind: Kind
    group: int  # columns that share a scale: one of GROUPS
    span: int  # columns that share a step: a multiple of the group; the same: scales have no factors
    has_minimum: bool = False
    minimum_has_factor: bool = False
    offset: int = 0  # affine4: taken from each code
    table: tuple[float, ...] = ()  # table4: 16 values

    @property
    def has_factor(self) -> bool:
        return self.span > self.group


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of a matrix. Columns are a multiple of the span."""

    container: Container
    codes: np.ndarray  # uint8 [rows, columns], int8 where the kind is int8
    step: np.ndarray  # float32 [rows, columns / span]
    factor: np.ndarray | None = None  # int8 [rows, columns / group]; None: 1 everywhere
    minimum_step: np.ndarray | None = None  # float32 [rows, columns / span]; None: no minimum
    minimum_factor: np.ndarray | None = None  # uint8 [rows, columns / group]; None: 1 everywhere

    def scale(self) -> np.ndarray:
        """Of each group, exact. float32 [rows, columns / group]"""
        return self._by_group(self.step, self.factor)

    def minimum(self) -> np.ndarray | None:
        """Of each group, exact. float32 [rows, columns / group]"""
        return None if self.minimum_step is None else self._by_group(self.minimum_step, self.minimum_factor)

    def values(self) -> np.ndarray:
        """What the codes stand for before they are scaled. float32 [rows, columns]"""
        if self.container.table:
            values: np.ndarray = np.array(self.container.table, np.float32)[self.codes]
            return values
        return self.codes.astype(np.float32) - np.float32(self.container.offset)

    def weights(self) -> np.ndarray:
        """float32 [rows, columns]"""
        group = self.container.group
        weights = self.values()
        weights *= np.repeat(self.scale(), group, axis=1)
        minimum = self.minimum()
        if minimum is not None:
            weights += np.repeat(minimum, group, axis=1)
        return weights

    def _by_group(self, step: np.ndarray, factor: np.ndarray | None) -> np.ndarray:
        wide: np.ndarray = np.repeat(step, self.container.span // self.container.group, axis=1)
        if factor is not None:
            wide *= factor
        return wide
