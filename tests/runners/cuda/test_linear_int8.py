"""8-bit matrices: quantization, the layout in words, and products against PyTorch on the same codes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from quantized_checks import (
    check_columns,
    check_company,
    check_first_rows,
    check_reordered,
    check_rows,
    check_slabs,
    check_split,
    check_sums,
)
from torch import Tensor

from slipstream.runners.cuda.kernels.matmul.linear import PROCESSORS, Scratch, TileConfig
from slipstream.runners.cuda.kernels.matmul.linear_quantized import (
    LIBRARY_TOKENS,
    quantized_linear,
)
from slipstream.runners.cuda.kernels.quant import int8
from slipstream.runners.cuda.kernels.quant.int8 import BIAS, MAX_CODE, Int8Matrix, quantize
from slipstream.runners.cuda.model.linear import CudaLinear
from slipstream.runners.cuda.model.ops import CudaOps
from slipstream.runners.cuda.model.quantized import CudaQuantizedFormat, CudaQuantizedLinear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def made(num_rows: int, width: int, device: torch.device, tile: int = 128) -> Int8Matrix:
    spread = torch.logspace(-3, 1, num_rows, device=device)[:, None]  # a scale of its own for each row
    return quantize([torch.randn(num_rows, width, device=device) * spread], (num_rows, width), device, tile)


def codes(matrix: Int8Matrix) -> Tensor:
    """As whole numbers, read from the words without our kernels. [rows, columns]"""
    pairs = matrix.words.cpu().view(torch.uint8).view(matrix.num_rows, matrix.num_tiles, matrix.tile // 2, 2)
    return pairs.transpose(2, 3).reshape(matrix.num_rows, -1)[:, : matrix.width].long() - BIAS


def product(x: Tensor, matrix: Int8Matrix) -> Tensor:
    return (x.cpu().double() @ codes(matrix).double().T) * matrix.scale.cpu().double()


def error(got: Tensor, wanted: Tensor, matrix: Int8Matrix) -> float:
    """Every row counts by its own scale."""
    scale = matrix.scale.cpu().double()
    return float(((got.cpu().double() - wanted) / scale).norm() / (wanted / scale).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_off_by_half_a_level_at_most(dtype: torch.dtype, device: torch.device) -> None:
    parts = [torch.randn(rows, 200, device=device).mul(0.03).to(dtype) for rows in (5, 70)]
    parts[0][2] = 0.0
    matrix, whole = quantize(iter(parts), (75, 200), device), torch.cat(parts).double().cpu()
    scale = matrix.scale.cpu().double()
    assert torch.allclose(scale, whole.abs().amax(dim=1) / MAX_CODE, rtol=1e-6)
    assert codes(matrix).abs().max() == MAX_CODE
    off = (codes(matrix) * scale[:, None] - whole).abs()
    assert (off <= scale[:, None] * 0.5001).all()
    assert (codes(matrix)[2] == 0).all()


def test_large_matrices_are_rounded_slab_by_slab(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_slabs(quantize, device, monkeypatch)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("width", "tile"), [(384, 128), (200, 128), (520, 256)])
def test_rows_are_level_times_scale(width: int, tile: int, dtype: torch.dtype, device: torch.device) -> None:
    matrix = made(37, width, device, tile)
    check_rows(matrix, codes(matrix).float() * matrix.scale.cpu()[:, None], dtype, device)


def test_rows_change_places(device: torch.device) -> None:
    check_reordered(made(24, 328, device), device)


CONFIGS = [
    TileConfig(64, 128, 3),
    TileConfig(64, 128, 3, split=3),
    TileConfig(32, 128, 3, split=2, warps=2),
    TileConfig(128, 128, 2, split=2, warps=8),
]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("num_tokens", "config"),
    [(1, CONFIGS[0]), (16, CONFIGS[1]), (17, CONFIGS[2]), (64, CONFIGS[0]), (65, CONFIGS[3]), (130, CONFIGS[3])],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_equals_pytorch(num_tokens: int, config: TileConfig, dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cuda" and dtype == torch.float32 and num_tokens > 64:
        pytest.skip("float32 is there to be compared with: its tiles of 128 tokens do not fit")
    x = torch.randn(num_tokens, 328, device=device).to(dtype)  # the last tile is not full
    matrix = made(97, 328, device)
    check_sums(
        lambda x, scratch, *extra: quantized_linear(x, matrix, config, scratch, *extra),
        x, product(x, matrix), partial(error, matrix=matrix), TOLERANCE[dtype],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_level_is_exact(dtype: torch.dtype, device: torch.device) -> None:
    """The matrix is one of all codes, the tokens pick its columns one by one."""
    wanted = (torch.arange(64 * 256) * 37 % 255 - MAX_CODE).view(64, 256)
    wanted[:, 0] = MAX_CODE  # so that all scales are one
    matrix = quantize([wanted.float()], wanted.shape, device)
    assert len(wanted.unique()) == 255
    check_columns(matrix, wanted, TileConfig(64, 128, 2), dtype)


def test_tiles_of_twice_the_columns(device: torch.device) -> None:
    x, matrix = torch.randn(3, 512, device=device), made(70, 512, device, 256)
    assert (
        error(quantized_linear(x, matrix, TileConfig(64, 256, 2), Scratch(device)), product(x, matrix), matrix) < 1e-5
    )


def test_the_same_bits_in_any_company(device: torch.device) -> None:
    check_company(torch.randn(16, 1024, device=device), made(64, 1024, device), CONFIGS[1])


@pytest.mark.each_value
@pytest.mark.parametrize("num_out", [576, 2048, 2560, 5120, 12352, 16480, 18432, 34816, 248320])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 65, 256, 512, 2048])
def test_what_is_split_meets_in_the_scratch(num_out: int, num_tokens: int) -> None:
    matrix = quantize([torch.empty(num_out, 5120, device="meta")], (num_out, 5120), torch.device("meta"))
    check_split(matrix, num_tokens, PROCESSORS)


# ---- As the model sees it ----


def linear(num_out: int, width: int, device: torch.device, bias: Tensor | None = None) -> CudaQuantizedLinear:
    form = CudaQuantizedFormat(CudaOps(device, torch.float32), int8)
    made = form.dense(torch.randn(num_out, width, device=device), bias)
    assert isinstance(made, CudaQuantizedLinear)
    return made


@pytest.mark.parametrize("num_tokens", [1, 40, LIBRARY_TOKENS[8] + 1])
def test_a_linear_of_few_or_many_tokens(num_tokens: int, device: torch.device) -> None:
    bias = torch.randn(70, device=device)
    made, x = linear(70, 128, device, bias), torch.randn(num_tokens, 128, device=device)
    add = torch.randn(num_tokens, 70, device=device)
    assert isinstance(made.matrix, Int8Matrix)
    wanted = product(x, made.matrix) + bias.cpu().double()
    assert error(made(x), wanted, made.matrix) < 1e-4
    assert error(made(x, add.clone()), wanted + add.cpu().double(), made.matrix) < 1e-4
    assert made.num_out == 70
    assert made.num_bytes == 70 * (128 + 4)


def test_drafts_read_the_first_rows_where_they_are(device: torch.device) -> None:
    check_first_rows(linear(70, 128, device))


def test_what_is_kept_as_it_is(device: torch.device) -> None:
    form = CudaQuantizedFormat(CudaOps(device, torch.bfloat16), int8)
    for name in ("model.layers.3.mlp.gate", "model.layers.3.mlp.gate.weight", "mtp.layers.0.mlp.shared_expert_gate"):
        assert isinstance(form.of(name).dense(torch.ones(64, 64, device=device)), CudaLinear), name
        assert form.of(name).stored_bytes("F32", (64, 64)) == 64 * 64 * 2
    for name in ("model.layers.3.mlp.gate_proj.weight", "lm_head", "model.layers.0.linear_attn.in_proj_a.weight"):
        assert form.of(name) is form, name
    assert form.of("model.layers.0.mlp.experts.3.gate_proj.weight") is form
    assert form.stored_bytes("BF16", (3, 32, 1024)) == 3 * form.stored_bytes("BF16", (32, 1024))
    assert form.stored_bytes("BF16", (32, 256)) == 32 * 256 + 32 * 4
    assert form.stored_bytes("BF16", (8, 1, 4)) == 8 * 4 * 2
    odd = form.dense(torch.ones(16, 12, device=device))  # its rows do not start where the copy engine can
    assert odd.num_bytes == 16 * 12 * 2 == form.stored_bytes("F32", (16, 12))
