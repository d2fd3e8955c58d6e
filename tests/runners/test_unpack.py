"""Blocks and FP8 unpacked by PyTorch, on any device, equal the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from slipstream.load.dequantize import dequantize
from slipstream.load.tensor import RawTensor
from slipstream.runners.torch.unpack import can_unpack, unpacked
from slipstream.runners.torch.weights import as_tensor

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_blocks(dtype: str, rows: int = 6, blocks: int = 3) -> RawTensor:
    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    chance = np.random.default_rng(0)
    data = chance.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    scales = chance.normal(size=(rows, blocks, 2)).astype(np.float16)  # finite ones, where types have one or two
    count = 4 if dtype == "Q4_1" else 2
    data[..., :count] = scales.view(np.uint8)[..., :count]
    return RawTensor("some", dtype, (rows, columns * blocks), data.reshape(rows, -1))


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_1"])
def test_the_same_floats(dtype: str) -> None:
    raw = random_blocks(dtype)
    assert can_unpack(raw)
    got = unpacked(raw, HERE)
    assert got.device.type == HERE.type
    assert np.array_equal(got.cpu().numpy(), dequantize(raw))
    assert torch.equal(as_tensor(raw, HERE).cpu(), as_tensor(raw))


@pytest.mark.parametrize("shape", [(4, 256), (5, 70), (3, 300), (2, 3, 140)])
def test_fp8(shape: tuple[int, ...]) -> None:
    chance = np.random.default_rng(0)
    codes = chance.integers(0, 256, shape, dtype=np.uint8)
    codes.reshape(-1)[:256] = np.arange(256)
    scale = chance.normal(size=(*shape[:-1], -(-shape[-1] // 128))).astype(np.float32)
    raw = RawTensor("some", "F8_E4M3", shape, codes, scale)
    assert can_unpack(raw)
    got = unpacked(raw, HERE)
    assert got.device.type == HERE.type
    np.testing.assert_array_equal(got.cpu().numpy(), dequantize(raw))
    torch.testing.assert_close(as_tensor(raw, HERE).cpu(), as_tensor(raw), rtol=0, atol=0, equal_nan=True)


def test_other_types_are_left_to_the_reference() -> None:
    assert not can_unpack(random_blocks("Q6_K"))
    assert not can_unpack(RawTensor("some", "F32", (1, 2), np.zeros((1, 2), np.float32)))
