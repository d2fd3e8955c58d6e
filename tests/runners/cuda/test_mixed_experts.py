"""Experts whose two matrices are not stored alike: each stays in its own form, as the memory plan counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import permutations

import pytest
import torch
from test_coded_format import expert_parts, random_raw, stored_format, weights_of
from test_moe import reference_pairs, some_padding
from torch import Tensor

from slipstream.load.tensor import RawTensor
from slipstream.runners.cuda.model.coded import CodedLinear
from slipstream.runners.cuda.model.fp8 import Fp8StoredFormat
from slipstream.runners.cuda.model.linear import CudaLinear
from slipstream.runners.cuda.model.mixed_experts import MixedExperts
from slipstream.runners.cuda.model.ops import CudaOps
from slipstream.runners.cuda.model.quantized import CudaQuantizedLinear, CudaStoredFormat, quantized_format
from slipstream.runners.cuda.warmup import stored_as
from slipstream.runners.torch.ops import LinearStack

FORMS = {
    "FP8": ["F8_E4M3", "F8_E4M3"],
    "codes": ["Q4_0", "Q4_0"],
    "other codes": ["Q8_0", "FP4_16"],
    "floats": ["F32"] * 2,
}
PAIRS = [
    (one, other)
    for one, other in permutations(FORMS, 2)
    if other != "other codes" and {one, other} - {"codes", "other codes"}
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
SIZES = [(1, 4, 2), (5, 4, 3), (40, 3, 2), (90, 1, 1)]  # tokens, experts, active


def held_bytes(part: object) -> int:
    """Of matrices: of those in few bits as their kernels count them."""
    if isinstance(part, Tensor):
        return part.nbytes
    if hasattr(part, "num_bytes"):
        return int(part.num_bytes)
    if isinstance(part, tuple):
        return sum(map(held_bytes, part))
    assert is_dataclass(part)
    return sum(held_bytes(getattr(part, field.name)) for field in fields(part))


def stacked_weights(matrices: Sequence[Sequence[RawTensor]]) -> Tensor:
    return torch.stack([torch.cat([weights_of(part) for part in parts]) for parts in matrices]).float()


def planned_bytes(form: CudaStoredFormat, gate_up: list[list[RawTensor]], down: list[list[RawTensor]]) -> int:
    """As of stacks of each part."""
    parts = [(len(each), part) for each in (gate_up, down) for part in each[0]]
    return sum(form.stored_bytes(part.dtype, (count, *part.shape)) for count, part in parts)


def check_pairs(
    made: MixedExperts, gate_up: Tensor, down: Tensor, num_tokens: int, num_active: int, dtype: torch.dtype
) -> None:
    device, (count, hidden, _) = torch.device("cuda" if torch.cuda.is_available() else "cpu"), down.shape
    x = torch.randn(num_tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    expert = torch.rand(num_tokens, count).argsort(-1)[:, :num_active].int().contiguous().to(device)
    positions = some_padding(device, num_tokens)
    got = made.pairs(x, expert, positions).cpu()
    wanted = reference_pairs(x.cpu(), gate_up, down, expert.cpu())
    real = positions.cpu() >= 0
    assert (got[real].float() - wanted[real]).norm() / wanted[real].norm() < TOLERANCE[dtype]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("inner", [128, 384])
@pytest.mark.parametrize(("num_tokens", "count", "num_active"), SIZES)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_each_in_its_own_form(
    first: str,
    second: str,
    num_tokens: int,
    count: int,
    num_active: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    gate_up, down = expert_parts(FORMS[first], count, inner, 256), expert_parts(FORMS[second][:1], count, 256, inner)
    form = stored_format(device, dtype)
    made = form.experts(gate_up, down)
    assert isinstance(made, MixedExperts)
    assert held_bytes(made) == planned_bytes(form, gate_up, down)
    check_pairs(made, stacked_weights(gate_up), stacked_weights(down), num_tokens, num_active, dtype)


def test_a_width_that_fp8_does_not_take(device: torch.device) -> None:
    """One matrix of an expert has it, the other not: of files, and quantized at load."""
    gate_up, down = expert_parts(FORMS["FP8"], 3, 72, 256), expert_parts(FORMS["FP8"][:1], 3, 256, 72)
    floats = stacked_weights(gate_up), stacked_weights(down)
    form = stored_format(device)
    made = form.experts(gate_up, down)
    assert isinstance(made, MixedExperts)
    assert held_bytes(made) == planned_bytes(form, gate_up, down)
    check_pairs(made, *floats, 5, 2, torch.float32)
    rounding = quantized_format(CudaOps(device, torch.float32), "fp8")
    rounded = rounding.dense_experts(*(each.to(device) for each in floats))
    assert isinstance(rounded, MixedExperts)
    planned = rounding.stored_bytes("F32", (3, 144, 256)) + rounding.stored_bytes("F32", (3, 256, 72))
    assert held_bytes(rounded) == planned


def test_beside_products_that_round_their_activations(device: torch.device) -> None:
    """The half in FP8 lies as the FP8 tensor cores take it, and is multiplied with activations as they are."""
    gate_up, down = expert_parts(FORMS["FP8"], 3, 128, 256), expert_parts(["Q4_0"], 3, 256, 128)
    made = Fp8StoredFormat(CudaOps(device, torch.float32)).experts(gate_up, down)
    assert isinstance(made, MixedExperts)
    check_pairs(made, stacked_weights(gate_up), stacked_weights(down), 20, 2, torch.float32)


def test_layers_of_other_forms_are_warmed_up_each(device: torch.device) -> None:
    form = stored_format(device)
    kinds = [("FP8", "codes"), ("codes", "FP8"), ("codes", "floats"), ("floats", "codes"), ("FP8", "floats")]
    parts = [(expert_parts(FORMS[up], 2, 128, 128), expert_parts(FORMS[down][:1], 2, 128, 128)) for up, down in kinds]
    assert len({stored_as(form.experts(*each)) for each in parts}) == len(kinds)


@pytest.mark.parametrize("types", [["F32", "F8_E4M3", "F8_E4M3"], ["F8_E4M3", "F32", "F8_E4M3", "F32", "Q4_0"]])
def test_joined_matrices_with_fp8_after_floats(types: list[str], device: torch.device) -> None:
    parts = [random_raw(dtype, 48, 256, seed) for seed, dtype in enumerate(types)]
    form = stored_format(device)
    made = form.linear(parts, None)
    assert isinstance(made, LinearStack)
    assert {type(part) for part in made.parts} <= {CudaLinear, CudaQuantizedLinear, CodedLinear}
    assert made.num_bytes == sum(form.stored_bytes(part.dtype, part.shape) for part in parts)
    x = torch.randn(3, 256, device=device)
    torch.testing.assert_close(
        made(x).cpu().double(),
        x.cpu().double() @ torch.cat([weights_of(part) for part in parts]).T,
        atol=1e-4,
        rtol=1e-4,
    )
