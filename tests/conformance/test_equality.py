"""Every stream's tokens equal its own plain one-at-a-time decoding, whatever runs beside it.

Random prompts, arrival steps, lengths, depths, aborts, block sizes, memory pressure, late results; greedy and seeded;
heads that are always right, always wrong, guessing, and the model's own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import tiny
from drafters import ScriptedDrafter
from harness import Ask, LateRunner, Traffic, alone, open_runner
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.runners.torch.runner import TorchRunner
from slipstream.sampling import SamplingParams

KINDS = ["llama-gqa-tied", "qwen2", "qwen3_5", "qwen3_5_moe"]
# Plain PyTorch sums in an order that depends on the number of rows, so it is compared in float64, where no near-tie
# can flip; our kernels promise the same bits for any batch, so they are compared in float32.
BACKENDS = {"torch": ("float64", False), "kernels": ("float32", True)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tiny.save(tiny.build(kind), tmp_path_factory.mktemp(kind), head=True) for kind in KINDS}


@lru_cache
def _runner(folder: Path, backend: str, block_size: int, kv_memory: int) -> TorchRunner:
    dtype, kernels = BACKENDS[backend]
    return open_runner(
        folder, head=True, streams=4, block_size=block_size, dtype=dtype, kernels=kernels, kv_memory=kv_memory
    )


sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        "top_k": st.sampled_from([0, 0, 5]),
        "top_p": st.sampled_from([1.0, 1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4]),
        "logit_bias": st.sampled_from([{}, {}, {3: 4.0, 5: -100.0}]),
        "stop_token_ids": st.sampled_from([(), (), (7, 11, 23)]),
        "max_tokens": st.integers(1, 24),
        "draft": st.integers(0, 4),
        "p_min": st.sampled_from([0.0, 0.0, 0.1]),
    }
)
asks = st.builds(
    lambda prompt, options, arrival, abort_at: Ask(tuple(prompt), SamplingParams(**options), arrival, abort_at),
    st.lists(st.integers(0, tiny.VOCAB - 1), min_size=1, max_size=40),
    sampling,
    st.integers(0, 12),
    st.one_of(st.none(), st.none(), st.none(), st.integers(0, 30)),
)


def _check(
    runner: TorchRunner, late: bool, mode: str, traffic: list[Ask], budget: int, floors: tuple[float, ...]
) -> None:
    traffic = [replace(ask, params=replace(ask.params, seed=i)) for i, ask in enumerate(traffic)]
    expected = [alone(runner, ask) for ask in traffic]
    head = runner.drafter
    if mode != "head":
        truth = {i: [*ask.prompt, *tokens] for i, (ask, tokens) in enumerate(zip(traffic, expected, strict=True))}
        runner.drafter = ScriptedDrafter(truth, tiny.VOCAB, mode)
    try:
        config = EngineConfig(max_streams=4, max_step_tokens=budget, min_chunk=4, block_size=runner.info.block_size)
        run = Traffic(LateRunner(runner) if late else runner, config, floors)
        outputs = run.run(traffic)
    finally:
        runner.drafter = head
    for i, (ask, got, want) in enumerate(zip(traffic, outputs, expected, strict=True)):
        if run.finished[str(i)].finish_reason == "abort":
            assert ask.abort_at is not None
            assert got == want[: len(got)]
        else:
            assert got == want
    if mode == "wrong":
        assert run.snapshot.num_accepted_tokens == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    traffic=st.lists(asks, min_size=1, max_size=6),
    mode=st.sampled_from(["right", "wrong", "random", "head"]),
    late=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    tight=st.booleans(),
    budget=st.sampled_from([9, 32, 512]),
    floors=st.sampled_from([(0.0,), (1e-6,), (0.0, 0.001, 0.02), (0.05, 1.0, 0.0)]),
)
def test_streams_equal_plain_decoding(
    folders: dict[str, Path],
    kind: str,
    backend: str,
    traffic: list[Ask],
    mode: str,
    late: bool,
    block_size: int,
    tight: bool,
    budget: int,
    floors: tuple[float, ...],
) -> None:
    # Tight: about 80 tokens for all streams together, so that they are preempted.
    kv_memory = _pool_bytes(folders[kind], backend, 80 if tight else 600)
    _check(_runner(folders[kind], backend, block_size, kv_memory), late, mode, traffic, budget, floors)


@lru_cache
def _pool_bytes(folder: Path, backend: str, num_tokens: int) -> int:
    runner = open_runner(folder, head=True, dtype=BACKENDS[backend][0], kernels=BACKENDS[backend][1])
    per_token = runner.kv.buffer.nbytes // (runner.info.num_blocks * runner.info.block_size)
    states = 0
    if runner.gdn is not None:
        states = sum(
            t.nbytes
            for layer in runner.gdn.layers
            for t in (layer.state, layer.window, layer.tape_conv, layer.tape_gates)
        )
    return num_tokens * per_token + states
