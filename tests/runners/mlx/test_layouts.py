"""Block types in MLX's packed layouts: the very numbers of the file, and products with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tiny_gguf import random_blocks

from slipstream.load.quantized.gguf_blocks import BLOCK_TYPES, block_codes
from slipstream.runners.mlx.loaders.layouts import Arrays, Layout, layout_of, packed

ROWS, COLUMNS = 24, 512
# Bits of a code, and how large an error of float16 scales is, in the spread of the weights; 0: those are the file's.
SOME = 3e-3
BITS: dict[str, tuple[int, float]] = {
    **dict.fromkeys(["Q4_0", "Q4_1", "MXFP4"], (4, 0.0)),
    **dict.fromkeys(["Q4_K", "IQ3_S", "IQ1_S"], (4, SOME)),
    **dict.fromkeys(["Q5_0", "Q5_1"], (5, 0.0)),
    **dict.fromkeys(["Q8_0", "IQ4_NL", "Q3_K"], (8, 0.0)),
    **dict.fromkeys(["IQ4_XS", "IQ2_XXS", "IQ1_M"], (8, SOME)),
    **dict.fromkeys(["TQ1_0", "TQ2_0", "Q1_0", "Q2_0"], (2, 0.0)),
    "Q5_K": (5, SOME),
    "IQ3_XXS": (6, SOME),
}
FLOATS = ("Q2_K", "Q6_K", "IQ2_XS", "IQ2_S", "NVFP4")  # groups of 16 columns


def blocks(dtype: str) -> np.ndarray:
    """uint8 [rows, bytes of a row]"""
    values = np.random.default_rng(1).standard_normal((ROWS, COLUMNS), np.float32)
    if dtype in ("Q1_0", "Q2_0"):  # which gguf does not know
        kind = BLOCK_TYPES[dtype]
        data = np.random.default_rng(1).integers(0, 256, (ROWS, COLUMNS // kind.columns, kind.num_bytes), np.uint8)
        data[..., :2] = np.array([0.37], np.float16).view(np.uint8)
        return data.reshape(ROWS, -1)
    try:
        return quantize(values, GGMLQuantizationType[dtype])
    except NotImplementedError:
        return random_blocks(dtype, (ROWS, COLUMNS), 1.0)


def file_values(dtype: str, data: np.ndarray) -> np.ndarray:
    ours: np.ndarray = block_codes(dtype, data).weights()
    if dtype not in ("Q1_0", "Q2_0"):
        np.testing.assert_allclose(ours, dequantize(data, GGMLQuantizationType[dtype]), atol=1e-6)
    return ours


def arguments(layout: Layout, arrays: Arrays) -> dict[str, Any]:
    mode = {"mode": "mxfp4"} if layout.is_mxfp4 else {"biases": arrays["biases"]}
    return {"scales": arrays["scales"], "group_size": layout.group, "bits": layout.bits, **mode}


def mlx_values(layout: Layout, arrays: Arrays) -> np.ndarray:
    """By MLX, in float32."""
    wide = {part: array.astype(mx.float32) if array.dtype == mx.float16 else array for part, array in arrays.items()}
    return np.array(mx.dequantize(wide["weight"], **arguments(layout, wide), dtype=mx.float32))


def test_each_type_is_packed_or_named() -> None:
    found = {dtype: layout.bits for dtype in BLOCK_TYPES if (layout := layout_of(dtype)) is not None}
    assert found == {dtype: bits for dtype, (bits, _) in BITS.items()}
    assert BLOCK_TYPES.keys() - found == set(FLOATS)


@pytest.mark.parametrize("dtype", BITS)
def test_the_values_of_the_file(dtype: str) -> None:
    """Bit for bit in float32; in float16, too, where the file has a scale of its own for each group."""
    data, layout, (_, off) = blocks(dtype), layout_of(dtype), BITS[dtype]
    assert layout is not None
    expected, codes = file_values(dtype, data), block_codes(dtype, data)
    exact, narrow = (packed(codes, layout, each) for each in (mx.float32, mx.float16))
    assert np.array_equal(mlx_values(layout, exact), expected)
    np.testing.assert_allclose(mlx_values(layout, narrow), expected, rtol=0, atol=off * expected.std())
    like = layout.like((ROWS, COLUMNS), mx.float16)
    assert {part: (array.shape, array.dtype) for part, array in like.items()} == {
        part: (array.shape, array.dtype) for part, array in narrow.items()
    }


@pytest.mark.parametrize("dtype", BITS)
def test_products(dtype: str) -> None:
    """Of few rows and of many, and of experts."""
    data, layout = blocks(dtype), layout_of(dtype)
    assert layout is not None
    expected, arrays = file_values(dtype, data), packed(block_codes(dtype, data), layout, mx.float32)
    given = arguments(layout, arrays)
    for num_rows in (1, 40):
        x = mx.random.normal((num_rows, COLUMNS))
        made = np.array(mx.quantized_matmul(x, arrays["weight"], **given))
        np.testing.assert_allclose(made, np.array(x) @ expected.T, atol=2e-3)
    stack = {part: array[None] if isinstance(array, mx.array) else array for part, array in given.items()}
    made = np.array(mx.gather_qmm(x, arrays["weight"][None], **stack, rhs_indices=mx.array([0])))
    np.testing.assert_allclose(made[0], np.array(x) @ expected.T, atol=2e-3)


def test_every_power_of_two_of_mxfp4() -> None:
    kind, layout = BLOCK_TYPES["MXFP4"], layout_of("MXFP4")
    assert layout is not None
    data = np.random.default_rng(1).integers(0, 256, (255, kind.num_bytes), np.uint8)
    data[:, 0] = np.arange(255)
    arrays = packed(block_codes("MXFP4", data), layout, mx.float16)
    assert np.array_equal(np.array(arrays["scales"])[:, 0], data[:, 0])
    with np.errstate(over="ignore"):  # the largest two, times 4 or 6
        expected = block_codes("MXFP4", data).weights()
    assert np.array_equal(mlx_values(layout, arrays), expected)
