"""Matrices that stay in the codes of their file, as a model sees them: merged, stacked, experts, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks
from test_linear_coded import ONE_OF_A_KIND
from test_moe import reference_pairs, some_padding
from torch import Tensor

from slipstream.errors import UnknownModel
from slipstream.load.dequantize import E4M3_VALUES, dequantize
from slipstream.load.quantized.codes import Codes
from slipstream.load.quantized.types import codes_of, container_of
from slipstream.load.tensor import FP8, FP8_GROUP, RawTensor
from slipstream.runners.cuda.kernels.matmul.linear_coded import LIBRARY_TOKENS
from slipstream.runners.cuda.kernels.quant.device_codes import DeviceCodes, device_codes
from slipstream.runners.cuda.model.coded import CodedExperts, CodedLinear
from slipstream.runners.cuda.model.linear import CudaLinear
from slipstream.runners.cuda.model.ops import CudaOps
from slipstream.runners.cuda.model.quantized import CudaQuantizedLinear, CudaStoredFormat, quantized_format
from slipstream.runners.cuda.warmup import one_of_each, stored_as
from slipstream.runners.torch.models.layers import DecoderLayer, DenseMlp, Sequential
from slipstream.runners.torch.ops import LinearStack

NO_PART: Any = None
# Where a block's half-precision numbers are.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0]}
FOLDER_TYPES = ["INT4_32", "INT4_128", "INT4_128_ZERO", "FP4_16", "FP4_32", "INT8_128"]


def random_raw(dtype: str, num_rows: int, width: int, seed: int = 0, name: str = "a matrix") -> RawTensor:
    rng = np.random.default_rng(seed)
    if dtype in HALVES:
        columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
        blocks = rng.integers(0, 256, (num_rows, width // columns, size)).astype(np.uint8)
        for at in HALVES[dtype]:
            halves = rng.uniform(0.0001, 0.001, blocks.shape[:2]).astype("<f2")
            blocks[:, :, at : at + 2] = halves.view(np.uint8).reshape(*blocks.shape[:2], 2)
        return RawTensor(name, dtype, (num_rows, width), blocks.reshape(num_rows, -1))
    if dtype == "F32":
        return RawTensor(name, dtype, (num_rows, width), rng.normal(0, 0.05, (num_rows, width)).astype(np.float32))
    if dtype == FP8:
        codes = rng.integers(0, 127, (num_rows, width)) + 128 * rng.integers(0, 2, (num_rows, width))
        scale = rng.uniform(0.0001, 0.0005, (num_rows, -(-width // FP8_GROUP))).astype(np.float32)
        scale = (scale.view(np.uint32) & 0xFFFF0000).view(np.float32)  # a bfloat16
        return RawTensor(name, dtype, (num_rows, width), codes.astype(np.uint8), scale)
    container = container_of(dtype)
    assert container is not None
    groups = (num_rows, width // container.group)
    scale = rng.uniform(0.001, 0.01, groups).astype("f2").astype("f4")
    if dtype == "FP4_16":  # FP8 of all sizes, times a number of the tensor
        scale = E4M3_VALUES[rng.integers(0, 120, groups)] * rng.uniform(1e-5, 1e-4, ()).astype("f4")
    if container.kind == "int8":
        data = rng.integers(-128, 128, (num_rows, width)).astype(np.int8)
    else:
        data = rng.integers(0, 256, (num_rows, width // 2)).astype(np.uint8)
    zero = rng.integers(0, 16, groups).astype(np.uint8) if container.minimum_has_factor else None
    return RawTensor(name, dtype, (num_rows, width), data, scale, zero)


def weights_of(raw: RawTensor) -> Tensor:
    """float64"""
    if raw.dtype in ("F32", FP8):
        return torch.from_numpy(dequantize(raw)).double()
    if raw.dtype in HALVES:
        return torch.from_numpy(dequantize_blocks(raw.data, GGMLQuantizationType[raw.dtype])).double()
    return torch.from_numpy(codes_of(raw).weights()).double()


def stored_format(device: torch.device, dtype: torch.dtype = torch.float32) -> CudaStoredFormat:
    return CudaStoredFormat(CudaOps(device, dtype), unpacks=False)


def close(got: Tensor, wanted: Tensor) -> bool:
    return float((got.cpu().double() - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("dtype", HALVES)
def test_blocks_taken_apart_on_the_device_are_the_files_weights(dtype: str, device: torch.device) -> None:
    raw = random_raw(dtype, 5, 768)
    arrays = [None if each is None else each.cpu().numpy() for each in fields(device_codes(raw, device))]
    container = ONE_OF_A_KIND[dtype][0]
    assert torch.equal(torch.from_numpy(Codes(container, *arrays).weights()).double(), weights_of(raw))


def fields(codes: DeviceCodes) -> tuple[Tensor | None, ...]:
    return codes.codes, codes.step, codes.factor, codes.minimum_step, codes.minimum_factor


@pytest.mark.parametrize("dtype", [name for name in (*HALVES, *FOLDER_TYPES) if container_of(name) is not None])
def test_a_matrix_stays_in_its_codes(dtype: str, device: torch.device) -> None:
    raw = random_raw(dtype, 70, 768)
    form = stored_format(device)
    made = form.linear([raw], None)
    assert isinstance(made, CodedLinear)
    assert made.num_bytes == form.stored_bytes(dtype, (70, 768))
    assert made.num_bytes < 1.3 * (raw.data.nbytes + 2 * 70 * 768 // 16)
    x = torch.randn(3, 768, device=device)
    assert close(made(x), x.cpu().double() @ weights_of(raw).T)
    assert close(made.rows(torch.tensor([69, 1], device=device)), weights_of(raw)[[69, 1]])
    first = made.for_drafts(40)
    assert first.num_out == 40
    assert torch.allclose(first(x), made(x)[:, :40], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [2, LIBRARY_TOKENS + 1])
def test_parts_of_different_types_are_a_stack_of_products(num_tokens: int, device: torch.device) -> None:
    parts = [
        random_raw(dtype, rows, 512, seed)
        for seed, (dtype, rows) in enumerate([("Q4_0", 64), ("Q4_0", 40), ("Q8_0", 33), ("F32", 16), ("INT4_32", 48)])
    ]
    whole = torch.cat([weights_of(part) for part in parts])
    bias = torch.randn(len(whole), device=device)
    made = stored_format(device).linear(parts, bias)
    assert isinstance(made, LinearStack)
    assert [type(part) for part in made.parts] == [CodedLinear, CodedLinear, CudaLinear, CodedLinear]
    assert made.parts[0].num_out == 104
    x, add = torch.randn(num_tokens, 512, device=device), torch.randn(num_tokens, len(whole), device=device)
    wanted = x.cpu().double() @ whole.T + bias.cpu().double()
    assert close(made(x), wanted)
    assert close(made(x, add.clone()), wanted + add.cpu().double())
    assert made.num_out == len(whole)


def test_large_steps_unpack_all_matrices_to_the_same_room(device: torch.device) -> None:
    form = stored_format(device)
    wide, narrow = (form.linear([random_raw("Q4_0", num_rows, 256)], None) for num_rows in (64, 32))
    assert isinstance(wide, CodedLinear)
    assert isinstance(narrow, CodedLinear)
    assert wide.scratch is narrow.scratch
    room = wide.scratch.unpacked(64, 256, torch.float32)  # made at load
    x = torch.randn(LIBRARY_TOKENS + 1, 256, device=device)
    for each in (wide, narrow, wide):
        assert close(each(x), x.cpu().double() @ each.matrix.weights(torch.float32).cpu().double().T)
        assert each.scratch.unpacked(32, 256, torch.float32).data_ptr() == room.data_ptr()


def test_types_with_one_layout_are_one_matrix(device: torch.device) -> None:
    parts = [random_raw("Q4_0", 20, 256), random_raw("INT4_32", 30, 256)]
    made = stored_format(device).linear(parts, None)
    assert isinstance(made, CodedLinear)
    x = torch.randn(2, 256, device=device)
    assert close(made(x), x.cpu().double() @ torch.cat([weights_of(part) for part in parts]).T)


def test_fp4_of_any_scales(device: torch.device) -> None:
    """FP8 scales take 8 bits a group, others as much as they must."""
    usual = random_raw("FP4_16", 32, 512)
    unusual = replace(usual, scale=np.random.default_rng(1).uniform(0.001, 0.01, (32, 32)).astype("f4"))
    form, x = stored_format(device), torch.randn(2, 512, device=device)
    for raw, bits in ((usual, 4 + 0.5 + 0.125), (unusual, 4 + 2)):
        made = form.linear([raw], None)
        assert made.num_bytes * 8 / (32 * 512) == bits
        assert close(made(x), x.cpu().double() @ weights_of(raw).T)
    assert form.stored_bytes("FP4_16", (32, 512)) * 8 / (32 * 512) == 4.625


def test_a_chosen_dtype_quantizes_again(device: torch.device) -> None:
    form = quantized_format(CudaOps(device, torch.float32), "int8")
    assert isinstance(form.linear([random_raw("Q8_0", 64, 256)], None), CudaQuantizedLinear)
    assert form.stored_bytes("Q8_0", (64, 256)) == form.stored_bytes("BF16", (64, 256))


def test_large_steps_unpack_only_where_something_is_packed(device: torch.device) -> None:
    form = stored_format(device)
    assert form.stored_bytes("BF16", (64, 256)) == 64 * 256 * 4
    assert form.unpacked_bytes((64, 256)) == 0
    assert form.stored_bytes("Q4_0", (64, 256)) == 64 * 256 * 5 // 8
    assert form.unpacked_bytes((64, 256)) == 64 * 256 * 4


@pytest.mark.parametrize("dtype", ["Q4_0", "int8"])
def test_the_room_for_an_unpacked_matrix_does_not_move_after_load(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Captured steps hold its address. An output matrix that is too large to unpack has parts, for drafts, that are."""
    monkeypatch.setattr("slipstream.runners.cuda.model.linear.VAST", 64)
    form = stored_format(device) if dtype == "Q4_0" else quantized_format(CudaOps(device, torch.float32), dtype)
    form.linear([random_raw("Q4_0", 16, 256)], None)
    output = form.linear([random_raw("Q4_0", 96, 256)], None)
    scratch = form._quantized_scratch
    assert scratch._unpacked is not None
    assert scratch._unpacked.numel() == 16 * 256
    drafts = output.for_drafts(48)
    assert isinstance(drafts, (CodedLinear, CudaQuantizedLinear))
    room = scratch._unpacked
    assert room.numel() == 48 * 256
    x = torch.randn(700, 256, device=device)
    assert close(drafts(x), x.cpu().double() @ drafts.matrix.weights(torch.float32).cpu().double().T)
    assert scratch._unpacked is room
    assert drafts._unpacked().data_ptr() == room.data_ptr()


