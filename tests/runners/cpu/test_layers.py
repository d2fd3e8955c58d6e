"""A stack of layers in one call gives the bits of the single operations, in any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from harness import open_runner, target_logits

from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.layers import Layer, LayerStack, StackShape
from slipstream.runners.cpu.ops import CpuOps
from slipstream.runners.torch.models.layers import Sequential
from slipstream.runners.torch.ops import HeadShape, Rotary

HIDDEN, HEADS, KV_HEADS, DIM, INNER, BLOCK_SIZE, SLOTS, BLOCKS = 96, 6, 2, 32, 160, 8, 3, 10
EPS, SCALE = 1e-5, DIM**-0.5


def make_layer(kernels: Kernels, qkv_bias: bool, qk_norm: bool) -> Layer:
    def weight(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols) / cols**0.5

    width = (HEADS + 2 * KV_HEADS) * DIM
    caches = torch.zeros(2, SLOTS * BLOCKS, KV_HEADS, BLOCK_SIZE, DIM)
    return Layer(
        mixer_norm=torch.rand(HIDDEN) + 0.5,
        mlp_norm=torch.rand(HIDDEN) + 0.5,
        entry=kernels.pack_float(weight(width, HIDDEN)),
        out=kernels.quantize_w8(weight(HIDDEN, HEADS * DIM)),
        gate_up=kernels.pack_float(weight(2 * INNER, HIDDEN).bfloat16()),
        down=kernels.quantize_w8(weight(HIDDEN, INNER)),
        k_cache=caches[0],
        v_cache=caches[1],
        entry_bias=torch.randn(width) if qkv_bias else None,
        q_norm=torch.rand(DIM) if qk_norm else None,
        k_norm=torch.rand(DIM) if qk_norm else None,
    )


def run_by_hand(
    kernels: Kernels, layer: Layer, x: torch.Tensor, index: tuple[torch.Tensor, ...], tables: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    t = x.shape[0]
    normed = kernels.rms_norm(x, layer.mixer_norm, EPS, torch.empty_like(x))
    qkv = kernels.linear(normed, layer.entry, torch.empty(t, layer.entry.rows), bias=layer.entry_bias)
    caches = layer.k_cache, layer.v_cache
    q = torch.empty(t, HEADS * DIM)
    kernels.rope_store(qkv, q, *caches, index[0], *index, *tables, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=EPS)
    attended = kernels.attend(q, *caches, *index, SCALE, torch.empty_like(q))
    x = kernels.linear(attended, layer.out, torch.empty_like(x), add=x)
    normed = kernels.rms_norm(x, layer.mlp_norm, EPS, torch.empty_like(x))
    gate_up = kernels.linear(normed, layer.gate_up, torch.empty(t, 2 * INNER))
    activated = kernels.silu_mul(gate_up, torch.empty(t, INNER))
    return kernels.linear(activated, layer.down, torch.empty_like(x), add=x)


@pytest.mark.parametrize(("qkv_bias", "qk_norm"), [(False, False), (True, False), (False, True)])
def test_stack_equals_single_operations(kernels: Kernels, qkv_bias: bool, qk_norm: bool) -> None:
    layers = [make_layer(kernels, qkv_bias, qk_norm) for _ in range(3)]
    tables = torch.rand(2, BLOCKS * BLOCK_SIZE, DIM // 2).unbind()
    stack = LayerStack(kernels, layers, StackShape(HeadShape(HEADS, KV_HEADS, DIM), Rotary(*tables), EPS))
    block_table = torch.randperm(SLOTS * BLOCKS, dtype=torch.int32).reshape(SLOTS, BLOCKS)
    slots = torch.arange(SLOTS, dtype=torch.int32).repeat_interleave(20)
    positions = torch.arange(20, dtype=torch.int32).repeat(SLOTS)
    x = torch.randn(SLOTS * 20, HIDDEN)
    by_hand = x.clone()
    for layer in layers:
        by_hand = run_by_hand(kernels, layer, by_hand, (positions, slots, block_table), tables)
    whole = stack.run(x.clone(), positions, positions, slots, block_table)
    assert torch.isfinite(whole).all()
    assert torch.equal(whole, by_hand)
    for threads in (1, 3, 2):
        kernels.set_threads(threads)
        for at in range(20):  # the same tokens one position at a time
            rows = positions == at
            step = stack.run(x[rows].clone(), positions[rows], positions[rows], slots[rows], block_table)
            assert torch.equal(step, whole[rows])


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3_5", "qwen3_5_moe"])
def test_a_model_has_the_same_bits_layer_by_layer(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save(tiny.build(kind), tmp_path)
    tokens, feeds = [7 * i % tiny.VOCAB for i in range(100)], [70, 1, 29]
    whole = open_runner(folder, kernels=True)
    monkeypatch.setattr(CpuOps, "stack", lambda self, layers: Sequential(layers))
    apart = open_runner(folder, kernels=True)
    assert isinstance(apart.model.decoder.layers, Sequential)
    assert not isinstance(whole.model.decoder.layers, Sequential)
    assert torch.equal(target_logits(whole, tokens, feeds), target_logits(apart, tokens, feeds))
    assert torch.equal(target_logits(whole, tokens, feeds), target_logits(whole, tokens, [33] * 3 + [1]))
