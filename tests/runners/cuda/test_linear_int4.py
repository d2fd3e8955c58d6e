"""4-bit matrices: quantization, the layout in words, and products against PyTorch on the same codes."""

from __future__ import annotations

from dataclasses import replace
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

from slipstream.runners.cuda.kernels.matmul.linear import Scratch, TileConfig
from slipstream.runners.cuda.kernels.matmul.linear_quantized import (
    LIBRARY_TOKENS,
    SPLIT_K_COUNTERS,
    compiled_for,
    quantized_linear,
    tile_config,
    tokens_of_a_block,
)
from slipstream.runners.cuda.kernels.quant import fp8, int4, int8
from slipstream.runners.cuda.kernels.quant.int4 import FACTOR_BITS, GROUP, MAX_CODE, Int4Matrix, quantize
from slipstream.runners.cuda.kernels.quant.int8 import Int8Matrix
from slipstream.runners.cuda.kernels.quant.quantize import UNIT_BITS, QuantizedMatrix
from slipstream.runners.cuda.model.linear import CudaLinear
from slipstream.runners.cuda.model.ops import CudaOps
from slipstream.runners.cuda.model.quantized import CudaInt4Format, CudaQuantizedLinear

# Of a product's length. Weights are rounded to the activations' type, by 2^-9 at most.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
# On an H200, for 1, 16 and 64 tokens, within 4 % of the fastest: rows, stages, split and warps.
MEASURED = {
    (34816, 5120): [(64, 4, 1, 2), (64, 4, 1, 4), (128, 3, 1, 8)],
    (5120, 17408): [(64, 4, 5, 2), (64, 4, 4, 4), (128, 3, 3, 8)],
    (16480, 5120): [(64, 4, 1, 2), (64, 3, 2, 4), (128, 3, 1, 8)],
    (18432, 2560): [(64, 4, 1, 2), (64, 4, 1, 4), (128, 3, 1, 8)],
    (2560, 9216): [(64, 4, 8, 2), (64, 4, 8, 4), (64, 3, 3, 4)],
    (12352, 2560): [(64, 4, 2, 2), (64, 4, 2, 4), (128, 3, 1, 8)],
    (2560, 4096): [(64, 4, 8, 2), (64, 4, 8, 4), (64, 3, 3, 4)],
}


def made(num_rows: int, width: int, device: torch.device) -> Int4Matrix:
    spread = torch.logspace(-3, 1, num_rows, device=device)[:, None]  # scales of their own for each row
    return quantize([torch.randn(num_rows, width, device=device) * spread], (num_rows, width), device)


def codes(matrix: Int4Matrix) -> Tensor:
    """As whole numbers, read from the words without our kernels. [rows, groups, GROUP]"""
    words = matrix.words.cpu().to(torch.int32).view(matrix.num_rows, matrix.num_tiles, 1, GROUP)
    return (words >> torch.tensor([0, 4, 8, 12])[:, None] & 15).flatten(1, 2)


