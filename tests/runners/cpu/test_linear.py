"""Products with packed weights: against float64 on the dequantised matrix, and bit for bit against themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.packed import W4, W4M, W8, PackedWeight, stacked_weight

EXAMPLES = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FORMATS = ("q4_0", "q4_1", "q8_0", "bf16", "f32")
QUANT = {"q4_0": GGMLQuantizationType.Q4_0, "q4_1": GGMLQuantizationType.Q4_1, "q8_0": GGMLQuantizationType.Q8_0}

LAYOUTS = {"q4_0": W4, "q4_1": W4M, "q8_0": W8}


def make(kernels: Kernels, name: str, rows: int, cols: int, seed: int = 0) -> tuple[PackedWeight, torch.Tensor]:
    """A random packed matrix and the same as float32."""
    matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    if name == "f32":
        return kernels.pack_float(matrix), matrix
    if name == "bf16":
        return kernels.pack_float(matrix.bfloat16()), matrix.bfloat16().float()
    raw = quants.quantize(matrix.numpy(), QUANT[name])
    weight = kernels.empty(LAYOUTS[name], rows, cols)
    kernels.fill_blocks(weight, 0, QUANT[name].name, raw)
    return weight, torch.from_numpy(np.array(quants.dequantize(raw, QUANT[name])))


def product(kernels: Kernels, x: torch.Tensor, weight: PackedWeight, **more: torch.Tensor) -> torch.Tensor:
    return kernels.linear(x, weight, torch.full((x.shape[0], weight.rows), torch.nan), **more)


def assert_close(got: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, quantized: bool = False) -> None:
    exact = x.double() @ matrix.double().T
    size = x.double().abs() @ matrix.double().abs().T  # the scale of rounding errors
    allowed = 2e-6 * size + 1e-6
    if quantized:  # each x is off by half a step at most, a step being 1 / 16256 of the block's largest
        steps = x.double().abs().unflatten(1, (-1, 32)).amax(2, keepdim=True).expand(-1, -1, 32).flatten(1) / 16256
        allowed += 0.5 * steps @ matrix.double().abs().T
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(m=st.integers(1, 70), n=st.integers(1, 200), blocks=st.integers(1, 9), missing=st.integers(0, 31))
def test_against_float64(any_kernels: Kernels, name: str, m: int, n: int, blocks: int, missing: int) -> None:
    cols = 32 * blocks - (missing if name in ("bf16", "f32") else 0)
    weight, matrix = make(any_kernels, name, n, cols, seed=m)
    x = torch.randn(m, cols)
    assert_close(product(any_kernels, x, weight), x, matrix, any_kernels.quantizes_x and name in QUANT)
    assert torch.allclose(any_kernels.embed(torch.arange(n), weight), matrix, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(m=st.integers(2, 70), n=st.integers(1, 200), blocks=st.integers(1, 9), data=st.data())
def test_rows_do_not_see_each_other(
    any_kernels: Kernels, name: str, m: int, n: int, blocks: int, data: st.DataObject
) -> None:
    weight, _ = make(any_kernels, name, n, 32 * blocks)
    x = torch.randn(m, 32 * blocks)
    whole = product(any_kernels, x, weight)
    at = data.draw(st.integers(0, m - 1))
    width = data.draw(st.integers(1, m - at))
    assert torch.equal(product(any_kernels, x[at : at + width], weight), whole[at : at + width])


@pytest.mark.parametrize("name", FORMATS)
def test_same_bits_for_every_m_and_thread_count(any_kernels: Kernels, name: str) -> None:
    weight, _ = make(any_kernels, name, 149, 192)
    x, reference = torch.randn(517, 192), None
    for threads in (1, 2, 3):
        any_kernels.set_threads(threads)
        whole = product(any_kernels, x, weight)
        reference = whole if reference is None else reference
        assert torch.equal(whole, reference)
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 37):
            assert torch.equal(product(any_kernels, x[:m], weight), reference[:m])
        assert torch.equal(torch.cat([product(any_kernels, row[None], weight) for row in x[:70]]), reference[:70])
    any_kernels.set_threads(2)


@pytest.mark.parametrize("name", FORMATS)
def test_bias_residual_and_strides(kernels: Kernels, name: str) -> None:
    weight, matrix = make(kernels, name, 77, 96)
    wide = torch.randn(5, 200)
    x, bias, add = wide[:, 50:146], torch.randn(77), torch.randn(5, 90)[:, 3:80]
    plain = product(kernels, x, weight)
    assert_close(plain, x, matrix, kernels.quantizes_x and name in QUANT)
    assert torch.equal(product(kernels, x, weight, bias=bias), plain + bias)
    assert torch.equal(product(kernels, x, weight, bias=bias, add=add), plain + bias + add)
    in_place = add.clone()
    assert torch.equal(kernels.linear(x, weight, in_place, add=in_place), plain + add)


@pytest.mark.parametrize("name", FORMATS)
def test_slice(kernels: Kernels, name: str) -> None:
    weight, x = make(kernels, name, 153, 64)[0], torch.randn(3, 64)
    assert torch.equal(product(kernels, x, weight.slice_rows(61)), product(kernels, x, weight)[:, :61])


def test_stack_of_different_formats(kernels: Kernels) -> None:
    parts = [make(kernels, name, 30, 64)[0] for name in FORMATS]
    x, bias = torch.randn(3, 64), torch.randn(150)
    whole = stacked_weight(parts)
    assert whole.rows == 150
    assert whole.num_bytes == sum(part.num_bytes for part in parts)
    apart = torch.cat([product(kernels, x, part) for part in parts], 1)
    add = torch.randn(3, 150)
    assert torch.equal(product(kernels, x, whole, bias=bias, add=add), apart + bias + add)
    assert stacked_weight(parts[:1]) is parts[0]


@pytest.mark.parametrize("m", [1, 2, 7])
def test_stack_whose_parts_take_x_in_different_forms(kernels: Kernels, m: int) -> None:
    """A row on its own is multiplied as bytes or as words, by the kind of codes."""
    parts = [make(kernels, name, 30, 64)[0] for name in ("q4_1", "q8_0", "q4_0", "q8_0")]
    x = torch.randn(m, 64)
    apart = torch.cat([product(kernels, x, part) for part in parts], 1)
    assert torch.equal(product(kernels, x, stacked_weight(parts)), apart)


def test_quantize_w8(kernels: Kernels) -> None:
    matrix = torch.randn(100, 96)
    matrix[3, :32] = 0
    weight = kernels.quantize_w8(matrix)
    back = kernels.embed(torch.arange(100), weight)
    step = matrix.reshape(100, 3, 32).abs().amax(2, keepdim=True) / 127
    assert ((back - matrix).reshape(100, 3, 32).abs() <= 0.6 * step).all()
    assert (back[3, :32] == 0).all()
