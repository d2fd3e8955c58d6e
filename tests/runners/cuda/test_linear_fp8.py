"""FP8 matrices: codes as PyTorch reads them, the layout in words, and products against PyTorch on the same weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from quantized_checks import check_reordered, check_rows, check_sums
from torch import Tensor

from slipstream.load.tensor import FP8, FP8_TYPES, FP8_WIDE, RawTensor
from slipstream.runners.cuda.kernels.matmul.linear import Scratch, TileConfig, interleaved_rows
from slipstream.runners.cuda.kernels.matmul.linear_quantized import (
    SCRATCH_FLOATS,
    SPLIT_K_COUNTERS,
    quantized_gated,
    quantized_linear,
    quantized_normed,
)
from slipstream.runners.cuda.kernels.quant.fp8 import (
    BYTES,
    FACTOR_BITS,
    MOVED,
    TILE,
    Fp8Matrix,
    empty,
    put,
    quantize,
    stored_bytes,
)
from slipstream.runners.cuda.model.linear import CudaLinear
from slipstream.runners.cuda.model.ops import CudaOps
from slipstream.runners.cuda.model.quantized import (
    CudaFp8Format,
    CudaQuantizedLinear,
    CudaStoredFormat,
    QuantizedExperts,
)
from slipstream.runners.cuda.warmup import stored_as
from slipstream.runners.torch.ops import TorchOps

# Of a product's length. Weights are rounded to the activations' type, by 2^-9 at most.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
CODES = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)  # but for NaN
WIDTH = 3 * TILE


def made(num_rows: int, width: int, device: torch.device, num_kept: int = 0, *, wide: bool = False) -> Fp8Matrix:
    """Of any codes and scales, each tile with its own. ``wide``: scales that are no bfloat16"""
    kept = torch.randn(num_kept, width).to(device) if num_kept else None
    matrix = empty((num_rows, width), device, kept, wide=wide)
    codes = CODES[torch.randint(len(CODES), (num_rows, width))]
    scale = torch.logspace(-5, -1, num_rows)[:, None] * (1 + torch.rand(num_rows, width // TILE))
    put(matrix, slice(0, num_rows), codes.to(device), (scale if wide else scale.bfloat16().float()).to(device))
    return matrix


def exact(matrix: Fp8Matrix) -> Tensor:
    """The weights that it stands for, read without our kernels. float64 [rows, columns]"""
    words = matrix.words.cpu().int().view(-1, matrix.num_tiles, TILE // 2)

    def bit(at: int, to: int, count: int = 1) -> Tensor:
        return (words >> at & (1 << count) - 1) << to

    low, high = bit(15, 7) | bit(4, 0, 7), bit(11, 7) | bit(12, 4, 3) | bit(0, 0, 4)
    values = torch.cat((low, high), dim=2).to(torch.uint8).view(torch.float8_e4m3fn)
    weights = (values.double() * (matrix.factors.cpu().double().T * 2.0**-FACTOR_BITS)[..., None]).flatten(1)
    return weights if matrix.kept is None else torch.cat((weights, matrix.kept.cpu().double()))


def error(got: Tensor, wanted: Tensor, matrix: Fp8Matrix) -> float:
    """Every row counts by its own size."""
    size = exact(matrix).norm(dim=1)
    return float(((got.cpu().double() - wanted) / size).norm() / (wanted / size).norm())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_code_is_what_pytorch_says(dtype: torch.dtype, device: torch.device) -> None:
    matrix = empty((1, 256), device)
    put(matrix, slice(0, 1), CODES.repeat(2)[None, :256].to(device), torch.ones(1, 2, device=device))
    wanted = CODES.repeat(2)[:256].view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(matrix.weights(dtype)[0].cpu(), wanted)
    x = torch.eye(256, dtype=dtype, device=device)
    got = torch.cat(
        [quantized_linear(x[at : at + 16], matrix, CONFIGS[0], Scratch(device))[:, 0] for at in range(0, 256, 16)]
    )
    assert torch.equal(got.cpu(), wanted)


CONFIGS = [
    TileConfig(64, 128, 3),
    TileConfig(64, 128, 3, split=3),
    TileConfig(64, 128, 3, split=2, warps=2),
    TileConfig(128, 128, 2, split=2, warps=8),
]


@pytest.mark.each_value
@pytest.mark.parametrize("num_kept", [0, 37])
@pytest.mark.parametrize(
    ("num_tokens", "config"),
    [(1, CONFIGS[0]), (16, CONFIGS[1]), (17, CONFIGS[2]), (64, CONFIGS[0]), (65, CONFIGS[3]), (130, CONFIGS[3])],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("wide", [False, True])
def test_equals_pytorch(
    wide: bool, num_tokens: int, config: TileConfig, dtype: torch.dtype, num_kept: int, device: torch.device
) -> None:
    if device.type == "cuda" and dtype == torch.float32 and num_tokens > 64:
        pytest.skip("float32 is there to be compared with: its tiles of 128 tokens do not fit")
    matrix = made(97, WIDTH, device, num_kept, wide=wide)
    if matrix.kept is not None:
        matrix = Fp8Matrix(matrix.words, matrix.factors, matrix.kept.to(dtype))
    x = torch.randn(num_tokens, WIDTH, device=device).to(dtype)
    check_sums(
        lambda x, scratch, *extra: quantized_linear(x, matrix, config, scratch, *extra),
        x, x.cpu().double() @ exact(matrix).T, partial(error, matrix=matrix), TOLERANCE[dtype],
    )  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize(("num_tokens", "config"), [(3, CONFIGS[1]), (20, CONFIGS[0])])
@pytest.mark.parametrize("follower", ["unquantized rows after it", "gated"])
def test_a_norm_between_two_products(follower: str, num_tokens: int, config: TileConfig, device: torch.device) -> None:
    """Half of it in the first one, half in the second."""
    ops, scratch = TorchOps(device, torch.float64), Scratch(device, SCRATCH_FLOATS, SPLIT_K_COUNTERS)
    first, second = made(WIDTH, TILE, device), made(112, WIDTH, device, num_kept=0 if follower == "gated" else 5)
    x, add = torch.randn(num_tokens, TILE, device=device), torch.randn(num_tokens, WIDTH, device=device)
    norm = 1 + torch.randn(WIDTH, device=device)
    total, normed = quantized_normed(x, first, config, scratch, add, norm, 1e-3)
    wanted = x.double() @ exact(first).to(device).T + add
    assert (total.double() - wanted).norm() / wanted.norm() < 1e-5
    product = ops.rms_norm(wanted, norm, 1e-3) @ exact(second).to(device).T
    if follower == "gated":
        second.reorder(interleaved_rows(112, device))
        got, product = quantized_gated(normed, second, config, scratch), ops.silu_mul(product)
    else:
        got = quantized_linear(normed, second, config, scratch)
    assert (got.double() - product).norm() / product.norm() < 1e-5


@pytest.mark.parametrize("layout", [MOVED, BYTES])
def test_scales_in_float32_are_not_rounded(layout: int, device: torch.device) -> None:
    """Weights in bfloat16 are off by half of their last bit, and by a 128th of that: a factor is two bfloat16 there."""
    codes = CODES[torch.randint(len(CODES), (37, WIDTH))]
    scale = torch.logspace(-5, -1, 37)[:, None] * (1 + torch.rand(37, WIDTH // TILE))
    matrix = empty((37, WIDTH), device, layout=layout, wide=True)
    put(matrix, slice(0, 37), codes.to(device), scale.to(device))
    values, scales = codes.view(torch.float8_e4m3fn), scale.repeat_interleave(TILE, dim=1)
    assert torch.equal(matrix.weights(torch.float32).cpu(), values.float() * scales)
    weights, got = values.double() * scales.double(), matrix.weights(torch.bfloat16).cpu()
    last_bit = torch.ldexp(torch.ones_like(weights), weights.frexp().exponent - 8)
    assert ((got.double() - weights).abs() <= last_bit * (0.5 + 0.5 / 128)).all()
    assert (got != weights.bfloat16()).float().mean() < 0.01
    assert matrix.num_bytes == stored_bytes((37, WIDTH), wide=True) == 37 * WIDTH + 3 * 40 * 4


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_all_rows_and_some_rows_as_plain_weights(dtype: torch.dtype, device: torch.device) -> None:
    matrix = made(37, WIDTH, device)
    check_rows(matrix, exact(matrix).float(), dtype, device)
    kept = torch.randn(5, WIDTH, device=device).to(dtype)
    both = Fp8Matrix(matrix.words, matrix.factors, kept).weights(dtype)
    assert torch.equal(both, torch.cat((matrix.weights(dtype), kept)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_off_by_half_a_step_at_most(dtype: torch.dtype, device: torch.device) -> None:
    parts = [torch.randn(rows, WIDTH, device=device).mul(0.03).to(dtype) for rows in (5, 70)]
    parts[0][2] = 0.0
    matrix, whole = quantize(iter(parts), (75, WIDTH), device), torch.cat(parts).double().cpu()
    scale = (matrix.factors.cpu().double().T * 2.0**-FACTOR_BITS).repeat_interleave(TILE, dim=1)
    off = (exact(matrix) - whole).abs()
    # Three bits after the first one; values below 2^-6 scales have steps of 2^-9; 448 scales may be too few.
    assert (off <= torch.maximum(whole.abs() * 2**-4, scale * 2**-10) * 1.01).all()
    assert (exact(matrix)[2] == 0).all()
    assert matrix.num_bytes == stored_bytes((75, WIDTH)) == 75 * WIDTH + 3 * 80 * 2


def test_rows_change_places(device: torch.device) -> None:
    matrix = made(24, WIDTH, device)
    check_reordered(matrix, device)
    assert torch.equal(exact(matrix.first(7)), exact(matrix)[:7])


def raw(num_rows: int, width: int = WIDTH, dtype: str = FP8) -> RawTensor:
    codes = CODES[torch.randint(len(CODES), (num_rows, width))].numpy()
    scale = torch.rand(num_rows, -(-width // TILE)) / 100
    scale = scale if dtype == FP8_WIDE else scale.bfloat16().float()
    return RawTensor("model.layers.0.mlp.up_proj.weight", dtype, (num_rows, width), codes, scale.numpy())


def values(part: RawTensor) -> Tensor:
    if part.scale is None:
        return torch.from_numpy(part.data).double()
    codes = torch.from_numpy(part.data).view(torch.float8_e4m3fn).double()
    return codes * torch.from_numpy(part.scale).double().repeat_interleave(TILE, dim=1)


def plain(num_rows: int) -> RawTensor:
    data = torch.randn(num_rows, WIDTH).bfloat16().float().numpy()
    return RawTensor("model.layers.0.linear_attn.in_proj_b.weight", "F32", (num_rows, WIDTH), data)


@pytest.mark.parametrize("dtype", FP8_TYPES)
@pytest.mark.parametrize("kind", [CudaStoredFormat, CudaFp8Format])
def test_what_is_stored_in_fp8_stays_as_it_is(kind: type, dtype: str, device: torch.device) -> None:
    form = kind(CudaOps(device, torch.bfloat16))
    parts = [raw(40, dtype=dtype), raw(24, dtype=dtype)]
    linear = form.linear(parts, None)
    assert isinstance(linear, CudaQuantizedLinear)
    assert isinstance(linear.matrix, Fp8Matrix)
    assert torch.equal(exact(linear.matrix), torch.cat([values(part) for part in parts]))
    assert sum(form.stored_bytes(part.dtype, part.shape) for part in parts) == linear.num_bytes


def test_matrices_with_other_scales_are_warmed_up_each(device: torch.device) -> None:
    form = CudaStoredFormat(CudaOps(device, torch.bfloat16))
    assert len({stored_as(form.linear([raw(16, dtype=dtype)], None)) for dtype in FP8_TYPES}) == 2


def test_beside_it_only_the_others_are_rounded_to_fp8(device: torch.device) -> None:
    """As recurrent layers of FP8 checkpoints are stored: in one matrix."""
    form, parts = CudaFp8Format(CudaOps(device, torch.bfloat16)), [plain(6), raw(40), raw(24), plain(5)]
    linear = form.linear(parts, None)
    assert isinstance(linear, CudaQuantizedLinear)
    assert isinstance(linear.matrix, Fp8Matrix)
    check_each_part(linear.matrix, parts, device)
    assert sum(form.stored_bytes(part.dtype, part.shape) for part in parts) == linear.num_bytes


def check_each_part(matrix: Fp8Matrix, parts: list[RawTensor], device: torch.device) -> None:
    """As stored in FP8, or as rounded to it alone."""
    for part, got in zip(parts, exact(matrix).split([part.shape[0] for part in parts]), strict=True):
        wanted = values(part)
        if part.scale is None:
            wanted = exact(quantize([wanted.float()], part.shape, device))
        assert torch.equal(got, wanted)


def test_experts_in_fp8_and_others(device: torch.device) -> None:
    form = CudaFp8Format(CudaOps(device, torch.bfloat16))
    gate_up = [[raw(128), raw(128)], [plain(128), plain(128)], [raw(128), plain(128)]]
    experts = form.experts(gate_up, [[raw(WIDTH, TILE)]] * 3)
    assert isinstance(experts, QuantizedExperts)
    assert isinstance(experts.gate_up, Fp8Matrix)
    check_each_part(experts.gate_up, [part for parts in gate_up for part in parts], device)


def test_rows_in_more_bits_stay_behind_it(device: torch.device) -> None:
    form, parts = CudaStoredFormat(CudaOps(device, torch.bfloat16)), [raw(40), raw(24), plain(6), plain(6)]
    linear = form.linear(parts, None)
    assert isinstance(linear, CudaQuantizedLinear)
    assert linear.num_out == 76
    assert torch.equal(exact(linear.matrix), torch.cat([values(part) for part in parts]))  # type: ignore[arg-type]
    assert sum(form.stored_bytes(part.dtype, part.shape) for part in parts) == linear.num_bytes


def test_other_orders_and_types_are_in_the_activations_type(device: torch.device) -> None:
    form = CudaStoredFormat(CudaOps(device, torch.bfloat16))
    for parts in ([plain(16)], [plain(16), plain(8)]):
        linear = form.linear(parts, None)
        assert isinstance(linear, CudaLinear)
        assert torch.equal(linear.weight.cpu().double(), torch.cat([values(part) for part in parts]))