def scales_and_zeros(matrix: Int4Matrix) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group, as stored. [rows, groups]"""
    stored = matrix.scales_zeros.cpu().T.contiguous().view(torch.bfloat16).double()
    factor, zero = stored.unflatten(1, (-1, 2)).unbind(2)
    sixteenths = torch.tensor([1, 16]).repeat(matrix.num_tiles * 2)
    return factor * sixteenths * 2.0**-FACTOR_BITS, zero * 2.0**UNIT_BITS


def exact(matrix: Int4Matrix) -> Tensor:
    """The weights that it stands for. float64 [rows, columns]"""
    scale, zero = scales_and_zeros(matrix)
    return (codes(matrix) * scale[..., None] + zero[..., None]).flatten(1)[:, : matrix.width]


def error(got: Tensor, wanted: Tensor, matrix: Int4Matrix) -> float:
    """Every row counts by its own size."""
    size = exact(matrix).norm(dim=1)
    return float(((got.cpu().double() - wanted) / size).norm() / (wanted / size).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_off_by_half_a_level_at_most(dtype: torch.dtype, device: torch.device) -> None:
    parts = [torch.randn(rows, 328, device=device).mul(0.03).to(dtype) for rows in (5, 70)]
    parts[0][2] = 0.0
    parts[0][3] = 0.1  # far from zero, and nothing between
    parts[1][4] = -0.1
    matrix, whole = quantize(iter(parts), (75, 328), device), torch.cat(parts).double().cpu()
    padded = torch.nn.functional.pad(whole, (0, 512 - 328)).view(75, 8, GROUP)
    scale, zero = scales_and_zeros(matrix)
    span = padded.amax(2).clamp(min=0.0) - padded.amin(2).clamp(max=0.0)
    assert torch.allclose(scale, span / MAX_CODE, rtol=2**-8)
    assert torch.allclose(zero, padded.amin(2).clamp(max=0.0), rtol=2**-8)
    off = (codes(matrix) * scale[..., None] + zero[..., None] - padded).abs()
    assert (off <= scale[..., None] * 0.5001).all()
    assert (exact(matrix)[2] == 0).all()
    assert torch.allclose(exact(matrix)[[3, 9]].abs(), torch.tensor(0.1).double(), rtol=2**-7)
    assert set(codes(matrix).unique().tolist()) == set(range(16))


def test_normal_weights_keep_as_much_as_four_bits_can(device: torch.device) -> None:
    """64 samples span 4.75 deviations: a code step is 0.317 of one, its error 0.091, but none at the two ends: 0.090.

    With one scale for a row of 1024 it would be 0.125.
    """
    weights = torch.randn(64, 1024, device=device)
    off = exact(quantize([weights], weights.shape, device)) - weights.cpu().double()
    assert float(off.norm() / weights.norm().cpu()) == pytest.approx(0.090, abs=0.002)


def test_large_matrices_are_rounded_slab_by_slab(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_slabs(quantize, device, monkeypatch)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [512, 200, 328])
def test_rows_are_level_times_scale_and_low_end(width: int, dtype: torch.dtype, device: torch.device) -> None:
    matrix = made(37, width, device)
    check_rows(matrix, exact(matrix).float(), dtype, device)


def test_rows_change_places(device: torch.device) -> None:
    check_reordered(made(24, 328, device), device)


CONFIGS = [
    TileConfig(64, 256, 3),
    TileConfig(64, 256, 3, split=3),
    TileConfig(32, 256, 3, split=2, warps=2),
    TileConfig(128, 256, 2, split=2, warps=8),
    TileConfig(64, 256, 2, warps=2),
]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("num_tokens", "config"),
    [
        *((1, CONFIGS[0]), (3, CONFIGS[4]), (8, CONFIGS[1]), (9, CONFIGS[4]), (16, CONFIGS[1])),
        *((17, CONFIGS[2]), (64, CONFIGS[0]), (65, CONFIGS[3]), (130, CONFIGS[3])),
    ],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_equals_pytorch(num_tokens: int, config: TileConfig, dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cuda" and dtype == torch.float32 and num_tokens > 32:
        pytest.skip("float32 is there to be compared with: its tiles of 64 tokens do not fit")
    x = torch.randn(num_tokens, 648, device=device).to(dtype)  # the last tile is not full
    matrix = made(97, 648, device)
    check_sums(
        lambda x, scratch, *extra: quantized_linear(x, matrix, config, scratch, *extra),
        x, x.cpu().double() @ exact(matrix).T, partial(error, matrix=matrix), TOLERANCE[dtype],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_level_is_exact(dtype: torch.dtype, device: torch.device) -> None:
    """The matrix is one of all codes at all places in words, the tokens pick its columns one by one."""
    wanted = (torch.arange(64 * 512) * 37 % 16 - 7).view(64, 512)
    wanted[:, ::GROUP], wanted[:, 1::GROUP] = -7, 8  # so that all scales are one
    matrix = quantize([wanted.float()], wanted.shape, device)
    check_columns(matrix, wanted, TileConfig(64, 256, 2), dtype)


def test_scales_from_tiny_to_huge(device: torch.device) -> None:
    """Stored scales and zero points stay within bfloat16, and so do the values computed from them."""
    size = torch.logspace(-9, 5, 70, device=device)[:, None]
    matrix = quantize([torch.randn(70, 256, device=device) * size], (70, 256), device)
    x = torch.randn(16, 256, device=device).bfloat16()
    got = quantized_linear(x, matrix, CONFIGS[0], Scratch(device))
    assert error(got, x.cpu().double() @ exact(matrix).T, matrix) < TOLERANCE[torch.bfloat16]


def test_the_same_bits_in_any_company(device: torch.device) -> None:
    check_company(torch.randn(8, 1024, device=device), made(64, 1024, device), CONFIGS[1])


@pytest.mark.each_value
@pytest.mark.parametrize("num_out", [576, 2048, 2560, 5120, 12352, 16480, 18432, 34816])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 17, 64, 65, 256, 257, 2048])
def test_what_is_split_meets_in_the_scratch(num_out: int, num_tokens: int) -> None:
    check_split(shaped(num_out, 20 * 256), num_tokens, SPLIT_K_COUNTERS)


def shaped(num_out: int, width: int, kind: str = "int4") -> QuantizedMatrix:
    """A matrix that only has a shape."""
    made = {"int4": int4.quantize, "int8": int8.quantize, "fp8": fp8.quantize}[kind]
    return made([torch.empty(num_out, width, device="meta")], (num_out, width), torch.device("meta"))


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize(("num_out", "width"), MEASURED)
def test_kernels_are_the_same_as_far_as_the_launch_says(num_out: int, width: int, kind: str) -> None:
    """The first step of a kind compiles what the others are captured with."""
    matrix, kernels = shaped(num_out, width, kind), {}  # type: QuantizedMatrix, dict[int, object]
    for num_tokens in range(1, 1100):
        config = tile_config(matrix, num_tokens)
        used = config and (replace(config, split=min(config.split, 2)), tokens_of_a_block(matrix.bits, num_tokens))
        assert kernels.setdefault(compiled_for(num_tokens), used) == used, num_tokens


@pytest.mark.parametrize("bits", [4, 8])
def test_only_products_in_4_bits_are_made_for_8_tokens(bits: int) -> None:
    blocks = [tokens_of_a_block(bits, num_tokens) for num_tokens in (1, 8, 9, 16, 17, 33, 64, 65, 600)]
    assert blocks == [8, 8, 16, 16, 32, 64, 64, 128, 128] if bits == 4 else [16, 16, 16, 16, 32, 64, 64, 128, 128]


@pytest.mark.parametrize(("num_out", "width"), MEASURED)
def test_cuts_are_among_the_fastest(num_out: int, width: int) -> None:
    for num_tokens, wanted in zip((1, 16, 64), MEASURED[num_out, width], strict=True):
        config = tile_config(shaped(num_out, width), num_tokens)
        assert config is not None
        assert (config.rows, config.stages, config.split, config.warps) == wanted


# ---- As the model sees it ----


def linear(num_out: int, width: int, device: torch.device, bias: Tensor | None = None) -> CudaQuantizedLinear:
    form = CudaInt4Format(CudaOps(device, torch.float32))
    made = form.dense(torch.randn(num_out, width, device=device), bias)
    assert isinstance(made, CudaQuantizedLinear)
    assert isinstance(made.matrix, Int4Matrix)
    return made


@pytest.mark.parametrize("num_tokens", [1, 20, LIBRARY_TOKENS[4] + 1])
def test_a_linear_of_few_or_many_tokens(num_tokens: int, device: torch.device) -> None:
    bias = torch.randn(70, device=device)
    made, x = linear(70, 256, device, bias), torch.randn(num_tokens, 256, device=device)
    add = torch.randn(num_tokens, 70, device=device)
    matrix = made.matrix
    assert isinstance(matrix, Int4Matrix)
    wanted = x.cpu().double() @ exact(matrix).T + bias.cpu().double()
    assert error(made(x), wanted, matrix) < 1e-4
    assert error(made(x, add.clone()), wanted + add.cpu().double(), matrix) < 1e-4
    assert made.num_out == 70
    assert (
        made.num_bytes == matrix.words.nbytes + 4 * 72 * 4 == 70 * 128 + 4 * 72 * 4
    )  # scales and zero points of 72 rows


def test_drafts_read_the_first_rows_where_they_are(device: torch.device) -> None:
    check_first_rows(linear(70, 256, device))


def test_what_is_kept_as_it_is_or_in_8_bits(device: torch.device) -> None:
    form = CudaInt4Format(CudaOps(device, torch.bfloat16))
    ones = torch.ones(64, 64, device=device)
    for name in ("model.layers.3.mlp.gate", "model.layers.3.mlp.gate.weight", "mtp.layers.0.mlp.shared_expert_gate"):
        assert isinstance(form.of(name).dense(ones), CudaLinear), name
        assert form.of(name).stored_bytes("F32", (64, 64)) == 64 * 64 * 2
    for name in ("lm_head", "lm_head.weight", "model.embed_tokens", "model.embed_tokens.weight"):
        whole = form.of(name).dense(ones)
        assert isinstance(whole, CudaQuantizedLinear)
        assert isinstance(whole.matrix, Int8Matrix)
        assert form.of(name).stored_bytes("BF16", (64, 256)) == 64 * (256 + 4)
    for name in ("model.layers.3.mlp.gate_proj.weight", "model.layers.0.linear_attn.in_proj_a.weight", "mtp.fc"):
        assert form.of(name) is form, name
    assert form.of("model.layers.0.mlp.experts.3.gate_proj.weight") is form
    assert form.stored_bytes("BF16", (3, 32, 1024)) == 3 * form.stored_bytes("BF16", (32, 1024))
    assert form.stored_bytes("BF16", (32, 1024)) == 32 * 1024 * 9 // 16
    assert form.stored_bytes("BF16", (8, 1, 4)) == 8 * 4 * 2
    odd = form.dense(torch.ones(16, 12, device=device))  # its rows do not start where the copy engine can
    assert odd.num_bytes == 16 * 12 * 2 == form.stored_bytes("F32", (16, 12))
