"""Recurrent states in 16 bits (``--state-dtype``): who may have them, their bytes, copies and what they lose.

The kernels are in tests/runners/cuda/test_state_dtypes.py, rows that start from such states in test_resident_keeps.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from harness import Ask, Traffic, alone, open_resident, open_runner, target_logits
from rounded_states import as_stored, rounding_steps
from test_resident_keeps import MODELS

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import Transfer
from slipstream.errors import ConfigError
from slipstream.load.fingerprint import fingerprint
from slipstream.load.random.model import open_random
from slipstream.load.spec import GdnSpec
from slipstream.runners.choose import choose_backend
from slipstream.runners.cuda.platform import cuda_platform
from slipstream.runners.cuda.runner import CudaRunner
from slipstream.runners.torch import gdn
from slipstream.runners.torch.backend import TorchBackend, choose_platform
from slipstream.runners.torch.caches import GdnRings, PagedKv
from slipstream.runners.torch.host_memory import HostMemory
from slipstream.runners.torch.loading import load_runner
from slipstream.runners.torch.memory import plan_memory
from slipstream.sampling import SamplingParams

pytest.importorskip("triton")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TYPES = ("float32", "float16", "bfloat16")


def on_a_gpu(state_dtype: str, **more: object) -> TorchBackend:
    """That need not be here."""
    config = RunnerConfig("cuda", state_dtype=state_dtype, **more)  # type: ignore[arg-type]
    return TorchBackend(config, present=False)


@pytest.mark.parametrize("state_dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_drafts_change_no_token(tmp_path: Path, state_dtype: str) -> None:
    """Hot, so that some drafts are right: plain, and with drafts beside another stream."""
    torch.manual_seed(0)
    folder = tiny.save(tiny.randomise(MODELS["qwen3_5"]()), tmp_path, head=True)
    asks = [
        Ask((7, 14, 21), SamplingParams(temperature=4.0, seed=3, max_tokens=9, draft=3)),
        Ask((5, 6), SamplingParams(temperature=0.0, seed=1, max_tokens=4, draft=2)),
    ]
    runner = open_resident(folder, state_dtype=state_dtype)
    assert runner.info.note.endswith(f", states in {state_dtype}")
    run = Traffic(runner, EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8))
    assert run.run(asks) == [alone(runner, ask) for ask in asks]
    assert run.snapshot.num_accepted_tokens > 0


def test_who_cannot_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    recurrent, config = open_random("tiny").spec, RunnerConfig(state_dtype="float16")
    with pytest.raises(
        ConfigError, match="state_dtype float16 needs the Triton kernels of a CUDA GPU, but this is a CPU"
    ):
        choose_platform(CPU, config, recurrent)
    with pytest.raises(ConfigError, match="kernels are switched off"):
        choose_platform(CUDA, RunnerConfig(state_dtype="bfloat16", kernels=False), recurrent)
    with pytest.raises(ConfigError, match="this model has no recurrent states"):
        choose_platform(CUDA, config, replace(recurrent, gdn=None))
    monkeypatch.setattr("slipstream.runners.choose.choose_library", lambda name: "mlx")
    with pytest.raises(ConfigError, match="but the runner is mlx"):
        choose_backend(config)
    with pytest.raises(ConfigError, match="state_dtype must be one of float32, float16, bfloat16, not 'fp8'"):
        RunnerConfig(state_dtype="fp8")


def test_half_the_bytes() -> None:
    """The 27B's states are 151 MB in float32, beside a ring of raw inputs that stays as it is."""
    model, engine = open_random("qwen3.5-27b"), EngineConfig(max_streams=64)
    plans = {each: on_a_gpu(each).plan_memory(model, engine, 139_000_000_000) for each in TYPES}
    numbers = 48 * 48 * 128 * 128
    for state_dtype in TYPES[1:]:
        wide, half = plans["float32"], plans[state_dtype]
        assert (wide.state_dtype, half.state_dtype) == ("float32", state_dtype)
        assert wide.state_per_stream - half.state_per_stream == 2 * numbers
        assert half.kept_state == half.state_per_stream
        assert wide.states - half.states == 64 * 2 * numbers
    traffic = [on_a_gpu(each).step_traffic(model).states for each in TYPES]
    assert traffic == [4 * numbers, 2 * numbers, 2 * numbers]


@pytest.mark.parametrize("state_dtype", TYPES)
def test_what_is_allocated_is_what_was_planned(state_dtype: str) -> None:
    model, engine, config = open_random("tiny"), EngineConfig(max_streams=3), RunnerConfig(state_dtype=state_dtype)
    platform = cuda_platform(CPU, config, model.spec)
    plan = plan_memory(model, platform, engine, config, 4_000_000_000)
    runner = load_runner(model, engine, config, platform, plan)
    assert isinstance(runner, CudaRunner)
    assert isinstance(runner.gdn, GdnRings)
    states, _ = runner.gdn.kept
    assert (plan.state_dtype, states.dtype) == (state_dtype, getattr(torch, state_dtype))
    assert sum(values.nbytes for values in runner.gdn.kept) == plan.states + plan.kept_states


def test_states_on_disk_belong_to_one_type() -> None:
    """float16 and bfloat16 have the same size: the fingerprint tells them apart."""
    model = open_random("tiny")
    notes = [on_a_gpu(each).describe(model) for each in TYPES]
    assert len({fingerprint(model, {"backend": note}) for note in notes}) == 3
    assert "states" not in notes[0]  # what was written before the flag existed is still known


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copies_in_host_memory(dtype: torch.dtype) -> None:
    spec = open_random("tiny").spec
    rings = GdnRings(GdnSpec(1, 3, 8, 8, 4), 2, 2, 2, 1, CPU, torch.float32, dtype)
    memory = HostMemory(PagedKv(spec, 1, 2, 4, CPU, torch.float32), rings, 2, 1)
    for values in rings.kept:
        values.copy_(torch.randn(values.shape))
    wanted = [values[:, 3].clone() for values in rings.kept]
    memory.save(Transfer((), (), 3, 0))
    for values in rings.kept:
        values.zero_()
    memory.load(Transfer((), (), 1, 0))
    assert all(torch.equal(values[:, 1], want) for values, want in zip(rings.kept, wanted, strict=True))


def test_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean KL of the next token, with the state rounded after every token; float16 keeps three bits more."""
    runner = open_runner(tiny.save(tiny.build("qwen3_5"), tmp_path))
    tokens = torch.randint(0, tiny.VOCAB, (160,), generator=torch.Generator().manual_seed(1)).tolist()
    exact = target_logits(runner, tokens, [16] * 10)
    lost = {}
    for name in TYPES[1:]:
        with monkeypatch.context() as patched:
            patched.setattr(
                gdn, "_steps", rounding_steps(lambda state, name=name: as_stored(state, getattr(torch, name)))
            )
            p, q = ((each.double() * 10).log_softmax(-1) for each in (exact, target_logits(runner, tokens, [16] * 10)))
        lost[name] = float((p.exp() * (p - q)).sum(-1).mean())
    assert 0 < 16 * lost["float16"] < lost["bfloat16"], lost
    assert lost["bfloat16"] < 1e-2, lost
