"""Activations in FP8 beside matrices in FP8, on the GPU's runner: how far tokens' probabilities move, and who may ask.

On a GPU, or on the CPU in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import tiny
import tiny_fp8
import torch
from fp8_emulation import open_floats
from harness import Ask, Traffic, open_resident, open_runner, run_alone

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import ConfigError
from slipstream.load import OpenedModel
from slipstream.load.hf.folder import open_hf
from slipstream.load.random.model import open_random
from slipstream.runners.choose import choose_backend
from slipstream.runners.cuda import platform as platforms
from slipstream.runners.cuda.drafter import CudaMtpDrafter
from slipstream.runners.cuda.model import fp8
from slipstream.runners.cuda.model.fp8 import Fp8Choice, Fp8Experts, Fp8Linear
from slipstream.runners.cuda.model.fp8_choice import Trial, choose, parts_in, trials_of
from slipstream.runners.cuda.platform import cuda_platform
from slipstream.runners.cuda.runner import CudaRunner
from slipstream.runners.torch.backend import choose_platform
from slipstream.runners.torch.loading import load_runner
from slipstream.sampling import SamplingParams

CONFIG = EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROUNDED = "stored, activations in fp8"
NEVER, ALWAYS = 1 << 20, 0  # tokens up to which activations stay as they are
ASK = Ask(tuple(range(3, 12)), SamplingParams(temperature=0.0, max_tokens=1, seed=0, prompt_logprobs=0))


def logprobs(runner: CudaRunner) -> list[float]:
    run = Traffic(runner, CONFIG)
    run.run([ASK])
    return [entry.logprob for entry in run.logprobs["0"]]


def distances(some: list[float], others: list[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(some, others, strict=True)]


@pytest.mark.parametrize("kind", [pytest.param("qwen3_5", marks=pytest.mark.exhaustive), "qwen3_5_moe"])
def test_probabilities_stay_close(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompt's tokens: without rounding, to float32's; with it, within what test_fp8_quality.py sees."""
    folder = tiny_fp8.save(tiny_fp8.build(kind), tmp_path)
    exact = [entry.logprob for entry in run_alone(open_runner(folder, head=True), ASK).logprobs["0"]]
    monkeypatch.setattr(fp8, "UNMEASURED", NEVER)
    assert max(distances(logprobs(open_resident(folder, rounded=ROUNDED)), exact)) < 0.02
    monkeypatch.setattr(fp8, "UNMEASURED", ALWAYS)
    off = distances(logprobs(open_resident(folder, rounded=ROUNDED)), exact)
    assert 0.02 < median(off) < 1.0


def test_probabilities_are_those_of_rounded_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To transformers' on the same weights, with the inputs of the same matrices rounded: nothing else is."""
    folder = tiny_fp8.save(tiny_fp8.build("qwen3_5"), tmp_path)
    tokens = torch.tensor(ASK.prompt)
    with torch.no_grad():
        logits = open_floats(folder, torch.float32, rounds=True)(tokens[None]).logits[0]
    wanted = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].tolist()
    monkeypatch.setattr(fp8, "UNMEASURED", ALWAYS)
    off = distances(logprobs(open_resident(folder, rounded=ROUNDED)), wanted)
    assert median(off) < 0.05
    assert max(off) < 0.25  # a value between two codes may go the other way


def small_runner(kind: str, folder: Path) -> CudaRunner:
    return open_resident(tiny_fp8.save(tiny_fp8.build(kind), folder), rounded=ROUNDED)


def test_each_shape_and_size_is_tried_once(tmp_path: Path) -> None:
    runner = small_runner("qwen3_5_moe", tmp_path)
    found = list(parts_in(runner.decoder))
    linears, experts = ([part for part in found if isinstance(part, kind)] for kind in (Fp8Linear, Fp8Experts))
    assert linears
    assert experts
    assert {part.choice for part in (*linears, *experts)} == {linears[0].choice}
    trials = list(trials_of(runner.decoder, 100))
    keys = [(trial.shape, trial.num_tokens) for trial in trials]
    assert len(keys) == len(set(keys))
    assert set(keys) == {(part.shape, n) for part in (*linears, *experts) for n in (16, 32, 64, 100)}
    smallest = [trial for trial in trials if trial.num_tokens == 16]
    for trial in smallest:
        for rounds in (False, True):
            trial.run(rounds)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5", "qwen3_5_moe"])
