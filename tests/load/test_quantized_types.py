"""Codes and scales of each stored type: the weights that an independent reading gives."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from slipstream.load.quantized.codes import E2M1
from slipstream.load.quantized.types import codes_of, container_of
from slipstream.load.tensor import RawTensor

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_those_of_the_gguf_package(dtype: str) -> None:
    data = quantize(RNG.standard_normal((5, 256), np.float32), GGMLQuantizationType[dtype])
    codes = codes_of(RawTensor("", dtype, (5, 256), data))
    assert codes.container == container_of(dtype)
    assert np.array_equal(codes.weights(), dequantize(data, GGMLQuantizationType[dtype]))


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
