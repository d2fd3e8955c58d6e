"""Which tensors are codes and scales, and those of a tensor. The types of quantised folders:

    INT4_<group>        two codes a byte, the even column low; a weight is (code - 8) * scale
    INT4_<group>_ZERO   the same with a zero point a group: (code - zero) * scale
    FP4_<group>         two codes a byte, the even column low; a weight is the E2M1 value of its code * scale
    INT8_<group>        a signed byte; a weight is code * scale

A reader brings what a folder holds into one of these; GGUF's blocks stay as they are.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from slipstream.load.quantized.codes import E2M1, GROUPS, Codes, Container
from slipstream.load.quantized.gguf_blocks import BLOCK_CONTAINERS, block_codes
from slipstream.load.tensor import RawTensor

_TYPE = re.compile(r"(INT4|FP4|INT8)_(\d+)(_ZERO)?")


def container_of(dtype: str) -> Container | None:
    """None: not codes and scales, but plain floats or FP8."""
    if dtype in BLOCK_CONTAINERS:
        return BLOCK_CONTAINERS[dtype]
    match = _TYPE.fullmatch(dtype)
    if match is None or int(match[2]) not in GROUPS:
        return None
    kind, group = match[1], int(match[2])
    if kind == "FP4":
        return Container("table4", group, group, table=E2M1)
    if kind == "INT8":
        return Container("int8", group, group)
    if match[3]:
        return Container("affine4", group, group, has_minimum=True, minimum_has_factor=True)
    return Container("affine4", group, group, offset=8)


def is_folder_type(dtype: str) -> bool:
    """One of those above, and not of a GGUF."""
    return dtype not in BLOCK_CONTAINERS and container_of(dtype) is not None


def codes_of(raw: RawTensor) -> Codes:
    """Of a matrix whose type has a container: nothing is rounded. Stored columns stay in the order of the file."""
    if raw.dtype in BLOCK_CONTAINERS:
        found = block_codes(raw.dtype, raw.data.reshape(math.prod(raw.shape[:-1]), -1))
        return found if raw.scale is None else _scaled(found, raw.scale)
    container = container_of(raw.dtype)
    assert container is not None, raw.dtype
    assert raw.scale is not None, raw.name
    codes = raw.data if container.kind == "int8" else unpacked_nibbles(raw.data)
    made = Codes(container, codes, raw.scale)
    return made if raw.zero is None else replace(made, minimum_step=-raw.scale, minimum_factor=raw.zero)


def _scaled(codes: Codes, scale: np.ndarray) -> Codes:
    """scale: of each row, [rows, 1]"""
    minimum = codes.minimum_step
    return replace(codes, step=codes.step * scale, minimum_step=None if minimum is None else minimum * scale)


def unpacked_nibbles(data: np.ndarray) -> np.ndarray:
    """The low one of each byte, then the high one. uint8 [..., n] -> [..., 2 n]"""
    nibbles: np.ndarray = np.stack((data & 15, data >> 4), axis=-1)
    return nibbles.reshape(*data.shape[:-1], -1)
