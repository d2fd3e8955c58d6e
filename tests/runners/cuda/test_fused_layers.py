"""Layers whose norms and activations are done by the products around them, against the same layers one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from test_linear_int8 import codes
from torch import Tensor

from slipstream.runners.cuda.kernels.matmul.linear import FEW_TOKENS, MAX_TOKENS, Scratch
from slipstream.runners.cuda.kernels.quant.int8 import Int8Matrix
from slipstream.runners.cuda.kernels.quant.quantize import QuantizedMatrix
from slipstream.runners.cuda.model.fused_layers import FusedLayers, InterleavedMlp, stack
from slipstream.runners.cuda.model.linear import CudaFormat, CudaLinear, make_linear
from slipstream.runners.cuda.model.ops import CudaOps
from slipstream.runners.cuda.model.quantized import CudaQuantizedLinear, quantized_format
from slipstream.runners.torch.models.layers import DecoderLayer, DenseMlp, Sequential
from slipstream.runners.torch.ops import DenseLinear, Linear, RmsNorm, TorchOps

HIDDEN, MIXED, INNER = 640, 512, 1152
BATCH: Any = None  # these mixers do not ask for it


@dataclass(frozen=True, slots=True)
class Halves:
    entry: Linear
    out: Linear

    def mix(self, projected: Tensor, batch: Any) -> Tensor:
        low, high = projected.chunk(2, dim=1)
        return (torch.tanh(low) * high).contiguous()


def matrix(num_out: int, num_in: int) -> Tensor:
    return torch.randn(num_out, num_in) / num_in**0.5


def matrices() -> list[Tensor]:
    sizes = ((2 * MIXED, HIDDEN), (HIDDEN, MIXED), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    return [matrix(*size) for size in sizes]


def layers_of(weights: list[list[Tensor]], norms: Tensor, ops: Any, make: Any) -> list[DecoderLayer]:
    made = []
    for each, (before, after) in zip(weights, norms, strict=True):
        entry, out, gate_up, down = (make(weight) for weight in each)
        input_norm, post_norm = (RmsNorm(weight, 1e-3, ops) for weight in (before, after))
        made.append(DecoderLayer(input_norm, Halves(entry, out), post_norm, DenseMlp(gate_up, down, ops)))
    return made


def careful_product(x: Tensor, weight: Tensor, bias: None, add: Tensor | None) -> Tensor:
    """As the library's: its own, in bfloat16 on a CPU, not every machine survives."""
    y = x.float() @ weight.float().T
    return (y if add is None else y + add).to(x.dtype)


@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [
        *((5, "bfloat16"), (70, "bfloat16"), (5, "int8")),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((1, "bfloat16"), (17, "bfloat16"), (17, "fp8"))
        ),
    ],
)
def test_equals_layer_by_layer(
    num_tokens: int, dtype: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr("slipstream.runners.cuda.model.linear.library_product", careful_product)
    weights = [[weight.to(device, torch.bfloat16) for weight in matrices()] for _ in range(2)]
    norms = (1 + 0.3 * torch.randn(2, 2, HIDDEN)).to(device)
    ops, exact_ops = CudaOps(device, torch.bfloat16), TorchOps(device, torch.float64)
    form = CudaFormat(ops) if dtype == "bfloat16" else quantized_format(ops, dtype)
    exact = Sequential(layers_of(weights, norms, exact_ops, lambda weight: DenseLinear(weights_of(form.dense(weight)))))
    # A stack keeps what it is given.
    fused = stack(layers_of(weights, norms, ops, lambda weight: form.dense(weight.clone())))
    assert isinstance(fused, FusedLayers)
    # Narrow matrices in bfloat16: the library takes more.
    assert fused.max_tokens == (FEW_TOKENS if dtype == "bfloat16" else MAX_TOKENS)
    x = torch.randn(num_tokens, HIDDEN).to(device, torch.bfloat16)
    wanted = exact(x.double(), BATCH)
    got = fused(x.clone(), BATCH)
    one_by_one = Sequential.__call__(fused, x.clone(), BATCH)
    assert error(got, wanted) < 0.02
    assert error(got, wanted) < 1.5 * error(one_by_one, wanted)


def weights_of(linear: Linear) -> Tensor:
    if isinstance(linear, CudaQuantizedLinear):
        return stands_for(linear.matrix, linear.dtype)
    assert isinstance(linear, CudaLinear)
    return linear.weight.double()


def stands_for(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """The weights that products in that type compute with: but for int8, rounded to it. [rows, columns]"""
    if isinstance(matrix, Int8Matrix):  # not by our kernel, which takes a program for each row
        return (codes(matrix).to(matrix.scale.device) * matrix.scale[:, None]).double()
    return matrix.weights(dtype).double()


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def test_wide_matrices_are_joined_for_more_tokens() -> None:
    """On no device: what counts is their shape."""
    ops, scratch = TorchOps(torch.device("cpu"), torch.bfloat16), Scratch(torch.device("cpu"))
    sizes = ((14336, 5120), (5120, 6144), (34816, 5120), (5120, 17408))
    entry, out, gate_up, down = (
        make_linear(torch.empty(1, 1, dtype=torch.bfloat16).expand(size), None, scratch) for size in sizes
    )
    norm = RmsNorm(torch.ones(5120), 1e-6, ops)
    layer = DecoderLayer(norm, Halves(entry, out), norm, DenseMlp(gate_up, down, ops))
    assert all(each.some is not None for each in (entry, out, gate_up, down))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "slipstream.runners.cuda.model.fused_layers._interleaved_mlp", lambda _: InterleavedMlp(gate_up, down)
        )
        fused = stack([layer])
    assert isinstance(fused, FusedLayers)
    assert fused.max_tokens == MAX_TOKENS


def test_what_cannot_be_joined_stays_as_it_is() -> None:
    scratch, device = Scratch(torch.device("cpu")), torch.device("cpu")
    norms = torch.ones(1, 2, HIDDEN)

    def layer(dtype: torch.dtype) -> DecoderLayer:
        ops = CudaOps(device, dtype)
        [made] = layers_of([matrices()], norms, ops, lambda weight: make_linear(weight.to(dtype), None, scratch))
        return made

    good, bf16 = layer(torch.bfloat16), CudaOps(device, torch.bfloat16)
    [in_4_bits] = layers_of([matrices()], norms, bf16, quantized_format(bf16, "int4").dense)
    before = good.mlp.gate_up.weight.clone()  # type: ignore[attr-defined]
    others = (
        layer(torch.float16),  # a sum times a norm's weight may be too large for it
        layer(torch.float32),
        in_4_bits,
        replace(good, mlp=lambda x, norm, batch: x),
        replace(good, mixer=Halves(DenseLinear(torch.zeros(4, 4)), good.mixer.out)),
    )
    for other in others:
        assert type(stack([good, other])) is Sequential
    assert torch.equal(good.mlp.gate_up.weight, before)  # type: ignore[attr-defined]