def test_layers_that_differ_in_a_type_are_warmed_up_each(device: torch.device) -> None:
    stored = stored_format(device)
    rounded = quantized_format(stored.ops, "int8")

    def layer(dtype: str, form: CudaStoredFormat = stored) -> DecoderLayer:
        down = stored.linear([random_raw("Q8_0", 32, 64)], None)
        mlp = DenseMlp(form.linear([random_raw(dtype, 64, 256)], None), down, stored.ops)
        return DecoderLayer(NO_PART, NO_PART, NO_PART, mlp)

    layers = [layer("Q4_0"), layer("Q8_0"), layer("F32"), layer("Q4_0"), layer("F32", rounded)]
    chosen = one_of_each(Sequential(layers))
    assert isinstance(chosen, Sequential)
    assert [stored_as(each) for each in chosen.layers] == [stored_as(layers[i]) for i in (0, 1, 2, 4, 0)]
    assert len(set(map(stored_as, layers))) == 4


# ---- Experts ----


def expert_parts(types: list[str], count: int, num_rows: int, width: int) -> list[list[RawTensor]]:
    return [[random_raw(dtype, num_rows, width, 10 * e + at) for at, dtype in enumerate(types)] for e in range(count)]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("types", "down_type"), [(["Q4_0", "Q4_0"], "Q8_0"), (["Q8_0", "FP4_16"], "INT4_32")])
