"""Noise and processors on MLX: the numbers that the PyTorch runner computes."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runners.mlx.sampling import noise, processors
from slipstream.runners.noise import noise_key
from slipstream.runners.torch.sampling import noise as torch_noise
from slipstream.runners.torch.sampling import processors as torch_processors
from slipstream.sampling import SamplingParams

VOCAB = 61


@given(st.lists(st.tuples(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(0, 1 << 20)), min_size=1, max_size=8))
def test_noise_is_the_same_on_every_runner(pairs: list[tuple[int, int]]) -> None:
    keys = [noise_key(seed, position) for seed, position in pairs]
    got = np.array(noise.gumbel_noise(noise.key_halves(keys), VOCAB))
    seeds, positions = torch.tensor([torch_noise.signed64(s) for s, _ in pairs]), torch.tensor([p for _, p in pairs])
    np.testing.assert_allclose(got, torch_noise.gumbel_noise(seeds, positions, VOCAB).numpy(), rtol=1e-4, atol=1e-5)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    history=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    num_prompt=st.integers(1, 20),
    options=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.5]),
            "top_k": st.sampled_from([0, 1, 5, 100]),
            "top_p": st.sampled_from([1.0, 0.8, 0.1]),
            "min_p": st.sampled_from([0.0, 0.05, 0.5]),
            "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
            "presence_penalty": st.sampled_from([0.0, 0.5]),
            "frequency_penalty": st.sampled_from([0.0, 0.4]),
            "logit_bias": st.sampled_from([{}, {3: 4.0, 5: -100.0}]),
        }
    ),
)
def test_processors_change_logits_as_pytorchs_do(
    seed: int, history: list[int], num_prompt: int, options: dict[str, object]
) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
    wanted = torch.tensor(logits)
    for each in (*torch_processors.processors_for(params, wanted.device), *torch_processors.truncation_for(params)):
        each(wanted, torch_processors.History(torch.tensor(history), num_prompt))
    got = mx.array(logits)
    for own in (*processors.processors_for(params), *processors.truncation_for(params)):
        got = own(got, processors.History(mx.array(history, dtype=mx.int32), num_prompt))
    np.testing.assert_allclose(np.array(got), wanted.numpy(), rtol=1e-5, atol=1e-5)
