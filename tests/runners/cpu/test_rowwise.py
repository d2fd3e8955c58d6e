"""Norms, activation, rotary positions and the cache write."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.runners.cpu.bindings import Kernels

EXAMPLES = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + eps) * weight.double()).float()


@EXAMPLES
@given(m=st.integers(1, 70), cols=st.integers(1, 700))
def test_rms_norm(any_kernels: Kernels, m: int, cols: int) -> None:
    x, weight = torch.randn(m, cols) * 3, torch.randn(cols)
    got = any_kernels.rms_norm(x, weight, 1e-5, torch.empty_like(x))
    assert torch.allclose(got, rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-7)
    assert torch.equal(any_kernels.rms_norm(x[-1:], weight, 1e-5, torch.empty(1, cols)), got[-1:])
    assert torch.equal(any_kernels.rms_norm(x, weight, 1e-5, x), got)


@EXAMPLES
@given(m=st.integers(1, 70), cols=st.integers(1, 700))
def test_silu_mul(any_kernels: Kernels, m: int, cols: int) -> None:
    x = torch.randn(m, 2 * cols) * 20
    got = any_kernels.silu_mul(x, torch.empty(m, cols))
    gate, up = x.double().split(cols, 1)
    assert torch.allclose(got.double(), torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-30)
    assert torch.equal(any_kernels.silu_mul(x[-1:], torch.empty(1, cols)), got[-1:])


def test_silu_mul_far_out(any_kernels: Kernels) -> None:
    gate = torch.tensor([-3e38, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 3e38])
    got = any_kernels.silu_mul(torch.cat([gate, torch.ones(8)])[None], torch.empty(1, 8))[0]
    assert torch.allclose(got[1:7], torch.nn.functional.silu(gate[1:7]), rtol=1e-6, atol=1e-30)
    assert torch.isfinite(got).all()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [T, H, D]; cos, sin: [T, rot / 2]."""
    half = cos.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


@EXAMPLES
@given(
    num_tokens=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([16, 48, 64, 128, 256]),
    part=st.sampled_from([1.0, 0.5, 0.25]),
    block_size=st.sampled_from([1, 7, 16]),
    norm=st.booleans(),
)
def test_rope_store(
    any_kernels: Kernels,
    num_tokens: int,
    kv_heads: int,
    group: int,
    dim: int,
    part: float,
    block_size: int,
    norm: bool,
) -> None:
    heads, rot, max_pos = kv_heads * group, int(dim * part), 50
    table = torch.randperm(3 * max_pos, dtype=torch.int32).reshape(3, max_pos)
    pairs = torch.randperm(3 * max_pos)[:num_tokens]  # (slot, position), each once
    slot, positions = (pairs // max_pos).int(), (pairs % max_pos).int()
    angles = torch.randint(max_pos, (num_tokens,), dtype=torch.int32)  # rotary positions of their own
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim)
    cos, sin = torch.randn(2, max_pos, rot // 2)
    weights = torch.randn(2, dim)
    cache = torch.zeros(2, 3 * max_pos, kv_heads, block_size, dim)
    norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6} if norm else {}
    q = any_kernels.rope_store(
        qkv, torch.empty(num_tokens, heads * dim), cache[0], cache[1], positions, angles, slot, table, cos, sin, **norms
    )
    want_q, want_k, want_v = qkv.reshape(num_tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if norm:
        want_q, want_k = rms_norm(want_q, weights[0], 1e-6), rms_norm(want_k, weights[1], 1e-6)
    rotation = cos[angles.long()], sin[angles.long()]
    assert torch.allclose(q.reshape(num_tokens, heads, dim), rotate(want_q, *rotation), rtol=1e-5, atol=1e-5)
    block = table[slot.long(), (positions // block_size).long()].long()
    at = (positions % block_size).long()
    assert torch.allclose(cache[0][block, :, at], rotate(want_k, *rotation), rtol=1e-5, atol=1e-5)
    assert torch.equal(cache[1][block, :, at], want_v)
    assert cache[1].count_nonzero() == want_v.count_nonzero()
