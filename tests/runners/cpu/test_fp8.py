"""FP8 matrices on a CPU: in 8-bit blocks, or in BF16 where it is asked for or blocks do not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.config import RunnerConfig
from slipstream.load.random.model import open_random
from slipstream.load.tensor import RawTensor
from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.formats import SLAB, PackedFormat, PackedLinear
from slipstream.runners.cpu.packed import BF16, W8, Layout
from slipstream.runners.torch.backend import TorchBackend
from slipstream.runners.torch.weights import as_tensor


def random_fp8(rows: int, columns: int) -> RawTensor:
    chance = np.random.default_rng(rows)
    codes = torch.from_numpy(chance.normal(0, 100, (rows, columns))).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = chance.uniform(1e-4, 1e-3, (rows, -(-columns // 128))).astype(np.float32)
    return RawTensor("some", "F8_E4M3", (rows, columns), codes.view(torch.uint8).numpy(), scale)


def pack(kernels: Kernels, dtype: str, raw: RawTensor) -> PackedLinear:
    made = PackedFormat(kernels, dtype).linear([raw], None)
    assert isinstance(made, PackedLinear)
    assert made.num_bytes == PackedFormat(kernels, dtype).stored_bytes(raw.dtype, raw.shape)
    return made


@pytest.mark.parametrize(
    ("dtype", "columns", "form", "off"),
    [("auto", 1024, W8, 0.01), ("int8", 1024, W8, 0.01), ("bfloat16", 1024, BF16, 0.002), ("auto", 1000, BF16, 0.002)],
)
def test_close_to_what_is_stored(kernels: Kernels, dtype: str, columns: int, form: Layout, off: float) -> None:
    raw = random_fp8(SLAB // columns + 70, columns)  # more than one slab
    made, wanted = pack(kernels, dtype, raw), as_tensor(raw)
    assert made.weight.layout == form
    found = made.rows(torch.arange(raw.shape[0]))
    assert (found - wanted).norm() < off * wanted.norm()
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    assert (made(x) - x @ wanted.T).norm() < off * (x @ wanted.T).norm()


def test_float32_keeps_every_bit(kernels: Kernels) -> None:
    raw = random_fp8(SLAB // 300 + 70, 300)
    assert torch.equal(pack(kernels, "float32", raw).rows(torch.arange(raw.shape[0])), as_tensor(raw))


@pytest.mark.usefixtures("kernels")
def test_a_user_sees_it() -> None:
    spec = open_random("tiny").spec
    for fp8, stored in ((True, "FP8 matrices in 8-bit blocks"), (False, "matrices as stored")):
        assert TorchBackend(RunnerConfig("cpu")).platform(replace(spec, fp8=fp8)).note.startswith(f"cpu, {stored}, ")
    assert (
        "matrices in bfloat16" in TorchBackend(RunnerConfig("cpu", "bfloat16")).platform(replace(spec, fp8=True)).note
    )
