"""Codes and scales of each stored type: the weights that an independent reading gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from slipstream.load.dequantize import dequantize as our_dequantize
from slipstream.load.quantized.codes import E2M1, GROUPS, Codes
from slipstream.load.quantized.gguf_blocks import BLOCK_TYPES
from slipstream.load.quantized.types import codes_of, container_of
from slipstream.load.tensor import RawTensor

RNG = np.random.default_rng(0)


# Where the half-precision numbers of a block lie; elsewhere any byte may stand.
HALVES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)}
HALVES_AT |= dict.fromkeys(["Q4_1", "Q5_1", "Q4_K", "Q5_K"], (0, 2)) | dict.fromkeys(["MXFP4", "NVFP4", "IQ1_M"], ())
ROWS, COLUMNS = 6, 512


def random_rows(dtype: str) -> np.ndarray:
    kind = BLOCK_TYPES[dtype]
    blocks = RNG.integers(0, 256, (ROWS, COLUMNS // kind.columns, kind.num_bytes), np.uint8)
    for at in HALVES_AT.get(dtype, (0,)):
        blocks[:, :, at : at + 2] = RNG.normal(0, 0.1, (*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
    if dtype == "IQ1_M":  # the highest bits of its step: no infinity
        blocks[:, :, 55] &= 0x3F
    if dtype == "MXFP4":  # an exponent
        blocks[:, :, 0] = RNG.integers(0, 180, blocks.shape[:2])
    return blocks.reshape(ROWS, -1)


def check_form(codes: Codes, columns: int) -> None:
    """As every kernel may take it for granted."""
    container, rows = codes.container, len(codes.codes)
    by_span, by_group = (rows, columns // container.span), (rows, columns // container.group)
    assert codes.codes.shape == (rows, columns)
    assert codes.codes.dtype == (np.int8 if container.kind == "int8" else np.uint8)
    assert container.kind == "int8" or codes.codes.max() <= 15
    assert len(container.table) == (16 if container.kind == "table4" else 0)
    assert container.group in GROUPS
    assert container.span % container.group == 0
    assert (codes.step.shape, codes.step.dtype) == (by_span, np.float32)
    assert (codes.factor is not None) == container.has_factor
    assert (codes.minimum_step is not None) == container.has_minimum
    assert (codes.minimum_factor is not None) == container.minimum_has_factor
    for each, shape, dtype in (
        (codes.factor, by_group, np.int8),
        (codes.minimum_step, by_span, np.float32),
        (codes.minimum_factor, by_group, np.uint8),
    ):
        assert each is None or (each.shape, each.dtype) == (shape, dtype)


@pytest.mark.parametrize("dtype", [name for name in BLOCK_TYPES if name not in ("Q1_0", "Q2_0")])
def test_blocks_are_those_of_the_gguf_package(dtype: str) -> None:
    number, kind = GGMLQuantizationType[dtype], BLOCK_TYPES[dtype]
    assert (int(number), GGML_QUANT_SIZES[number]) == (kind.number, (kind.columns, kind.num_bytes))
    data = random_rows(dtype)
    codes = codes_of(RawTensor("", dtype, (ROWS, COLUMNS), data))
    assert codes.container == container_of(dtype)
    check_form(codes, COLUMNS)
    expected = dequantize(data, number)
    assert expected.std() > 0
    assert np.array_equal(codes.weights(), expected)
    stack = RawTensor("", dtype, (2, ROWS // 2, COLUMNS), data)
    assert np.array_equal(our_dequantize(stack), expected.reshape(2, ROWS // 2, COLUMNS))


@pytest.mark.parametrize(("dtype", "columns", "bits"), [("Q1_0", 128, 1), ("Q2_0", 64, 2)])
def test_blocks_that_the_package_does_not_know(dtype: str, columns: int, bits: int) -> None:
    """One scale, then codes from the lowest bits of each byte on: 1 bit is a sign, 2 bits are a number less 1."""
    scales = np.array([[0.5, -2.0], [0.25, 1.0]], np.float16)
    numbers = RNG.integers(0, 2**bits, (2, 2, columns))
    blocks = np.zeros((2, 2, 2 + columns * bits // 8), np.uint8)
    blocks[:, :, :2] = scales[:, :, None].view(np.uint8)
    for i in range(columns):
        blocks[:, :, 2 + i * bits // 8] |= (numbers[:, :, i] << i * bits % 8).astype(np.uint8)
    codes = codes_of(RawTensor("", dtype, (2, 2 * columns), blocks.reshape(2, -1)))
    check_form(codes, 2 * columns)
    values = 2 * numbers - 1 if bits == 1 else numbers - 1
    assert np.array_equal(codes.weights(), (values * scales[:, :, None]).reshape(2, -1))


@pytest.mark.parametrize("dtype", ["NVFP4", "Q4_K"])
def test_a_number_beside_the_blocks_multiplies_each_row(dtype: str) -> None:
    raw = RawTensor("", dtype, (ROWS, COLUMNS), random_rows(dtype))
    scale = RNG.random((ROWS, 1), np.float32)
    scaled = replace(raw, scale=scale)
    np.testing.assert_allclose(codes_of(scaled).weights(), codes_of(raw).weights() * scale, rtol=1e-6, atol=1e-6)
    assert np.array_equal(codes_of(scaled.rows(slice(2, 4))).weights(), codes_of(scaled).weights()[2:4])


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", ["INT4", "INT4_ZERO", "FP4", "INT8"])
def test_types_of_folders(kind: str, group: int) -> None:
    name, _, zero = kind.partition("_")
    dtype = "_".join(part for part in (name, str(group), zero) if part)
    shape, num_groups = (6, 256), 256 // group
    scale = RNG.random((6, num_groups), np.float32)
    zeros = RNG.integers(0, 16, (6, num_groups), np.uint8) if zero else None
    wide = np.repeat(scale, group, axis=1)
    if name == "INT8":
        data = RNG.integers(-128, 128, shape, np.int8)
        expected = data * wide
    else:
        data = RNG.integers(0, 256, (6, 128), np.uint8)
        each = np.empty(shape, np.uint8)
        each[:, ::2], each[:, 1::2] = data & 15, data >> 4
        offset = 8.0 if zeros is None else np.repeat(zeros, group, axis=1).astype(np.float32)
        expected = np.array(E2M1, np.float32)[each] * wide if name == "FP4" else (each - offset) * wide
    codes = codes_of(RawTensor("", dtype, shape, data, scale, zeros))
    np.testing.assert_allclose(codes.weights(), expected, rtol=1e-6, atol=1e-6)
    part = codes_of(RawTensor("", dtype, shape, data, scale, zeros).rows(slice(2, 4)))
    assert np.array_equal(part.weights(), codes.weights()[2:4])


def test_floats_have_no_container() -> None:
    assert [container_of(dtype) for dtype in ("F32", "BF16", "F8_E4M3", "INT4_48")] == [None] * 4
