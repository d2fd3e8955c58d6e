"""GGUF's block types as codes and scales, exactly. A block is a run of columns of a row; layouts are llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.load.quantized.codes import Codes, Container

Q4_0 = Container("affine4", 32, 32, offset=8)
Q4_1 = Container("affine4", 32, 32, has_minimum=True)
Q8_0 = Container("int8", 32, 32)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The half-precision number at a byte of each block. float32 [rows, blocks]"""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0].astype(np.float32)


def _low_then_high(packed: np.ndarray) -> np.ndarray:
    """The low nibbles of all bytes of a block, then the high ones. uint8 [rows, blocks, n] -> [rows, blocks * 2 n]"""
    return np.concatenate((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)


def _q4_0(blocks: np.ndarray) -> Codes:
    return Codes(Q4_0, _low_then_high(blocks[:, :, 2:]), _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Codes:
    return Codes(Q4_1, _low_then_high(blocks[:, :, 4:]), _halves(blocks, 0), minimum_step=_halves(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Codes:
    codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(len(blocks), -1)
    return Codes(Q8_0, codes, _halves(blocks, 0))


# Bytes of a block, its container, how it is read.
_BLOCKS: dict[str, tuple[int, Container, Callable[[np.ndarray], Codes]]] = {
    "Q4_0": (18, Q4_0, _q4_0),
    "Q4_1": (20, Q4_1, _q4_1),
    "Q8_0": (34, Q8_0, _q8_0),
}
BLOCK_CONTAINERS = {name: container for name, (_, container, _) in _BLOCKS.items()}


def block_codes(dtype: str, data: np.ndarray) -> Codes:
    """data: uint8 [rows, bytes of a row]"""
    size, _, read = _BLOCKS[dtype]
    return read(data.reshape(len(data), -1, size))
