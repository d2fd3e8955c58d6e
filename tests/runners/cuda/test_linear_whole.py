"""Products of few tokens in whole numbers: against float64, whatever the matrix is stored in."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from test_linear_coded import EVERY, ONE_OF_A_KIND, made, some_width
from torch import Tensor

from slipstream.runners.cuda.kernels.gpus import Gpu
from slipstream.runners.cuda.kernels.matmul import linear_whole
from slipstream.runners.cuda.kernels.matmul.linear import Scratch
from slipstream.runners.cuda.kernels.matmul.linear_quantized import SCRATCH_FLOATS, SPLIT_K_COUNTERS
from slipstream.runners.cuda.kernels.matmul.linear_whole import multiplied, whole_linear
from slipstream.runners.cuda.kernels.quant.whole_numbers import WholeNumbers, whole_numbers
from slipstream.runners.cuda.model import coded
from slipstream.runners.cuda.model.coded import CodedLinear, CodedStack

TOLERANCE = 1e-4  # of a product's length: activations have 15 bits, weights all of theirs
BF16 = torch.bfloat16


@triton.jit
def _one_instruction(a, b, c, out):
    lane = tl.arange(0, 32)
    g = lane >> 2
    q = lane & 3
    c0, c1, c2, c3 = multiplied(
        tl.load(a + g * 8 + q), tl.load(a + (g + 8) * 8 + q),
        tl.load(a + g * 8 + 4 + q), tl.load(a + (g + 8) * 8 + 4 + q),
        tl.load(b + g * 8 + q), tl.load(b + g * 8 + 4 + q),
        tl.load(c + g * 8 + 2 * q), tl.load(c + g * 8 + 2 * q + 1),
        tl.load(c + (g + 8) * 8 + 2 * q), tl.load(c + (g + 8) * 8 + 2 * q + 1),
    )  # fmt: skip
    tl.store(out + g * 8 + 2 * q, c0)
    tl.store(out + g * 8 + 2 * q + 1, c1)
    tl.store(out + (g + 8) * 8 + 2 * q, c2)
    tl.store(out + (g + 8) * 8 + 2 * q + 1, c3)


def test_the_instruction(device: torch.device) -> None:
    """As PTX documents it. On a GPU this is the real one, elsewhere ours for the interpreter."""
    codes = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    numbers = torch.randint(-128, 128, (8, 32), dtype=torch.int8)
    begin = torch.randint(-(1 << 20), 1 << 20, (16, 8), dtype=torch.int32)
    out = torch.zeros(16, 8, dtype=torch.int32, device=device)
    words = (each.contiguous().view(torch.int32).to(device) for each in (codes, numbers))
    _one_instruction[(1,)](*words, begin.to(device), out, num_warps=1)
    assert torch.equal(out.cpu(), begin + (codes.int() @ numbers.int().T))


def values_of(numbers: WholeNumbers) -> Tensor:
    """The activations that they stand for, without those that fill up. float64 [tokens, padded columns]"""
    tokens, tiles = numbers.units.shape
    high, low = numbers.numbers.cpu().long().view(tokens, tiles, 8, 2, 32).unbind(3)
    whole = (256 * high + low).view(tokens, tiles, 2, 4, 32).transpose(2, 3).reshape(tokens, tiles, 256)
    sums = numbers.sums.cpu().view(tokens, tiles, 2, 4, 2).transpose(2, 3).reshape(tokens, tiles, 16)
    assert torch.equal(whole.view(tokens, tiles, 16, 16).sum(3), sums.long())
    return (whole * numbers.units.cpu().double()[:, :, None]).flatten(1)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_activations_keep_fifteen_bits(dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(3, 640) * torch.logspace(-3, 3, 640)).to(dtype)
    x[1, :256] = 0.0
    x[2, 300] = 60000.0  # one that dwarfs all others of its tile
    got = values_of(whole_numbers(x.to(device)))
    wanted = torch.nn.functional.pad(x.double(), (0, 128))
    largest = wanted.view(3, 3, 256).abs().amax(2, keepdim=True).expand(3, 3, 256).flatten(1)
    assert bool(((got - wanted).abs() <= largest * 2.0**-14).all())
    large = wanted.abs() >= largest * 2.0**-3
    assert torch.equal(got[large], wanted[large])


def test_rows_that_lie_apart(device: torch.device) -> None:
    x = torch.randn(4, 600, device=device).to(BF16)
    apart = whole_numbers(x[:, 40:552])
    together = whole_numbers(x[:, 40:552].contiguous())
    assert torch.equal(values_of(apart), values_of(together))


def check(name: str, num_tokens: int, device: torch.device, num_rows: int = 37) -> None:
    matrix, weights = made(name, num_rows, some_width(name), device)
    x = torch.randn(num_tokens, matrix.width, device=device).to(BF16)
    out, add = torch.randn(2, num_tokens, num_rows + 20, device=device)
    before, bias = out.clone(), torch.randn(num_rows, device=device)
    wanted, size = x.cpu().double() @ weights.T, weights.norm(dim=1)
    columns = slice(8, 8 + num_rows)
    for extra in ((), (add[:, columns], bias)):
        whole_linear(whole_numbers(x), matrix, out[:, columns], *extra)
        total = wanted + sum(each.cpu().double() for each in extra)
        got = out[:, columns].cpu().double()
        assert float(((got - total) / size).norm() / (total / size).norm()) < TOLERANCE
    assert torch.equal(out[:, :8], before[:, :8])
    assert torch.equal(out[:, columns.stop :], before[:, columns.stop :])


@pytest.mark.each_value
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_equals_float64(name: str, num_tokens: int, device: torch.device) -> None:
    check(name, num_tokens, device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("name", EVERY)
def test_every_container_equals_float64(name: str, num_tokens: int, device: torch.device) -> None:
    check(name, num_tokens, device)


@pytest.mark.parametrize("warps", [4, 8])
def test_wider_matrices_are_shared_by_fewer_warps(
    warps: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [linear_whole.warps_of(-(-num_rows // 16)) for num_rows in (96, 5120, 34816)] == [16, 8, 4]
    monkeypatch.setattr(linear_whole, "warps_of", lambda blocks: warps)
    check("Q4_K", 2, device)


def test_what_is_no_number_stays_none(device: torch.device) -> None:
    matrix, _ = made("Q4_K", 16, 512, device)
    x = torch.randn(4, 512, device=device).to(BF16)
    x[1, 5], x[2, 300] = float("inf"), float("nan")
    out = torch.zeros(4, 16, device=device)
    whole_linear(whole_numbers(x), matrix, out)
    assert [bool(row.isnan().all()) for row in out] == [False, True, True, False]
    assert bool(out[[0, 3]].isfinite().all())


def test_columns_of_activations_one_by_one(device: torch.device) -> None:
    """Every column meets its own weights, in every place of a tile."""
    matrix, weights = made("Q8_0", 16, 512, device)
    for columns in range(0, 512, 4):
        x = torch.eye(512, dtype=BF16, device=device)[columns : columns + 4]
        out = torch.zeros(4, 16, device=device)
        whole_linear(whole_numbers(x), matrix, out)
        assert torch.allclose(out.cpu().double(), weights.T[columns : columns + 4], rtol=1e-6, atol=0.0)


# ---- As the model sees it ----


def linear(name: str, device: torch.device, dtype: torch.dtype) -> tuple[CodedLinear, Tensor]:
    matrix, weights = made(name, 40, 512, device)
    return CodedLinear(matrix, None, Scratch(device, SCRATCH_FLOATS, SPLIT_K_COUNTERS), dtype), weights


def test_few_tokens_of_16_bits_are_multiplied_so(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(coded, "whole_numbers", lambda x: calls.append(x.shape[0]) or whole_numbers(x))
    for dtype in (BF16, torch.float32):
        product, _ = linear("Q4_K", device, dtype)
        for num_tokens in (1, 4, 5):
            product(torch.randn(num_tokens, 512, device=device).to(dtype))
    assert calls == [1, 4]


def test_gpus_without_such_products(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "gpu", lambda device: Gpu((7, 5), 64 << 10, 40, has_pdl=False))
    assert not linear("Q4_K", device, BF16)[0].takes_whole_numbers(torch.zeros(1, 512, dtype=BF16, device=device))


def test_parts_share_their_activations(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(coded, "whole_numbers", lambda x: calls.append(x.shape[0]) or whole_numbers(x))
    (first, a), (second, b) = (linear(name, device, BF16) for name in ("Q4_K", "Q6_K"))
    x = torch.randn(3, 512, device=device).to(BF16)
    got = CodedStack((first, second))(x).cpu().double()
    wanted = x.cpu().double() @ torch.cat((a, b)).T
    assert float((got - wanted).norm() / wanted.norm()) < 8e-3
    assert calls == [3]
