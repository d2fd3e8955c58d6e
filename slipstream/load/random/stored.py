"""A shape with made-up weights in the types of a quantised file: what a benchmark of those types reads.

Blocks are random bits with scales that keep the size of activations. They repeat after some thousands: the speed of no
kernel depends on them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from slipstream.errors import MissingTensor
from slipstream.load.head import head_shapes
from slipstream.load.mapped_file import MappedFile
from slipstream.load.quantized.codes import Codes
from slipstream.load.quantized.gguf_blocks import BLOCK_TYPES
from slipstream.load.quantized.types import codes_of, container_of
from slipstream.load.random.mixes import stored_type
from slipstream.load.shapes import Shapes, model_shapes
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import Place, RawTensor

NUM_BLOCKS = 8191  # different ones of a type: a prime number, so that no two rows are alike
NUM_NUMBERS = 65521  # of types without blocks, likewise
HALVES = {  # where a block's scale is, in half precision, and that of its minima
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ2_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
SPREAD = 0.02  # of vectors
DECAY_RATES, TIME_STEPS = (1.0, 16.0), (1e-3, 1e-1)  # exp(A_log), softplus(dt_bias): as trained models have them


class StoredRandomCheckpoint:
    """``stored_as``: a name of load/random/mixes.py."""

    path = "random weights"

    def __init__(self, spec: ModelSpec, stored_as: str) -> None:
        self.spec = spec
        self._shapes: Shapes = model_shapes(spec, lambda prefix: "stacks") | head_shapes(spec, "stacks")
        self._types = {name: stored_type(stored_as, name, shape, spec) for name, shape in self._shapes.items()}

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def get(self, name: str) -> RawTensor:
        shape, dtype, seed = self.shape(name), self._types[name], zlib.crc32(name.encode())
        if dtype == "F32":
            return RawTensor(name, dtype, shape, _vector(name, shape, seed, self.spec))
        if dtype == "BF16":
            return RawTensor(name, dtype, shape, np.resize(_random_halves(shape[-1] ** -0.5), shape))
        made = random_rows(dtype, math.prod(shape[:-1]), shape[-1], seed)
        return RawTensor(name, dtype, shape, made.data, made.scale, made.zero)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise MissingTensor(f"a model of {self.spec.architecture} shape has no tensor {name!r}.")
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        self.shape(name)
        return self._types[name]

    def num_bytes(self, name: str) -> int:
        return num_bytes(self._types[name], self.shape(name))

    def places(self, name: str) -> list[Place]:
        return []

    def files(self) -> list[Path]:
        return []

    def mapped_files(self) -> list[MappedFile]:
        return []

    def release(self) -> None:
        """Nothing is held."""


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Of a tensor in a file; scales of folders' types in half precision."""
    if dtype in ("F32", "BF16"):
        return (4 if dtype == "F32" else 2) * math.prod(shape)
    if dtype in BLOCK_TYPES:
        return math.prod(shape) // BLOCK_TYPES[dtype].columns * BLOCK_TYPES[dtype].num_bytes
    container = container_of(dtype)
    assert container is not None
    return math.prod(shape) * (2 if container.kind == "int8" else 1) // 2 + 2 * math.prod(shape) // container.group


def random_rows(dtype: str, num_rows: int, columns: int, seed: int) -> RawTensor:
    """A matrix of a quantised type, [rows, columns]."""
    spread = columns**-0.5
    if dtype in BLOCK_TYPES:
        kind = BLOCK_TYPES[dtype]
        blocks = np.roll(_random_blocks(dtype, spread), seed % NUM_BLOCKS, axis=0)
        data = np.resize(blocks, (num_rows, columns // kind.columns * kind.num_bytes))
        return RawTensor("", dtype, (num_rows, columns), data)
    container = container_of(dtype)
    assert container is not None
    width = columns if container.kind == "int8" else columns // 2
    bits = np.random.default_rng(seed).integers(0, 256, NUM_NUMBERS, np.uint8)
    data = np.resize(bits, (num_rows, width))
    data = data.view(np.int8) if container.kind == "int8" else data
    groups = (num_rows, columns // container.group)
    zero = np.resize(bits & 15, groups) if container.minimum_has_factor else None
    made = RawTensor("", dtype, (num_rows, columns), data, np.ones(groups, np.float32), zero)
    scale = np.full(groups, spread / codes_of(made.rows(slice(0, 1))).weights().std(), np.float32)
    return replace(made, scale=scale)


@cache
def _random_blocks(dtype: str, spread: float) -> np.ndarray:
    """uint8 [NUM_BLOCKS, bytes of a block]"""
    kind, random = BLOCK_TYPES[dtype], np.random.default_rng(zlib.crc32(dtype.encode()))
    blocks = random.integers(0, 256, (NUM_BLOCKS, kind.num_bytes), np.uint8)
    if dtype not in HALVES:
        raise ValueError(f"no random blocks of {dtype} are made")
    _set_halves(blocks, dtype, 1.0, 0.0)
    plain = _codes(dtype, blocks)
    scale, minimum = plain.weights(), 0.0
    if len(HALVES[dtype]) > 1:  # minima that make up for the mean
        _set_halves(blocks, dtype, 0.0, 1.0)
        minimum = -float(scale.mean() / _codes(dtype, blocks).weights().mean())
    _set_halves(blocks, dtype, 1.0, minimum)
    factor = spread / float(_codes(dtype, blocks).weights().std())
    _set_halves(blocks, dtype, factor, factor * minimum)
    return blocks


@cache
def _random_halves(spread: float) -> np.ndarray:
    """bfloat16 as uint16 [NUM_NUMBERS]"""
    values = np.random.default_rng(0).normal(0.0, spread, NUM_NUMBERS).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _codes(dtype: str, blocks: np.ndarray) -> Codes:
    return BLOCK_TYPES[dtype].codes(blocks[:, None, :])


def _set_halves(blocks: np.ndarray, dtype: str, scale: float, minimum: float) -> None:
    for at, value in zip(HALVES[dtype], (scale, minimum)):
        blocks[:, at : at + 2] = np.array([value], "<f2").view(np.uint8)


def _vector(name: str, shape: tuple[int, ...], seed: int, spec: ModelSpec) -> np.ndarray:
    random = np.random.default_rng(seed)
    if name.endswith("A_log"):
        made = np.log(random.uniform(*DECAY_RATES, shape))
    elif name.endswith("dt_bias"):
        shortest, longest = map(math.log, TIME_STEPS)
        made = np.log(np.expm1(np.exp(random.uniform(shortest, longest, shape))))
    elif len(shape) > 1:
        made = random.normal(0.0, shape[-1] ** -0.5, shape)
    else:
        less_one = spec.norm_plus_one and "linear_attn.norm" not in name
        made = random.normal(0.0 if less_one else 1.0, SPREAD, shape)
    vector: np.ndarray = made.astype(np.float32)
    return vector
