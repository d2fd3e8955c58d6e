"""Matrices in the codes of quantised files: unpacked exactly, and products against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from some_gpus import ADA
from torch import Tensor

from slipstream.load.quantized.codes import E2M1, Codes, Container
from slipstream.runners.cuda.kernels.matmul.linear import Scratch, TileConfig
from slipstream.runners.cuda.kernels.matmul.linear_coded import coded_linear
from slipstream.runners.cuda.kernels.matmul.linear_quantized import SCRATCH_FLOATS, SPLIT_K_COUNTERS
from slipstream.runners.cuda.kernels.quant.code_layout import BIAS, container_layout
from slipstream.runners.cuda.kernels.quant.coded import CodedMatrix, empty
from slipstream.runners.cuda.kernels.quant.device_codes import from_host
from slipstream.runners.cuda.kernels.quant.pack import put

IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
# A weight is rounded to the activations' type, by 2^-9 at most.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}

Kind = tuple[Container, int, int]  # and of bytes: bits and offset
ONE_OF_A_KIND: dict[str, Kind] = {
    "Q4_K": (Container("affine4", 32, 256, has_minimum=True, minimum_has_factor=True), 4, 0),
    "Q2_K": (Container("affine4", 16, 256, has_minimum=True, minimum_has_factor=True), 4, 0),
    "Q3_K": (Container("affine4", 16, 256, offset=4), 4, 0),
    "Q5_K": (Container("int8", 32, 256, has_minimum=True, minimum_has_factor=True), 5, 0),
    "Q6_K": (Container("int8", 16, 256), 6, 32),
    "Q5_0": (Container("int8", 32, 32), 5, 16),
    "Q5_1": (Container("int8", 32, 32, has_minimum=True), 5, 0),
    "Q8_0": (Container("int8", 32, 32), 8, BIAS),
    "Q4_0": (Container("affine4", 32, 32, offset=8), 4, 0),
    "Q4_1": (Container("affine4", 32, 32, has_minimum=True), 4, 0),
    "IQ4_XS": (Container("table4", 32, 256, table=IQ4), 4, 0),
    "NVFP4": (Container("table4", 16, 16, table=E2M1), 4, 0),
    "AWQ": (Container("affine4", 128, 128, has_minimum=True, minimum_has_factor=True), 4, 0),
    "a span that is no tile": (Container("table4", 16, 64, table=E2M1), 4, 0),
    "a minimum without factors": (Container("affine4", 32, 256, has_minimum=True), 4, 0),
}
EVERY: dict[str, Kind] = {
    f"{kind} {group}{' of 256' * (span == 256)}{' minimum' * minimum}": (
        Container(
            kind,  # type: ignore[arg-type]
            group,
            span or group,
            has_minimum=minimum,
            minimum_has_factor=minimum and bool(span),
            offset=8 if kind == "affine4" and not minimum else 0,
            table=E2M1 if kind == "table4" else (),
        ),
        8,
        BIAS,
    )
    for kind in ("affine4", "table4", "int8")
    for group in (16, 32, 64, 128)
    for span in (0, 256)
    for minimum in (False, True)
    if not (kind == "table4" and minimum)
}
KINDS = ONE_OF_A_KIND | EVERY


def random_codes(kind: Kind, num_rows: int, width: int, seed: int = 0) -> Codes:
    """All codes, steps of many sizes in half precision as files have them."""
    container, bits, offset = kind
    rng = np.random.default_rng(seed)
    spans, groups = (num_rows, width // container.span), (num_rows, width // container.group)
    if container.kind == "int8":
        codes = rng.integers(-offset, 2**bits - offset, (num_rows, width)).astype(np.int8)
    else:
        codes = rng.integers(0, 16, (num_rows, width)).astype(np.uint8)

    def steps() -> np.ndarray:
        return (rng.uniform(0.001, 0.01, spans) * np.logspace(-1, 1, num_rows)[:, None]).astype("f2").astype("f4")

    made = Codes(container, codes, steps())
    if container.has_factor:
        made = replace(made, factor=rng.integers(-32, 64, groups).astype(np.int8))
    if container.has_minimum:
        made = replace(made, minimum_step=-8 * steps())
    if container.minimum_has_factor:
        made = replace(made, minimum_factor=rng.integers(0, 64, groups).astype(np.uint8))
    return made


def packed(codes: Codes, kind: Kind, device: torch.device) -> CodedMatrix:
    matrix = empty(container_layout(codes.container, *kind[1:]), codes.codes.shape, device)
    half = codes.codes.shape[0] // 2
    for rows in (slice(0, half), slice(half, None)):
        some = {
            name: None if (value := getattr(codes, name)) is None else value[rows]
            for name in ("codes", "step", "factor", "minimum_step", "minimum_factor")
        }
        put(matrix, slice(*rows.indices(codes.codes.shape[0])), from_host(replace(codes, **some), device))
    return matrix


def made(name: str, num_rows: int, width: int, device: torch.device) -> tuple[CodedMatrix, Tensor]:
    """And the weights that it stands for: float64."""
    codes = random_codes(KINDS[name], num_rows, width)
    return packed(codes, KINDS[name], device), torch.from_numpy(codes.weights()).double()


def some_width(name: str) -> int:
    """Tiles are not full where the type allows it."""
    return 768 if KINDS[name][0].span == 256 else 640


def check_unpacked(name: str, device: torch.device) -> None:
    matrix, wanted = made(name, 37, some_width(name), device)
    whole = matrix.weights(torch.float32)
    assert torch.allclose(whole.cpu().double(), wanted, rtol=1e-6, atol=1e-7)
    ids = torch.tensor([36, 0, 5, 5], dtype=torch.int32, device=device)
    assert torch.equal(matrix.weights(torch.float32, ids), whole[ids.long()])
    assert torch.equal(matrix.first(20).weights(torch.float32), whole[:20])
    arrays = (matrix.words, matrix.high, matrix.scales, matrix.minimums, matrix.steps)
    assert matrix.num_bytes == sum(0 if each is None else _storage(each) for each in arrays)


def _storage(tensor: Tensor) -> int:
    return tensor.stride(0) * tensor.shape[0] * tensor.element_size()


def check_product(name: str, num_tokens: int, dtype: torch.dtype, config: TileConfig, device: torch.device) -> None:
    matrix, weights = made(name, 97, some_width(name), device)
    x = torch.randn(num_tokens, matrix.width, device=device).to(dtype)
    out, add = torch.randn(2, num_tokens, 120, device=device).to(dtype)
    before, bias = out.clone(), torch.randn(97, device=device).to(dtype)
    scratch = Scratch(device, SCRATCH_FLOATS, SPLIT_K_COUNTERS)
    size = weights.norm(dim=1)
    wanted = x.cpu().double() @ weights.T
    # The second finds the counters as the first left them.
    for extra in ((), (add[:, 8:105], bias)):
        coded_linear(x, matrix, config, scratch, out[:, 8:105], *extra)
        got = out[:, 8:105].cpu().double()
        total = wanted + sum(each.cpu().double() for each in extra)
        assert float(((got - total) / size).norm() / (total / size).norm()) < TOLERANCE[dtype]
    assert torch.equal(out[:, :8], before[:, :8])
    assert torch.equal(out[:, 105:], before[:, 105:])
    assert not scratch.arrived.any()


FEW, SPLIT, WIDE = TileConfig(64, 256, 4, warps=2), TileConfig(64, 256, 3, split=2), TileConfig(128, 256, 2, warps=8)


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_unpacking_is_exact(name: str, device: torch.device) -> None:
    check_unpacked(name, device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EVERY)
def test_unpacking_every_container_is_exact(name: str, device: torch.device) -> None:
    check_unpacked(name, device)


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_equals_float64(name: str, device: torch.device) -> None:
    check_product(name, 3, torch.bfloat16, SPLIT, device)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "config"), [(1, FEW), (9, SPLIT), (17, WIDE), (64, SPLIT), (130, WIDE)])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_any_number_of_tokens(
    name: str, num_tokens: int, config: TileConfig, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type == "cuda" and dtype == torch.float32 and num_tokens > 16:
        pytest.skip("float32 is there to be compared with: its tiles do not fit")
    check_product(name, num_tokens, dtype, config, device)


@pytest.mark.parametrize("num_tokens", [2, 17])
@pytest.mark.parametrize("name", ["Q4_K", "Q4_1", "Q6_K", "AWQ"])
def test_gpus_that_multiply_from_registers_read_by_pointers(
    name: str, num_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.runners.cuda.kernels.matmul.linear_coded.gpu", lambda device: ADA)
    check_product(name, num_tokens, torch.bfloat16, SPLIT, device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("name", EVERY)
def test_every_container_equals_float64(name: str, num_tokens: int, device: torch.device) -> None:
    check_product(name, num_tokens, torch.bfloat16, SPLIT, device)