@pytest.mark.parametrize(("num_tokens", "count", "num_active"), [(1, 4, 2), (5, 4, 3), (40, 3, 2), (90, 1, 1)])
def test_experts(
    num_tokens: int,
    count: int,
    num_active: int,
    types: list[str],
    down_type: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    hidden, inner = 288, 96
    gate_up, down = expert_parts(types, count, inner, hidden), expert_parts([down_type], count, hidden, inner)
    made = stored_format(device, dtype).experts(gate_up, down)
    assert isinstance(made, CodedExperts)
    assert len(made.gate_up.matrices) == len(set(types))
    stacks = [torch.stack([torch.cat([weights_of(p) for p in parts]) for parts in each]) for each in (gate_up, down)]
    x = torch.randn(num_tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    expert = torch.rand(num_tokens, count).argsort(-1)[:, :num_active].int().contiguous().to(device)
    positions = some_padding(device, num_tokens)
    got = made.pairs(x, expert, positions)
    wanted = reference_pairs(x.cpu(), *(stack.float() for stack in stacks), expert.cpu())
    real = positions.cpu() >= 0
    off = (got.cpu()[real].float() - wanted[real]).norm() / wanted[real].norm()
    assert off < (1e-5 if dtype == torch.float32 else 1.5e-2)


@pytest.mark.parametrize(
    ("which", "first", "other"),
    [
        *((0, *types) for types in (("Q4_0", "F32"), ("F32", "F8_E4M3"), ("F8_E4M3", "Q4_0"))),
        *((1, *types) for types in (("Q4_0", "Q8_0"), ("Q4_0", "F8_E4M3"), ("F8_E4M3", "F32"), ("F32", "Q4_0"))),
    ],
)
def test_experts_of_different_types_are_refused(which: int, first: str, other: str, device: torch.device) -> None:
    """Of a kind: what stays as it is stored does not become floats for the others' sake, since the plan counts it."""
    gate_up, down = expert_parts([first, first], 2, 32, 128), expert_parts(["Q8_0"], 2, 128, 32)
    gate_up[which][1] = random_raw(other, 32, 128, name="the odd one")
    says = rf"the odd one is stored as {other}, but a matrix as {first}, .*: take --dtype bfloat16 or int8, or a model"
    with pytest.raises(UnknownModel, match=says):
        stored_format(device).experts(gate_up, down)
