"""Norm, rotary and the cache write in one kernel against the PyTorch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged import Case, Row, coded, make_case
from torch import Tensor

from slipstream.runners.cuda.kernels.attention.rope import rope_store
from slipstream.runners.torch.ops import HeadShape, LayerKv, Rotary, TorchOps

ROWS = [Row(0, 3, room=4), Row(13, 1), Row(0, 0, room=1), Row(6, 2)]
SHAPES = {
    "smollm": (HeadShape(6, 2, 64), 32, 16),
    "partial rotary": (HeadShape(3, 1, 256), 32, 4),
    "odd": (HeadShape(2, 2, 80), 40, 4),
    "odd partial": (HeadShape(4, 2, 96), 12, 16),
}


def tables(half: int, device: torch.device) -> Rotary:
    angles = torch.rand(40, half, device=device) * 6.28
    return Rotary(angles.cos(), angles.sin())


def make(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Case, Rotary, Tensor]:
    heads, half, block_size = SHAPES[name]
    case = make_case(ROWS, heads, block_size, device, dtype)
    wide = torch.randn(case.padded.num_tokens, heads.qkv_width + 19, device=device, dtype=dtype)
    return case, tables(half, device), wide[:, 11:]


def float_copy(kv: LayerKv) -> LayerKv:
    return LayerKv(kv.k.float(), kv.v.float())


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_against_the_reference(device: torch.device, dtype: torch.dtype, normed: bool, name: str) -> None:
    case, rotary, mixed = make(name, device, dtype)
    weights = torch.randn(2, case.heads.dim, device=device)
    norms = (weights[0], weights[1], 1e-5) if normed else None
    want_kv = float_copy(case.kv)
    qkv = mixed[case.real, : case.heads.qkv_width].float()
    ops = TorchOps(device, torch.float32)
    want = ops.rope_store(qkv, case.heads, rotary, want_kv, case.ragged, norms)
    got = rope_store(mixed, case.heads, rotary, case.kv, case.padded, norms)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    assert got.dtype == dtype
    assert got.isfinite().all()
    torch.testing.assert_close(got[case.real].float(), want, **close)
    # NaN where nothing is written: equal caches also show that nothing else was touched.
    torch.testing.assert_close(case.kv.k.float(), want_kv.k, **close)
    torch.testing.assert_close(case.kv.v.float(), want_kv.v, **close)


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_codes_against_the_reference(device: torch.device, dtype: torch.dtype, normed: bool, name: str) -> None:
    """Of the floats that the kernel itself would have stored, had it not coded them."""
    case, rotary, mixed = make(name, device, dtype)
    mixed = mixed * torch.exp2(torch.randint(-9, 10, (mixed.shape[0], 1), device=device))
    weights = torch.randn(2, case.heads.dim, device=device)
    norms = (weights[0], weights[1], 1e-5) if normed else None
    before, codes = coded(case.kv), coded(case.kv)
    exact = LayerKv(case.kv.k.float(), case.kv.v.float())
    q = rope_store(mixed, case.heads, rotary, exact, case.padded, norms)
    assert torch.equal(rope_store(mixed, case.heads, rotary, codes, case.padded, norms), q)
    want, at = coded(exact), (case.ragged.positions // codes.k.shape[2], case.ragged.positions % codes.k.shape[2])
    written = torch.zeros(codes.k.shape[:3], dtype=torch.bool, device=device)
    written[case.ragged.block_table[case.ragged.token_slots.long(), at[0].long()].long(), :, at[1].long()] = True
    for part in ("k", "v", "k_scale", "v_scale"):
        found, wanted, old = (getattr(kv, part).view(torch.uint8) for kv in (codes, want, before))
        here = written.unsqueeze(-1) if part in ("k", "v") else written.repeat_interleave(2, dim=-1)
        assert torch.equal(found, torch.where(here, wanted, old)), part


def test_rotary_positions_apart_from_the_cache(device: torch.device) -> None:
    case, rotary, mixed = make("odd partial", device, torch.float32)
    angles = torch.randint(40, case.padded.positions.shape, dtype=torch.int32, device=device)
    padded, ragged = replace(case.padded, rope_positions=angles), replace(case.ragged, rope_positions=angles[case.real])
    want_kv, qkv = float_copy(case.kv), mixed[case.real, : case.heads.qkv_width]
    want = TorchOps(device, torch.float32).rope_store(qkv, case.heads, rotary, want_kv, ragged, None)
    got = rope_store(mixed, case.heads, rotary, case.kv, padded, None)
    torch.testing.assert_close(got[case.real], want)
    torch.testing.assert_close(case.kv.k, want_kv.k, equal_nan=True)
    torch.testing.assert_close(case.kv.v, want_kv.v, equal_nan=True)


def test_many_tokens_share_a_program(device: torch.device) -> None:
    heads = HeadShape(1, 1, 64)
    case = make_case([Row(0, 270)], heads, 16, device, torch.float32)
    angles = torch.rand(270, 32, device=device)
    rotary = Rotary(angles.cos(), angles.sin())
    mixed = torch.randn(273, heads.qkv_width, device=device)
    want_kv = float_copy(case.kv)
    want = TorchOps(device, torch.float32).rope_store(mixed[:270], heads, rotary, want_kv, case.ragged, None)
    got = rope_store(mixed, heads, rotary, case.kv, case.padded, None)
    torch.testing.assert_close(got[:270], want)
    torch.testing.assert_close(case.kv.k, want_kv.k, equal_nan=True)
    torch.testing.assert_close(case.kv.v, want_kv.v, equal_nan=True)
