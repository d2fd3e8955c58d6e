"""Matrices in 8 bits on the GPU's runner: what it says equals a plain model of the rounded weights.

On a GPU, or on the CPU in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from harness import Ask, Traffic, alone, open_resident, open_runner, run_alone
from safetensors.torch import load_file, save_file
from test_resident import ON_GPU, check_tokens, traffic

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import ConfigError
from slipstream.load import OpenedModel
from slipstream.load.hf import open_hf
from slipstream.load.random_model import open_random
from slipstream.runners.torch.cuda.kernels.int8 import rounded, weights
from slipstream.runners.torch.cuda.linear import CudaInt8Format, CudaInt8Linear, CudaLinear, ExpertStack
from slipstream.runners.torch.cuda.ops import CudaOps
from slipstream.runners.torch.cuda.runner import CudaRunner
from slipstream.runners.torch.loading import load_placed
from slipstream.runners.torch.memory import plan_memory
from slipstream.runners.torch.models.layers import InTurn
from slipstream.runners.torch.models.qwen3_5_moe import SparseMlp
from slipstream.runners.torch.placement import place, resident
from slipstream.sampling import SamplingParams

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CONFIG = EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8)
KINDS = list(tiny.MODELS) if ON_GPU else ["qwen2"]  # with biases


def folders(kind: str, folder: Path) -> tuple[Path, Path]:
    """A tiny model, and the same with the weights that its 8 bits stand for."""
    model = tiny.build(kind)
    plain, rough = (tiny.save(model, folder / name, head=True) for name in ("plain", "rough"))
    form = CudaInt8Format(CudaOps(DEVICE, torch.float32))
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and form.of(name) is form:
            tensors[name] = weights(rounded([tensor], tensor.shape, DEVICE), torch.float32).cpu()
    save_file(tensors, rough / "model.safetensors", {"format": "pt"})
    return plain, rough


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_the_rounded_weights(tmp_path: Path, kind: str) -> None:
    plain, rough = folders(kind, tmp_path)
    asks = traffic(6, 40) if ON_GPU else traffic(2, 5)  # the interpreter is slow
    cpu = open_runner(rough, head=True)
    wanted = [alone(cpu, ask) for ask in asks]
    runner = open_resident(plain, rounded=True)
    assert isinstance(runner.decoder.output, CudaInt8Linear)
    run = Traffic(runner, CONFIG)
    check_tokens(run, asks, wanted)


# Not with one key head: there, rounding the weights as bfloat16 does moves the second token's logits by 1.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "one-key-head" not in kind] if ON_GPU else ["qwen3_5"])
def test_what_the_command_line_gives_is_close_in_bfloat16(tmp_path: Path, kind: str) -> None:
    plain, rough = folders(kind, tmp_path)
    ask = Ask(tuple(range(3, 12)), SamplingParams(temperature=0.0, max_tokens=1, seed=0, prompt_logprobs=0))
    runner = open_resident(plain, dtype="int8")
    assert runner.kv.buffer.dtype == torch.bfloat16
    run = Traffic(runner, CONFIG)
    run.run([ask])
    wanted = run_alone(open_runner(rough, head=True), ask)
    got, exact = ([told.logprob for told in each.logprobs["0"]] for each in (run, wanted))
    assert len(got) == len(exact) == 8
    assert got == pytest.approx(exact, abs=0.2)


def test_random_weights_are_rounded_but_for_experts_and_routers() -> None:
    model, options = open_random("tiny-moe"), RunnerConfig("cpu", "int8", kv_memory=4_000_000, max_context=64)
    runner = load_placed(model, EngineConfig(max_streams=2), options, resident(DEVICE, options, model.spec))
    assert isinstance(runner, CudaRunner)
    assert runner.info.note.startswith(f"{DEVICE.type}, bfloat16, matrices int8 (experts bfloat16)")
    assert isinstance(runner.decoder.embedding, CudaInt8Linear)
    layers = runner.decoder.layers
    assert isinstance(layers, InTurn)
    for layer in layers.layers:
        assert isinstance(layer.mlp, SparseMlp)
        assert isinstance(layer.mlp.router, CudaLinear)
        assert isinstance(layer.mlp.experts, ExpertStack)
        assert layer.mlp.experts.down.dtype == torch.bfloat16
        assert isinstance(layer.mlp.shared.down, CudaInt8Linear)


def config(**more: object) -> RunnerConfig:
    return RunnerConfig("cuda", "int8", **more)  # type: ignore[arg-type]


def test_a_large_model_takes_half_the_memory() -> None:
    model, engine = open_random("qwen3.5-27b"), EngineConfig(max_streams=1)
    placement = place(config(), model.spec, present=False)
    plan = plan_memory(model, placement, engine, config(), free=10**12)
    assert plan.weights + plan.head == pytest.approx(model.num_bytes / 2, rel=0.002)
    assert plan.weights + plan.head > model.num_bytes / 2
    assert placement.note == "cuda, bfloat16, matrices int8, Triton kernels in captured steps"


def test_experts_stay_as_they_are() -> None:
    model, engine = open_random("qwen3.5-35b-a3b"), EngineConfig(max_streams=1)
    placement = place(config(), model.spec, present=False)
    plan = plan_memory(model, placement, engine, config(), free=10**12)
    names = list(model.checkpoint.names())
    experts = sum(model.checkpoint.num_bytes(name) for name in names if ".experts." in name)
    assert plan.weights + plan.head == pytest.approx(experts + (model.num_bytes - experts) / 2, rel=0.002)
    assert "matrices int8 (experts bfloat16)" in placement.note


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3_5", "qwen3_5_moe"])
def test_what_is_stored_is_what_was_planned(kind: str, tmp_path: Path) -> None:
    checkpoint = open_hf(tiny.save(tiny.build(kind), tmp_path, head=True))
    model = OpenedModel("tiny", tmp_path, checkpoint, checkpoint, "")
    placement = resident(DEVICE, RunnerConfig("cpu", "int8"), checkpoint.spec)
    planned = plan_memory(model, placement, CONFIG, RunnerConfig("cpu", "int8", kv_memory=4_000_000))
    form, stored = placement.form, 0
    for name in checkpoint.names():
        raw = checkpoint.get(name)
        is_matrix = len(raw.shape) == 2 and ".experts." not in name
        numel = int(torch.tensor(raw.shape).prod())
        stored += form.of(name).linear([raw], None).num_bytes if is_matrix else 2 * numel
    assert planned.weights + planned.head == stored


def test_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = open_random("tiny").spec
    with pytest.raises(ConfigError, match=r"int8 needs the Triton kernels.*switched off"):
        place(config(kernels=False), spec, present=False)
    monkeypatch.setattr("slipstream.runners.torch.placement.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"int8 needs the Triton kernels.*not installed"):
        place(config(), spec, present=False)
