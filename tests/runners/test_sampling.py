"""What "the next token" means: processors against plain arithmetic, noise, and the sampled distribution."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from harness import Ask, Traffic, open_runner, target_logits
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from slipstream.config import EngineConfig
from slipstream.runners.torch.sampling.noise import gumbel_noise, noise_keys, signed64
from slipstream.runners.torch.sampling.processors import History, processors_for, truncation_for
from slipstream.sampling import SamplingParams

CPU = torch.device("cpu")


def plain_distribution(logits: list[float], params: SamplingParams, history: list[int], num_prompt: int) -> np.ndarray:
    """The definition in sampling/params.py, written again with loops."""
    scores = list(logits)
    for token in set(history):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(history[num_prompt:]).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    scaled = np.array(scores) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    keep = order[: params.top_k] if params.top_k else order
    chance = np.zeros(len(scores))
    chance[keep] = np.exp(scaled[keep] - scaled.max())
    chance /= chance.sum()
    kept, total = [], 0.0
    for token in keep:
        past_top_p = params.top_p < 1.0 and total >= params.top_p
        if kept and (past_top_p or chance[token] < params.min_p * chance.max()):
            break
        kept.append(token)
        total += chance[token]
    result = np.zeros(len(scores))
    result[kept] = chance[kept] / chance[kept].sum()
    return result


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=12, max_size=12, unique=True),
    history=st.lists(st.integers(0, 11), min_size=1, max_size=30),
    num_prompt=st.integers(0, 30),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 4, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.35]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
    repetition=st.sampled_from([1.0, 1.4, 0.8]),
    presence=st.sampled_from([0.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.4, -0.3]),
    bias=st.sampled_from([{}, {3: 2.5, 7: -1000.0}]),
)
def test_processors_follow_the_definition(
    logits: list[float],
    history: list[int],
    num_prompt: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    values = torch.tensor(logits, dtype=torch.float64)
    num_prompt = min(num_prompt, len(history))
    for processor in (*processors_for(params, CPU), *truncation_for(params)):
        processor(values, History(torch.tensor(history), num_prompt))
    got = (values / temperature).softmax(-1).numpy()
    wanted = plain_distribution(logits, params, history, num_prompt)
    assert ((got > 0) == (wanted > 0)).all()
    np.testing.assert_allclose(got, wanted, atol=1e-9)


def test_noise_is_standard_gumbel_and_depends_on_seed_and_position_alone() -> None:
    seeds, positions = torch.tensor([3, 3, 4, 3]), torch.tensor([10, 11, 10, 10])
    noise = gumbel_noise(seeds, positions, 50_000)
    assert torch.equal(noise[0], noise[3])
    assert torch.equal(noise[0, :97], gumbel_noise(seeds[:1], positions[:1], 97)[0])
    for i in range(3):
        assert stats.kstest(noise[i].numpy(), "gumbel_r").pvalue > 1e-3
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.02
    assert abs(np.corrcoef(noise[0], noise[2])[0, 1]) < 0.02


@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 1 << 20))
def test_noise_keys_are_splitmix64(seed: int, position: int) -> None:
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15
    z = (((seed & mask) ^ (position * golden & mask)) + golden) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    assert noise_keys(torch.tensor([signed64(seed)]), torch.tensor([position])).item() == signed64(z ^ z >> 31)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_sampled_output_under_speculation_has_the_exact_distribution(tmp_path: Path, kernels: bool) -> None:
    """Pairs of tokens over many seeds against the model's own probabilities, at depth 2 with the model's head."""
    folder = tiny.save(tiny.build("llama-gqa-tied"), tmp_path, head=True)
    runner = open_runner(folder, head=True, streams=32, kernels=kernels)
    prompt, num_streams = (11, 4, 70), 3000 if kernels else 1000
    params = SamplingParams(temperature=1.2, top_k=4, max_tokens=4, draft=2)
    asks = [Ask(prompt, replace(params, seed=seed)) for seed in range(num_streams)]
    traffic = Traffic(runner, EngineConfig(max_streams=32))
    outputs = traffic.run(asks)
    assert traffic.snapshot.num_accepted_tokens > num_streams / 20, (
        "nothing was accepted: this would test plain decoding"
    )
    expected = {}
    for first, chance in top_four(target_logits(runner, list(prompt), [3])[-1]):
        for second, then in top_four(target_logits(runner, [*prompt, first], [4])[-1]):
            for third, last in top_four(target_logits(runner, [*prompt, first, second], [5])[-1]):
                expected[first, second, third] = chance * then * last * num_streams
    counts = Counter(tuple(tokens[:3]) for tokens in outputs)
    assert set(counts) <= set(expected)
    cells = [(counts[key], want) for key, want in expected.items() if want >= 5]
    rest = num_streams - sum(want for _, want in cells)
    if rest > 1:
        cells.append((num_streams - sum(got for got, _ in cells), rest))
    assert math.isclose(sum(want for _, want in cells), num_streams)
    assert stats.chisquare(*zip(*cells)).pvalue > 1e-3


def top_four(logits: torch.Tensor) -> list[tuple[int, float]]:
    values, tokens = (logits.double() / 1.2).topk(4)
    return list(zip(tokens.tolist(), values.softmax(-1).tolist()))
