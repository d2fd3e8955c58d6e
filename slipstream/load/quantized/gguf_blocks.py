"""GGUF's block types as codes and scales, exactly. A block is a run of columns of a row; layouts are llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from slipstream.load.quantized import gguf_grids as grids
from slipstream.load.quantized import gguf_plain as plain
from slipstream.load.quantized import gguf_super as super_blocks
from slipstream.load.quantized.codes import Codes, Container


class BlockType(NamedTuple):
    number: int  # in a file
    columns: int
    num_bytes: int
    container: Container
    codes: Callable[[np.ndarray], Codes]  # of blocks, uint8 [rows, blocks, num_bytes]


BLOCK_TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(2, 32, 18, plain.Q4_0, plain.q4_0),
    "Q4_1": BlockType(3, 32, 20, plain.Q4_1, plain.q4_1),
    "Q5_0": BlockType(6, 32, 22, plain.Q5_0, plain.q5_0),
    "Q5_1": BlockType(7, 32, 24, plain.Q5_1, plain.q5_1),
    "Q8_0": BlockType(8, 32, 34, plain.Q8_0, plain.q8_0),
    "Q2_K": BlockType(10, 256, 84, super_blocks.Q2_K, super_blocks.q2_k),
    "Q3_K": BlockType(11, 256, 110, super_blocks.Q3_K, super_blocks.q3_k),
    "Q4_K": BlockType(12, 256, 144, super_blocks.Q4_K, super_blocks.q4_k),
    "Q5_K": BlockType(13, 256, 176, super_blocks.Q5_K, super_blocks.q5_k),
    "Q6_K": BlockType(14, 256, 210, super_blocks.Q6_K, super_blocks.q6_k),
    "IQ2_XXS": BlockType(16, 256, 66, grids.IQ2_XXS, grids.iq2_xxs),
    "IQ2_XS": BlockType(17, 256, 74, grids.IQ2_XS, grids.iq2_xs),
    "IQ3_XXS": BlockType(18, 256, 98, grids.IQ3_XXS, grids.iq3_xxs),
    "IQ1_S": BlockType(19, 256, 50, grids.IQ1_S, grids.iq1_s),
    "IQ4_NL": BlockType(20, 32, 18, plain.IQ4_NL, plain.iq4_nl),
    "IQ3_S": BlockType(21, 256, 110, grids.IQ3_S, grids.iq3_s),
    "IQ2_S": BlockType(22, 256, 82, grids.IQ2_S, grids.iq2_s),
    "IQ4_XS": BlockType(23, 256, 136, super_blocks.IQ4_XS, super_blocks.iq4_xs),
    "IQ1_M": BlockType(29, 256, 56, grids.IQ1_M, grids.iq1_m),
    "TQ1_0": BlockType(34, 256, 54, plain.TERNARY, plain.tq1_0),
    "TQ2_0": BlockType(35, 256, 66, plain.TERNARY, plain.tq2_0),
    "MXFP4": BlockType(39, 32, 17, plain.MXFP4, plain.mxfp4),
    "NVFP4": BlockType(40, 64, 36, plain.NVFP4, plain.nvfp4),
    "Q1_0": BlockType(41, 128, 18, plain.Q1_0, plain.q1_0),
    "Q2_0": BlockType(42, 64, 18, plain.Q2_0, plain.q2_0),
}
BLOCK_CONTAINERS = {name: kind.container for name, kind in BLOCK_TYPES.items()}


def block_codes(dtype: str, data: np.ndarray) -> Codes:
    """data: uint8 [rows, bytes of a row]"""
    kind = BLOCK_TYPES[dtype]
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged file may hold any scale
        return kind.codes(data.reshape(len(data), -1, kind.num_bytes))
