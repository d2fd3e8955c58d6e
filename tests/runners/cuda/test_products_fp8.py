"""FP8 times FP8: products against float64 on the operands as they were rounded, with all that is fused into them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checks import check_reordered, check_rows, check_sums
from test_activations_fp8 import in_order
from test_fused_layers import BATCH, HIDDEN, layers_of, matrices, weights_of
from test_linear_fp8 import CODES
from test_linear_int4 import MEASURED, shaped
from torch import Tensor

from slipstream.runners.cuda.kernels.matmul.linear import Scratch, TileConfig, Unscaled, interleaved_rows
from slipstream.runners.cuda.kernels.matmul.linear_fp8 import (
    fp8_gated,
    fp8_linear,
    fp8_normed,
    fp8_tile_config,
    launch_fp8,
    tokens_of_a_block,
)
from slipstream.runners.cuda.kernels.matmul.linear_quantized import (
    SCRATCH_FLOATS,
    SPLIT_K_COUNTERS,
    compiled_for,
    quantized_gated,
    quantized_linear,
    quantized_normed,
)
from slipstream.runners.cuda.kernels.quant.activations import quantized_activations
from slipstream.runners.cuda.kernels.quant.fp8 import (
    BYTES,
    FACTOR_BITS,
    TILE,
    Fp8Matrix,
    empty,
    has_blocks,
    put,
    quantize,
)
from slipstream.runners.cuda.model.fp8 import Fp8Linear, Fp8QuantizingFormat
from slipstream.runners.cuda.model.fused_layers import FusedLayers, stack
from slipstream.runners.cuda.model.ops import CudaOps
from slipstream.runners.torch.models.layers import Sequential
from slipstream.runners.torch.ops import DenseLinear, RmsNorm, TorchOps

# Of a product's length. Sums are in float32; those of the FP8 tensor cores over a tile keep about 14 bits.
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 8e-3, torch.float16: 1e-3}
WIDTH = 3 * TILE


def made(
    num_rows: int,
    width: int,
    device: torch.device,
    num_kept: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    wide: bool = False,
) -> Fp8Matrix:
    """Of any codes and scales, each tile with its own. ``wide``: scales that are no bfloat16"""
    kept = torch.randn(num_kept, width).to(device, dtype) if num_kept else None
    matrix = empty((num_rows, width), device, kept, BYTES, wide=wide)
    codes = CODES[torch.randint(len(CODES), (num_rows, width))]
    scale = torch.logspace(-5, -1, num_rows)[:, None] * (1 + torch.rand(num_rows, width // TILE))
    put(matrix, slice(0, num_rows), codes.to(device), (scale if wide else scale.bfloat16().float()).to(device))
    return matrix


def coded_weights(matrix: Fp8Matrix) -> Tensor:
    """Read without our kernels. float64 [rows in codes, columns]"""
    pairs = matrix.words.view(torch.float8_e4m3fn).cpu().double().view(-1, matrix.num_tiles, TILE // 2, 2)
    values = torch.cat((pairs[..., 0], pairs[..., 1]), dim=2)
    return (values * (matrix.factors.cpu().double().T * 2.0**-FACTOR_BITS)[..., None]).flatten(1)


def rounded(x: Tensor) -> Tensor:
    """The activations that the tensor cores see. float64"""
    got = quantized_activations(x)
    values = torch.from_numpy(in_order(got)).view(torch.float8_e4m3fn).double()
    return (values * got.scales[:, : len(x)].T.cpu().double()[..., None]).flatten(1)


def exact(x: Tensor, matrix: Fp8Matrix) -> Tensor:
    wanted = rounded(x) @ coded_weights(matrix).T
    return wanted if matrix.kept is None else torch.cat((wanted, x.cpu().double() @ matrix.kept.cpu().double().T), 1)


def error(got: Tensor, wanted: Tensor, matrix: Fp8Matrix) -> float:
    """Every row counts by its own size."""
    weights = coded_weights(matrix)
    size = (weights if matrix.kept is None else torch.cat((weights, matrix.kept.cpu().double()))).norm(dim=1)
    return float(((got.cpu().double() - wanted) / size).norm() / (wanted / size).norm())


CONFIGS = [
    TileConfig(64, TILE, 4),
    TileConfig(64, TILE, 4, split=3),
    TileConfig(64, TILE, 4, split=2, warps=4),
    TileConfig(128, TILE, 3, split=2, warps=8),
]


@pytest.mark.each_value
@pytest.mark.parametrize("num_kept", [0, 37])
@pytest.mark.parametrize(
    ("num_tokens", "config"),
    [(1, CONFIGS[0]), (16, CONFIGS[1]), (17, CONFIGS[2]), (64, CONFIGS[0]), (65, CONFIGS[3]), (259, CONFIGS[3])],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("wide", [False, True])
def test_equals_float64_on_rounded_operands(
    wide: bool, num_tokens: int, config: TileConfig, dtype: torch.dtype, num_kept: int, device: torch.device
) -> None:
    matrix = made(97, WIDTH, device, num_kept, dtype, wide=wide)
    x = (torch.randn(num_tokens, WIDTH, device=device) * torch.logspace(-2, 2, WIDTH, device=device)).to(dtype)
    check_sums(
        lambda x, scratch, *extra: fp8_linear(x, matrix, config, scratch, *extra),
        x, exact(x, matrix), partial(error, matrix=matrix), TOLERANCE[dtype],
    )  # fmt: skip


def in_blocks(num_rows: int, width: int, device: torch.device, num_kept: int = 0) -> Fp8Matrix:
    """Scales of 128 x 128 weights, each another."""
    matrix = made(num_rows, width, device, num_kept)
    scales = torch.rand(width // TILE, -(-num_rows // TILE), device=device) + 0.1
    matrix.factors.copy_((scales * 2.0**FACTOR_BITS).repeat_interleave(TILE, 1)[:, :num_rows])
    assert has_blocks(matrix)
    return replace(matrix, in_blocks=True)


@pytest.mark.each_value
@pytest.mark.parametrize("num_kept", [0, 21])
@pytest.mark.parametrize(
    ("num_tokens", "block", "config"),
    [
        (64, 64, TileConfig(128, TILE, 3)),
        (70, 64, TileConfig(64, TILE, 3, split=2)),
        (130, 128, TileConfig(128, TILE, 3, split=3, warps=8)),
        (300, 128, TileConfig(64, TILE, 3, split=3)),
    ],
)
@pytest.mark.parametrize("blocks", [True, False])
def test_scales_of_blocks(
    blocks: bool, num_tokens: int, block: int, config: TileConfig, num_kept: int, device: torch.device
) -> None:
    matrix = replace(in_blocks(208, WIDTH, device, num_kept), in_blocks=blocks)
    x, scratch = torch.randn(num_tokens, WIDTH, device=device), Scratch(device, SCRATCH_FLOATS, SPLIT_K_COUNTERS)
    for _ in range(2):  # the counters of split products are as they were
        got = fp8_linear(x, matrix, config, scratch, launch=partial(launch_fp8, block_tokens=block))
        assert error(got, exact(x, matrix), matrix) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(("num_out", "width"), MEASURED)
def test_kernels_are_the_same_as_far_as_the_launch_says(num_out: int, width: int, blocks: bool) -> None:
    """The first step of a kind compiles what the others are captured with."""
    matrix, kernels = replace(shaped(num_out, width, "fp8"), in_blocks=blocks), {}  # type: Fp8Matrix, dict[int, object]
    for num_tokens in range(1, 1100):
        config = fp8_tile_config(matrix, num_tokens)
        used = replace(config, split=min(config.split, 2)), tokens_of_a_block(matrix, num_tokens)
        assert kernels.setdefault(compiled_for(num_tokens), used) == used, num_tokens


@pytest.mark.parametrize("num_rows", [384, 96])
def test_interleaved_rows_of_blocks(num_rows: int, device: torch.device) -> None:
    matrix = in_blocks(num_rows, WIDTH, device)
    matrix.reorder(interleaved_rows(num_rows, device))
    assert matrix.in_blocks == (num_rows % TILE == 0)
    config, x = TileConfig(64, TILE, 3), torch.randn(64, WIDTH, device=device) * 1e-3
    scratch = Scratch(device, SCRATCH_FLOATS, SPLIT_K_COUNTERS)
    wanted = exact(x, matrix)
    assert error(fp8_linear(x, matrix, config, scratch), wanted, matrix) < TOLERANCE[torch.float32]
    back = torch.argsort(interleaved_rows(num_rows, device))
    activated = TorchOps(device, torch.float64).silu_mul(wanted[:, back.cpu()])
    got = fp8_gated(x, matrix, fp8_tile_config(matrix, 64), scratch).cpu().double()
    assert (got - activated).norm() / activated.norm() < TOLERANCE[torch.float32]


def test_matrices_are_quantized_in_blocks(device: torch.device) -> None:
    weights = torch.randn(272, WIDTH, device=device)
    linear = Fp8QuantizingFormat(CudaOps(device, torch.bfloat16)).dense(weights)
    assert isinstance(linear, Fp8Linear)
    matrix = linear.matrix
    assert matrix.in_blocks
    assert float((matrix.weights(torch.float32) - weights).norm() / weights.norm()) < 0.03
    assert not has_blocks(made(272, WIDTH, device))
    assert not has_blocks(quantize([weights], weights.shape, device, BYTES))


def test_in_the_interpreter_sums_are_float32s(device: torch.device) -> None:
    """Where no tensor core rounds, only float32 does: nothing else is lost."""
    if device.type == "cuda":
        pytest.skip("for the interpreter")
    matrix, x = made(97, WIDTH, device), torch.randn(5, WIDTH)
    assert error(fp8_linear(x, matrix, CONFIGS[0], Scratch(device)), exact(x, matrix), matrix) < 1e-6


# Rows and columns as the layers of 27B and 35B-A3B have them, a 32nd of the rows and of 64 tiles each.
@pytest.mark.parametrize(
    ("num_rows", "width", "num_kept"),
    [
        (515, 2 * TILE, 3),
        (448, 2 * TILE, 0),
        (160, 2 * TILE, 0),
        (1088, 2 * TILE, 0),
        (160, 5 * TILE, 0),
        (230, TILE, 130),
    ],
)
@pytest.mark.parametrize("num_tokens", [3, 33, 200])
def test_tiles_as_they_are_chosen(
    num_rows: int, width: int, num_kept: int, num_tokens: int, device: torch.device
) -> None:
    matrix = made(num_rows - num_kept, width, device, num_kept)
    x = torch.randn(num_tokens, width, device=device)
    scratch = Scratch(device, SCRATCH_FLOATS, SPLIT_K_COUNTERS)
    got = fp8_linear(x, matrix, fp8_tile_config(matrix, num_tokens), scratch)
    assert error(got, exact(x, matrix), matrix) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("num_tokens", "config"), [(3, CONFIGS[1]), (20, CONFIGS[0])])
@pytest.mark.parametrize("follower", ["unquantized rows after it", "gated"])
def test_a_norm_between_two_products(follower: str, num_tokens: int, config: TileConfig, device: torch.device) -> None:
    """Half of it in the first one, half in the second; the activations between are rounded before they are scaled."""
    ops, scratch = TorchOps(device, torch.float64), Scratch(device, SCRATCH_FLOATS, SPLIT_K_COUNTERS)
    first, second = made(WIDTH, TILE, device), made(112, WIDTH, device, num_kept=0 if follower == "gated" else 5)
    x, add = torch.randn(num_tokens, TILE, device=device), torch.randn(num_tokens, WIDTH, device=device)
    norm = 1 + torch.randn(WIDTH, device=device)
    total, normed = fp8_normed(x, first, config, scratch, add, norm, 1e-3)
    wanted = exact(x, first) + add.cpu()
    assert (total.cpu().double() - wanted).norm() / wanted.norm() < TOLERANCE[torch.float32]
    scale = torch.rsqrt((total.cpu().double() ** 2).mean(1, keepdim=True) + 1e-3)
    assert torch.allclose(normed.values.cpu(), total.cpu() * norm.cpu(), rtol=1e-5)
    product = exact(normed.values, second) * scale
    if follower == "gated":
        second.reorder(interleaved_rows(112, device))
        got, product = fp8_gated(normed, second, config, scratch), ops.silu_mul(product)
    else:
        got = fp8_linear(normed, second, config, scratch)
    assert (got.cpu().double() - product).norm() / product.norm() < TOLERANCE[torch.float32]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_no_number_stays_with_its_token(device: torch.device) -> None:
    matrix, x = made(70, WIDTH, device), torch.randn(18, WIDTH)
    x[4, 200] = torch.nan
    got = fp8_linear(x.to(device), matrix, CONFIGS[0], Scratch(device)).cpu()
    assert got[4].isnan().all()
    assert got[torch.arange(18) != 4].isfinite().all()


def test_the_same_matrix_times_activations_as_they_are(device: torch.device) -> None:
    """Codes as bytes in the products that unpack them, for few tokens."""
    matrix, x = made(97, WIDTH, device, 5), torch.randn(7, WIDTH, device=device)
    assert matrix.kept is not None
    wanted = x.cpu().double() @ torch.cat((coded_weights(matrix), matrix.kept.cpu().double())).T
    got = quantized_linear(x, matrix, CONFIGS[0], Scratch(device))
    assert error(got, wanted, matrix) < 1e-6


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_codes_in_bytes_as_plain_weights(dtype: torch.dtype, device: torch.device) -> None:
    matrix = made(37, WIDTH, device)
    check_rows(matrix, coded_weights(matrix).float(), dtype, device)
    check_reordered(matrix, device)
    assert torch.equal(coded_weights(matrix.first(7)), coded_weights(matrix)[:7])


class Rounded(DenseLinear):
    """In float64, of activations rounded as the kernels do."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return DenseLinear.__call__(self, rounded(x.float()), add)


