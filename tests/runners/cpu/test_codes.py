"""Codes and scales in the kernels' layouts: every kind, group and form of scale, as exact as the file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from slipstream.load.quantized.codes import E2M1, Codes, Container
from slipstream.load.quantized.types import codes_of, container_of
from slipstream.load.tensor import RawTensor
from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.experts import PackedExperts
from slipstream.runners.cpu.formats import SLAB, PackedFormat, PackedLinear
from slipstream.runners.cpu.packed import BLOCK_TYPES, CODE_BITS, STACK, W4M, PackedWeight, layout_of, stacked_weight
from tests.runners.cpu.test_linear import assert_close, product

NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BLOCKS = {  # GGUF's, as the C code reads them: the container, bytes and columns of a block, where its half floats are
    "Q4_0": (Container("affine4", 32, 32, offset=8), 18, 32, (0,)),
    "Q4_1": (Container("affine4", 32, 32, has_minimum=True), 20, 32, (0, 2)),
    "Q5_0": (Container("int8", 32, 32), 22, 32, (0,)),
    "Q5_1": (Container("int8", 32, 32, has_minimum=True), 24, 32, (0, 2)),
    "Q8_0": (Container("int8", 32, 32), 34, 32, (0,)),
    "Q4_K": (Container("affine4", 32, 256, has_minimum=True, minimum_has_factor=True), 144, 256, (0, 2)),
    "Q5_K": (Container("int8", 32, 256, has_minimum=True, minimum_has_factor=True), 176, 256, (0, 2)),
    "Q6_K": (Container("int8", 16, 256), 210, 256, (208,)),
    "IQ4_NL": (Container("table4", 32, 32, table=NON_LINEAR), 18, 32, (0,)),
    "IQ4_XS": (Container("table4", 32, 256, table=NON_LINEAR), 136, 256, (0,)),
}
# Kind, group, span, minimum: none, a float, or a float times a factor.
FORMS = {
    f"{kind}-{group}-{span}-{minimum}": (kind, group, span, minimum)
    for kind in ("affine4", "table4", "int8")
    for group, span in ((16, 16), (32, 32), (64, 64), (128, 128), (16, 256), (32, 256), (64, 256), (32, 64))
    for minimum in (("none",) if kind == "table4" else ("none", "plain", "factor"))
}


def container_named(name: str) -> Container:
    kind, group, span, minimum = FORMS[name]
    table = () if kind != "table4" else E2M1 if group == 16 else NON_LINEAR
    offset = 8 if kind == "affine4" and minimum == "none" else 0
    return Container(kind, group, span, minimum != "none", minimum == "factor", offset, table)


def random_codes(container: Container, rows: int, cols: int, bits: int = 8) -> Codes:
    chance = np.random.default_rng(rows)
    steps, groups = (rows, cols // container.span), (rows, cols // container.group)
    signed = container.kind == "int8"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 16)
    if signed and container.has_minimum and bits < 8:
        low, high = 0, 2**bits
    codes = chance.integers(low, high, (rows, cols), np.int8 if signed else np.uint8)
    step = chance.uniform(0.001, 0.02, steps).astype(np.float32)
    minimum = -chance.uniform(0.001, 0.02, steps).astype(np.float32)
    return Codes(
        container,
        codes,
        step,
        chance.integers(-128, 128, groups, np.int8) if container.has_factor else None,
        minimum if container.has_minimum else None,
        chance.integers(0, 256, groups, np.uint8) if container.minimum_has_factor else None,
    )


def pack(kernels: Kernels, codes: Codes, bits: int = 8) -> PackedWeight:
    rows, cols = codes.codes.shape
    weight = kernels.empty(layout_of(codes.container, bits=bits), rows, cols)
    kernels.fill_codes(weight, 0, codes)
    return weight


def random_blocks(dtype: str, rows: int, cols: int) -> np.ndarray:
    """Any bytes are a block, but for its floats."""
    _, size, columns, floats = BLOCKS[dtype]
    chance = np.random.default_rng(rows)
    blocks = chance.integers(0, 256, (rows, cols // columns, size), np.uint8)
    for at in floats:
        step = chance.uniform(0.001, 0.02, (rows, cols // columns, 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = step.view(np.uint8)
    return blocks.reshape(rows, -1)


def check(kernels: Kernels, weight: PackedWeight, matrix: torch.Tensor) -> None:
    """Every number as it is, products within the rounding of x, the same bits in any company."""
    assert torch.equal(kernels.embed(torch.arange(weight.rows), weight), matrix)
    x = torch.randn(91, weight.cols)
    whole = product(kernels, x, weight)
    assert_close(whole, x, matrix, kernels.quantizes_x)
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 19, 31):
        assert torch.equal(product(kernels, x[3 : 3 + m], weight), whole[3 : 3 + m])
        assert torch.equal(product(kernels, x[-m:], weight), whole[-m:])


@pytest.mark.parametrize("name", FORMS)
def test_every_form(any_kernels: Kernels, name: str) -> None:
    codes = random_codes(container_named(name), 61, 768)
    check(any_kernels, pack(any_kernels, codes), torch.from_numpy(codes.weights()))


@pytest.mark.parametrize(("group", "bits", "minimum"), [(32, 5, False), (32, 5, True), (16, 6, False)])
def test_codes_of_few_bits(any_kernels: Kernels, group: int, bits: int, minimum: bool) -> None:
    codes = random_codes(Container("int8", group, 256, minimum, minimum), 61, 768, bits)
    weight = pack(any_kernels, codes, bits)
    check(any_kernels, weight, torch.from_numpy(codes.weights()))
    assert weight.num_bytes < pack(any_kernels, codes).num_bytes


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_blocks_as_files_have_them(any_kernels: Kernels, dtype: str) -> None:
    """The gguf package unpacks them independently; it multiplies in another order."""
    container, raw = BLOCKS[dtype][0], random_blocks(dtype, 61, 768)
    weight = any_kernels.empty(layout_of(container, bits=CODE_BITS.get(dtype, 8), half_precision=True), 61, 768)
    any_kernels.fill_blocks(weight, 0, dtype, raw)
    matrix = any_kernels.embed(torch.arange(61), weight)
    expected = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[dtype]))
    assert torch.allclose(matrix, expected, rtol=1e-6, atol=1e-6)
    check(any_kernels, weight, matrix)


@pytest.mark.parametrize(
    ("dtype", "bits"), [("Q4_K", 4.63), ("Q5_K", 5.63), ("Q6_K", 6.57), ("Q8_0", 8.51), ("IQ4_XS", 4.32)]
)
def test_bits_of_a_weight(kernels: Kernels, dtype: str, bits: float) -> None:
    """Those of the file, and an eighth of a bit at most: factors in whole bytes."""
    rows, container = 4 * kernels.panel_rows, BLOCKS[dtype][0]
    if kernels.isa == "portable":  # steps have 32 bits
        bits += 16 * (1 + container.has_minimum) / container.span
    layout = layout_of(container, bits=CODE_BITS.get(dtype, 8), half_precision=True)
    assert kernels.packed_bytes(layout, rows, 1024) * 8 / (rows * 1024) <= bits


def raw_tensor(dtype: str, rows: int, cols: int) -> RawTensor:
    """Of a type that has a container in this build."""
    if dtype in BLOCKS:
        return RawTensor("", dtype, (rows, cols), random_blocks(dtype, rows, cols))
    container = container_of(dtype)
    assert container is not None
    codes = random_codes(container, rows, cols)
    zero = np.random.default_rng(1).integers(0, 16, codes.step.shape, np.uint8) if container.has_minimum else None
    data = codes.codes if container.kind == "int8" else codes.codes[:, ::2] | codes.codes[:, 1::2] << 4
    return RawTensor("", dtype, (rows, cols), data, codes.step, zero)


FOLDERS = [f"{kind}_{group}{zero}" for kind, zero in (("INT4", ""), ("INT4", "_ZERO"), ("FP4", ""), ("INT8", ""))
           for group in (16, 32, 64, 128)]  # fmt: skip
KNOWN = [*(dtype for dtype in BLOCKS if container_of(dtype) is not None), *FOLDERS]


@pytest.mark.parametrize("dtype", KNOWN)
def test_a_matrix_of_a_file(kernels: Kernels, dtype: str) -> None:
    """In several slabs, as planned; and rounded where that is asked for."""
    raw = raw_tensor(dtype, SLAB // 1024 + 70, 1024)
    matrix = torch.from_numpy(codes_of(raw).weights())
    for asked, off in (("auto", 0.0), ("float32", 0.0), ("int8", 0.02), ("bfloat16", 0.003)):
        form = PackedFormat(kernels, asked)
        made = form.linear([raw], None)
        assert isinstance(made, PackedLinear)
        assert made.num_bytes == form.stored_bytes(dtype, raw.shape)
        found = made.rows(torch.arange(raw.shape[0]))
        assert (found - matrix).norm() <= off * matrix.norm(), asked


def test_types_that_do_not_fit_into_blocks_stay_exact(kernels: Kernels) -> None:
    raw = raw_tensor("FP4_16", 10, 48)
    made = PackedFormat(kernels, "auto").linear([raw], None)
    assert isinstance(made, PackedLinear)
    assert torch.equal(made.rows(torch.arange(10)), torch.from_numpy(codes_of(raw).weights()))


def test_parts_of_several_types(kernels: Kernels) -> None:
    """Neighbours of one type are one matrix; the others are stacked; a stack prepares x once for all."""
    parts = [
        raw_tensor(dtype, rows, 256) for rows, dtype in ((30, "Q4_0"), (50, "Q4_0"), (7, "INT4_32"), (9, "INT8_64"))
    ]
    form = PackedFormat(kernels, "auto")
    made = form.linear(parts, None)
    assert isinstance(made, PackedLinear)
    assert made.weight.layout == STACK
    assert [part.rows for part in made.weight.parts] == [80, 7, 9]
    x = torch.randn(13, 256)
    assert torch.equal(made(x), torch.cat([form.linear([part], None)(x) for part in parts], 1))


@pytest.mark.parametrize("m", [1, 6, 7, 8, 19, 25])
def test_parts_that_take_many_rows_in_different_ways(any_kernels: Kernels, m: int) -> None:
    """From how many rows on they are multiplied panel by panel depends on the kind of codes."""
    kinds = [
        (Container("int8", 16, 256), 6),
        (Container("affine4", 32, 256, True, True), 4),
        (Container("int8", 32, 256), 5),
    ]
    parts = [pack(any_kernels, random_codes(form, 30, 256, bits), bits) for form, bits in (*kinds, *reversed(kinds))]
    x = torch.randn(m, 256)
    apart = torch.cat([product(any_kernels, x, part) for part in parts], 1)
    assert torch.equal(product(any_kernels, x, stacked_weight(parts)), apart)


@pytest.mark.parametrize("asked", ["auto", "float32"])
def test_columns_in_another_order(any_kernels: Kernels, asked: str) -> None:
    """Stored column i is column order[i]."""
    chance, form = np.random.default_rng(0), PackedFormat(any_kernels, asked)
    stored = [raw_tensor(dtype, rows, 256) for rows, dtype in ((40, "INT4_128"), (20, "INT4_128"), (30, "INT4_128"))]
    orders = [chance.permutation(256).astype(np.int32) for _ in range(2)]
    parts = [
        RawTensor("", raw.dtype, raw.shape, raw.data, raw.scale, raw.zero, order)
        for raw, order in zip(stored, (orders[0], orders[0], orders[1]), strict=True)
    ]
    made = form.linear(parts, None)
    assert isinstance(made, PackedLinear)
    assert [part.rows for part in made.weight.parts] == ([60, 30] if asked == "auto" else [])
    matrix = torch.empty(90, 256)
    for at, part in zip((0, 40, 60), parts, strict=True):
        matrix[at : at + part.shape[0], torch.from_numpy(part.order).long()] = torch.from_numpy(
            codes_of(part).weights()
        )
    x = torch.randn(11, 256)
    assert_close(made(x), x, matrix, any_kernels.quantizes_x and asked == "auto")
    first = form.linear(parts[:2], None)
    assert isinstance(first, PackedLinear)
    assert torch.equal(first.rows(torch.arange(60)), matrix[:60])


def test_drafts_read_four_bits(kernels: Kernels) -> None:
    """Codes of 4 bits are not rounded again."""
    form, x = PackedFormat(kernels, "auto"), torch.randn(2, 256)
    eight, four = (form.linear([raw_tensor(dtype, 100, 256)], None) for dtype in ("INT8_32", "FP4_32"))
    assert isinstance(eight, PackedLinear)
    assert isinstance(four, PackedLinear)
    assert eight.for_drafts(60).weight.layout == W4M
    assert four.for_drafts(60).weight.data is four.weight.data
    assert torch.equal(four.for_drafts(60)(x), four(x)[:, :60])
    rough, exact = eight.for_drafts(60)(x), eight(x)[:, :60]
    assert 0 < (rough - exact).norm() < 0.1 * exact.norm()


def test_experts(kernels: Kernels) -> None:
    """Gate and up of different types; each token's experts as single products give them."""
    count, hidden, inner, form = 3, 256, 128, PackedFormat(kernels, "auto")
    gate_up = [[raw_tensor("INT4_32", inner, hidden), raw_tensor("FP4_16", inner, hidden)] for _ in range(count)]
    down = [[raw_tensor("INT8_16", hidden, inner)] for _ in range(count)]
    experts = form.experts(gate_up, down)
    assert isinstance(experts, PackedExperts)
    x, scores = torch.randn(5, hidden), torch.randn(5, count + 1)
    zeros = torch.zeros(5, hidden)
    out = kernels.moe(experts.address(1), x, scores, zeros, zeros)
    best = scores[:, :count].argmax(1)
    for token in range(5):
        row, expert = x[token : token + 1], int(best[token])
        active = kernels.silu_mul(form.linear(gate_up[expert], None)(row), torch.empty(1, inner))
        assert torch.allclose(out[token], form.linear(down[expert], None)(active)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_largest_sums_fit(any_kernels: Kernels, dtype: str, byte: int) -> None:
    """All codes the largest or the smallest, and both bytes of x: nothing overflows, with any number of rows."""
    raw, floats = np.full_like(random_blocks(dtype, 24, 512), byte), BLOCKS[dtype][3]
    blocks = raw.reshape(24, -1, BLOCKS[dtype][1])
    for at in floats:
        blocks[:, :, at : at + 2] = np.array([0.5], np.float16).view(np.uint8)
    layout = layout_of(BLOCKS[dtype][0], bits=CODE_BITS.get(dtype, 8), half_precision=True)
    weight = any_kernels.empty(layout, 24, 512)
    any_kernels.fill_blocks(weight, 0, dtype, raw)
    row = torch.full((512,), (127 * 128 - 64) / (127 * 128))
    row[::32] = 1.0
    x = torch.tensor([1.0, -1.0] * 13)[:, None] * row
    matrix = any_kernels.embed(torch.arange(24), weight)
    for m in (*range(1, 8), 25):
        assert_close(product(any_kernels, x[:m], weight), x[:m], matrix, any_kernels.quantizes_x)
        assert_close(product(any_kernels, -x[:m], weight), -x[:m], matrix, any_kernels.quantizes_x)
