"""The PTX in our kernels, run by ptx.py as all tests in Triton's interpreter do: codes to values, rounded states,
split factors."""

from __future__ import annotations

import numpy as np
import ptx
import pytest
import torch
import triton
import triton.language as tl

from slipstream.runners.cuda.kernels.matmul import product
from slipstream.runners.cuda.kernels.quant import code_values, int4
from slipstream.runners.cuda.kernels.quant.code_layout import BIAS
from slipstream.runners.cuda.kernels.recurrent import gdn_chunks

TABLE = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
MASK = 0xFFFFFFFF


def run(text: str, inputs: dict[int, int], num_outputs: int) -> list[int]:
    """``inputs``: 32 bits by the number of an operand. The outputs, which come first."""
    registers = {at: np.array([value], np.uint32) for at, value in inputs.items()}
    return [int(each[0]) for each in ptx.run(text, registers, num_outputs)]


def halves(register: int) -> list[float]:
    """As two bfloat16."""
    return torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16).view(BF16).tolist()


def bits(low: float, high: float) -> int:
    a, b = (int(each) & 0xFFFF for each in torch.tensor([low, high]).to(BF16).view(torch.int16))
    return a | b << 16


BF16 = torch.bfloat16
RNG = np.random.default_rng(0)


def random_register() -> int:
    return int(RNG.integers(0, 1 << 32))


def codes(register: int) -> list[list[int]]:
    """Of each of the four places in a word, those of both words."""
    return [[register >> 16 * half + 4 * at & 15 for half in (0, 1)] for at in range(4)]


def test_four_bits() -> None:
    for offset in (0, 4, 8):
        word = random_register()
        found = run(code_values._FOUR_BITS.value, {4: word, 5: bits(-offset / 64, -offset / 64)}, 4)
        assert [halves(each) for each in found] == [[(code - offset) / 64 for code in pair] for pair in codes(word)]
    word = random_register()
    raw = [halves(each) for each in run(int4.FOUR_RAW_BITS.value, {4: word}, 4)]
    units = (2.0**-133, 2.0**-129, 2.0**-133, 2.0**-129)
    assert raw == [[code * unit for code in pair] for pair, unit in zip(codes(word), units, strict=True)]


@pytest.mark.parametrize("more_bits", [1, 2])
def test_planes(more_bits: int) -> None:
    plane = random_register()
    num_fields = 4 // more_bits
    text = (code_values._FOUR_FIELDS if more_bits == 1 else code_values._TWO_FIELDS).value
    fields = run(text, {num_fields: plane}, num_fields)
    for at, field in enumerate(fields):
        word = random_register()
        shift = 4 * more_bits * at
        wanted = [
            [
                code + ((plane >> 16 * half + shift + more_bits * place & (1 << more_bits) - 1) << 4)
                for half, code in enumerate(pair)
            ]
            for place, pair in enumerate(codes(word))
        ]
        asm = code_values._FIVE_BITS if more_bits == 1 else code_values._SIX_BITS
        found = run(asm.value, {4: word, 5: field, 6: bits(-0.25, -0.25)}, 4)
        assert [halves(each) for each in found] == [[(code - 16) / 64 for code in pair] for pair in wanted]
        if more_bits == 1:
            raw = run(code_values._FIVE_RAW_BITS.value, {4: word, 5: field}, 4)
            assert [halves(each) for each in raw] == [[code * 2.0**-133 for code in pair] for pair in wanted]


def test_table() -> None:
    entries = bytes(value + BIAS for value in TABLE)
    quarters = [int.from_bytes(entries[at : at + 4], "little") for at in range(0, 16, 4)]
    for _ in range(8):
        word = random_register()
        operands = {4: word, 5: quarters[0], 7: quarters[1], 9: quarters[2], 11: quarters[3]}
        found = run(code_values._TABLE.value, operands, 4)
        assert [halves(each) for each in found] == [[TABLE[code] / 64 for code in pair] for pair in codes(word)]


def test_fp8_factors() -> None:
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    for low, high in RNG.integers(0, 127, (16, 2)).tolist():
        other = int(RNG.integers(0, 127))
        word = low | high << 8 | other << 16 | low << 24
        found = run(code_values._FP8_HALVES.value, {2: word}, 2)
        assert [halves(each) for each in found] == [[values[low], values[other]], [values[high], values[low]]]


def test_raw_factors_make_up_for_raw_codes() -> None:
    """A code times its factor, both as they are, is 2^-39 of the product, and RAW_UNIT leads to that of values."""
    for code_unit, factor_unit in ((2.0**-133, 2.0**100), (2.0**-129, 2.0**96)):
        assert code_unit * factor_unit / 64 * float(code_values.RAW_UNIT.value) == 1 / 64**2


def test_states_rounded_to_bfloat16() -> None:
    numbers = torch.cat([torch.randn(30) * 10, torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])])  # the last two: ties
    registers = [int(each) & MASK for each in numbers.view(torch.int32)]
    for at in range(0, len(numbers), 2):
        found = run(gdn_chunks._TO_BFLOAT16.value, {2: registers[at], 3: registers[at + 1]}, 2)
        as_floats = torch.tensor(found).to(torch.int32).view(torch.float32)
        assert torch.equal(as_floats, numbers[at : at + 2].to(BF16).float())


def test_split_into_two_bfloat16() -> None:
    numbers = torch.cat([torch.randn(30) * 10, torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])])  # the last two: ties
    registers = [int(each) & MASK for each in numbers.view(torch.int32)]
    high = numbers.to(BF16)
    low = (numbers - high.float()).to(BF16)
    for at in range(0, len(numbers), 2):
        found = run(product._SPLIT.value, {2: registers[at], 3: registers[at + 1]}, 2)
        for word, wanted in zip(found, (high, low), strict=True):
            assert halves(word) == wanted[at : at + 2].tolist()


@triton.jit
def _converted(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def test_conversions_are_pytorchs(device: torch.device) -> None:
    """Ties, numbers that are almost the next one, the smallest, infinite ones and those that are none."""
    few = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 2 - 2.0**-9, 1e-40, -1e-40, 3.4e38, float("inf"), float("nan")]
    x = torch.cat([torch.randn(120) * 10, torch.tensor(few)]).to(device)
    narrow, wide = torch.empty_like(x, dtype=BF16), torch.empty_like(x)
    _converted[(1,)](x, narrow, N=128)
    _converted[(1,)](narrow, wide, N=128)
    assert torch.equal(narrow.nan_to_num(), x.to(BF16).nan_to_num())
    assert torch.equal(wide.nan_to_num(), x.to(BF16).float().nan_to_num())
    assert bool(narrow[-1].isnan())


def test_multiplied_and_added_in_one_step() -> None:
    """Halves of bfloat16 and of float16, rounded once."""
    pairs = torch.randn(3, 64, 2, dtype=torch.float64)
    for name, dtype in (("bf16x2", BF16), ("f16x2", torch.float16)):
        x, y, z = pairs.to(dtype).double()
        operands = {
            at + 1: each.to(dtype).view(torch.int32)[:, 0].numpy().view(np.uint32) for at, each in enumerate((x, y, z))
        }
        [found] = ptx.run(f"fma.rn.{name} $0, $1, $2, $3;", operands, 1)
        wanted = (x * y + z).to(dtype).view(torch.int32)[:, 0]
        assert torch.equal(torch.from_numpy(found.view(np.int32)), wanted)