@pytest.mark.exhaustive
def test_fused_layers_round_each_product_s_activations(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms and activations inside them: as far from unrounded layers as float64 says that rounding leads."""
    weights = [[weight.to(device, torch.bfloat16) for weight in matrices()] for _ in range(2)]
    norms = (1 + 0.3 * torch.randn(2, 2, HIDDEN)).to(device)
    form = Fp8QuantizingFormat(CudaOps(device, torch.bfloat16))
    fused = stack(layers_of(weights, norms, form.ops, lambda weight: form.dense(weight.clone())))
    assert isinstance(fused, FusedLayers)
    x, exact = torch.randn(5, HIDDEN).to(device, torch.bfloat16), {}
    for kind in (DenseLinear, Rounded):
        made: Any = [[kind(weights_of(form.dense(weight)).cpu()) for weight in each] for each in weights]
        layers = layers_of(made, norms.cpu(), TorchOps(torch.device("cpu"), torch.float64), lambda each: each)
        exact[kind] = Sequential(layers)(x.cpu().double(), BATCH)
    off = {}
    for unmeasured in (64, 0):
        monkeypatch.setattr("slipstream.runners.cuda.model.fp8.UNMEASURED", unmeasured)
        off[unmeasured] = distance(fused(x.clone(), BATCH).cpu().double(), exact[DenseLinear])
    assert off[64] < 0.02
    # Not to the other's own values: what differs a little before it is rounded may differ by a step after it.
    size = distance(exact[Rounded], exact[DenseLinear])
    assert 0.7 * size < off[0] < 1.5 * size


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def test_a_linear_asks_how_to_multiply(device: torch.device) -> None:
    form = Fp8QuantizingFormat(CudaOps(device, torch.bfloat16))
    linear = form.dense(torch.randn(64, WIDTH, device=device))
    assert isinstance(linear, Fp8Linear)
    x, add = (torch.randn(3, width, device=device).bfloat16() for width in (WIDTH, 64))
    norm = RmsNorm(torch.rand(64, device=device), 1e-3, form.ops)
    for rounds in (False, True):
        form.choice.set(linear.shape, 16, rounds)
        usual = quantized_linear, quantized_normed, quantized_gated
        plain, normed, gated = (fp8_linear, fp8_normed, fp8_gated) if rounds else usual
        others = (linear.matrix, CONFIGS[0], form._quantized_scratch)
        wanted = [plain(x, *others, None, add), *normed(x, *others, add, norm.weight, norm.eps), gated(x, *others)]
        got = [linear(x, add), *linear.normed(x, add, norm), linear.gated(x)]
        for one, other in zip(got, wanted, strict=True):
            one, other = (each.values if isinstance(each, Unscaled) else each for each in (one, other))
            assert torch.equal(one, other)


def test_the_report_runs() -> None:
    """What a GPU will be timed with, on small shapes: on the GPU, or where there is none in the interpreter."""
    script = Path(__file__).parent / "fp8_report.py"
    paths = os.pathsep.join([str(script.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}  # also what chose the interpreter: tests/conftest.py
    command = [sys.executable, str(script), "--tiny", "--seconds", "1000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines].count("tiny experts") == 2
    errors = [float(found) for found in re.findall(r" error (\S+)", done.stdout)]
    assert len(errors) == 2
    assert max(errors) < TOLERANCE[torch.bfloat16]
    assert last == "all timed"


def test_both_layouts_hold_the_same_weights(device: torch.device) -> None:
    weights = torch.randn(75, WIDTH, device=device)
    moved, in_bytes = (quantize([weights], weights.shape, device, *layout) for layout in ((), (BYTES,)))
    assert torch.equal(moved.weights(torch.float32), in_bytes.weights(torch.float32))
    assert moved.num_bytes == in_bytes.num_bytes