def test_other_models_have_nothing_to_try(tmp_path: Path, kind: str) -> None:
    """Every start asks, the flag off or on."""
    runner = open_resident(tiny.save(tiny.build(kind), tmp_path, head=True))
    drafter = runner.program.drafter
    assert isinstance(drafter, CudaMtpDrafter)
    assert len(list(parts_in((runner.decoder, drafter.head)))) > 10
    assert not list(trials_of((runner.decoder, drafter.head), 2048))


def test_the_faster_product_is_taken_and_stays() -> None:
    """By a clock of our own: rounding is faster from 64 tokens on, but at 256 only by a little."""
    choice, asked = Fp8Choice(), []
    shape = (34816, 5120)

    def trial(num_tokens: int) -> Trial:
        return Trial(shape, num_tokens, lambda rounds: asked.append((num_tokens, rounds)), choice)

    def seconds(run: object) -> float:
        assert callable(run)
        run()
        num_tokens, rounds = asked[-1]
        return {16: 1.2, 64: 0.5, 256: 0.97}[num_tokens] if rounds else 1.0

    assert [choice.rounds(shape, n) for n in (1, 64, 65, 4096)] == [False, False, True, True]  # nothing measured yet
    choose([trial(n) for n in (16, 64, 256)], seconds)
    answers = {n: choice.rounds(shape, n) for n in (1, 16, 33, 64, 129, 200, 256, 2048, 16384)}
    assert answers == {
        1: False, 16: False, 33: True, 64: True, 129: False, 200: False, 256: False, 2048: True, 16384: True
    }  # fmt: skip


def options(**more: object) -> RunnerConfig:
    return RunnerConfig("cpu", kv_memory=8_000_000, fp8_activations=True, **more)  # type: ignore[arg-type]


def test_the_flag_makes_such_matrices(tmp_path: Path) -> None:
    checkpoint = open_hf(tiny_fp8.save(tiny_fp8.build("qwen3_5"), tmp_path))
    model = OpenedModel("tiny", tmp_path, checkpoint, checkpoint, "")
    platform = cuda_platform(CPU, options(), checkpoint.spec)
    assert "matrices fp8 (vocabulary bfloat16), activations in fp8 where faster" in platform.note
    runner = load_runner(model, EngineConfig(max_streams=2), options(), platform)
    assert isinstance(runner, CudaRunner)
    assert any(isinstance(part, Fp8Linear) for part in parts_in(runner.decoder))
    off = cuda_platform(CPU, RunnerConfig("cpu"), checkpoint.spec)
    assert "activations in fp8" not in off.note


def test_so_does_quantizing_at_load() -> None:
    form = cuda_platform(CPU, options(dtype="fp8"), open_random("tiny-moe").spec).form
    assert isinstance(form, fp8.Fp8QuantizingFormat)
    assert isinstance(form.dense(torch.randn(48, 256)), Fp8Linear)
    assert isinstance(form.dense_experts(torch.randn(2, 256, 128), torch.randn(2, 128, 128)), Fp8Experts)
    assert not isinstance(form.dense(torch.randn(48, 100)), Fp8Linear)


def test_who_cannot_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = open_hf(tiny.save(tiny.build("qwen3_5"), tmp_path / "plain")).spec
    stored = open_hf(tiny_fp8.save(tiny_fp8.build("qwen3_5"), tmp_path / "fp8")).spec
    with pytest.raises(ConfigError, match="no matrices are in FP8"):
        cuda_platform(CPU, options(), plain)
    with pytest.raises(ConfigError, match="no matrices are in FP8"):
        cuda_platform(CPU, options(dtype="bfloat16"), stored)
    with pytest.raises(ConfigError, match="CUDA GPU, but this is a CPU"):
        choose_platform(CPU, options(), stored)
    with pytest.raises(ConfigError, match="kernels are switched off"):
        choose_platform(CUDA, options(kernels=False), stored)
    monkeypatch.setattr("slipstream.runners.choose.choose_library", lambda name: "mlx")
    with pytest.raises(ConfigError, match="the runner is mlx"):
        choose_backend(options())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert platforms.why_no_fp8_products(CUDA, options(), stored) == (
        "this GPU has no FP8 tensor cores: its compute capability is 8.6, they came with 8.9"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert platforms.why_no_fp8_products(CUDA, options(), stored) is None
