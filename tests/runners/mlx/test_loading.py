"""Loading: what it peaks at is planned, progress is told while files are read, and nothing is read to plan."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx
import numpy as np
import tiny
import tiny_gguf
import tiny_packed
from safetensors.torch import save_file
from tiny_gguf import Options

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import ConfigError
from slipstream.load import open_model
from slipstream.load.gguf.file import GgufCheckpoint
from slipstream.load.hf.folder import HfCheckpoint
from slipstream.load.quantized.gguf_blocks import BLOCK_TYPES
from slipstream.load.tensor import RawTensor
from slipstream.runners.mlx.backend import MlxBackend
from slipstream.runners.mlx.loaders import parameters
from slipstream.runners.mlx.loaders.gguf_weights import gguf_rules

SLAB = 1 << 14
ENGINE = EngineConfig(max_streams=2)


def gguf(folder: Path, **options: object) -> Path:
    kinds = {"ffn_gate": "Q4_K", "ffn_up": "Q5_K", "ffn_down": "Q6_K", "attn": "IQ4_XS"}
    options = Options(lambda name: next((kind for part, kind in kinds.items() if part in name), "Q8_0"), **options)
    return tiny_gguf.write(tiny_gguf.wide(moe=True), folder / "x.gguf", options).path


def apart(folder: Path) -> Path:
    model = tiny.randomise(tiny.moe(hidden_size=128, moe_intermediate_size=128, vocab_size=1024))
    model.save_pretrained(folder)
    tensors = model.state_dict() | tiny.head_tensors(model)
    save_file(tiny.experts_apart(tensors), folder / "model.safetensors", {"format": "pt"})
    return folder


def joined(folder: Path) -> Path:
    return tiny.save(tiny.randomise(tiny.next_moe(hidden_size=128, vocab_size=1024)), folder, head=True)


def packed(name: str) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        tiny_packed.save(tiny_packed.LAYOUTS[name], folder)
        return folder

    return save


MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "gguf": (gguf, "float16"),
    "gguf-fused": (lambda folder: gguf(folder, fused=True), "float32"),
    "gguf-without-head": (lambda folder: gguf(folder, head=False), "bfloat16"),
    "experts-apart": (apart, "float32"),
    "experts-apart-narrower": (apart, "float16"),
    "joined": (joined, "auto"),
    "awq": (packed("quanttrio-awq"), "auto"),
    "autoround": (packed("intel-autoround"), "float32"),
    "stacked": (packed("cyankiwi-stacked"), "float16"),
    "int8": (packed("int8"), "auto"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What is made of the file is never there twice. Progress comes while it is read, in the file's bytes."""
    monkeypatch.setattr(parameters, "SLAB", SLAB)
    make, dtype = MODELS[name]
    model = open_model(str(make(tmp_path)), any_architecture=True)
    backend = MlxBackend(RunnerConfig(dtype=dtype, kv_memory=4_000_000))
    plan = backend.plan_memory(model, ENGINE)
    before, told = mx.get_active_memory(), []
    mx.reset_peak_memory()
    runner = backend.load(
        model, ENGINE, plan, lambda num_bytes: told.append((num_bytes, mx.get_active_memory() - before))
    )
    taken, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
    assert runner.info.max_depth == (4 if model.head else 0)
    assert taken == pytest.approx(plan.weights + plan.head, rel=0.01)
    assert peak <= taken + plan.workspace
    assert peak < 1.25 * taken + SLAB * parameters.SLAB_BYTES
    assert sum(num_bytes for num_bytes, _ in told) == model.num_bytes
    assert all(num_bytes > 0 for num_bytes, _ in told)
    at_half, read = 0, 0
    for num_bytes, held in told:
        read += num_bytes
        if read <= model.num_bytes / 2:
            at_half = held
    assert 0 < at_half < 0.75 * taken


def test_nothing_is_read_to_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the head neither."""

    def get(self: object, name: str) -> None:
        raise AssertionError(f"{name} is read")

    models = [
        open_model(str(gguf(tmp_path))),
        open_model(str(packed("intel-autoround")(tmp_path)), any_architecture=True),
    ]
    monkeypatch.setattr(GgufCheckpoint, "get", get)
    monkeypatch.setattr(HfCheckpoint, "get", get)
    for model in models:
        plan = MlxBackend(RunnerConfig(kv_memory=4_000_000)).plan_memory(model, ENGINE)
        assert plan.head > 0
        assert sum(size for _, size in plan.weight_parts) == plan.weights
        assert {"experts", "attention", "recurrent layers", "embedding and output"} <= dict(plan.weight_parts).keys()


def test_a_slab_takes_what_is_planned() -> None:
    """Arrays of numpy, of every type: those of MLX are in the other test."""
    rows, columns = 128, 2048

    class Nowhere:
        path, spec = "nowhere", open_model(None).spec

    rules = gguf_rules(Nowhere(), mx.float16)
    for dtype, kind in BLOCK_TYPES.items():
        data = np.full((rows, columns // kind.columns * kind.num_bytes), 60, np.uint8)
        raw = RawTensor("a.weight", dtype, (rows, columns), data)
        tracemalloc.start()
        rules.become(raw)
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert taken < rows * columns * parameters.SLAB_BYTES, dtype


def test_a_model_that_fits_only_once_it_is_loaded_is_refused(tmp_path: Path) -> None:
    model = open_model(str(gguf(tmp_path)))
    backend = MlxBackend(RunnerConfig(kv_memory=1_000_000))
    plan = backend.plan_memory(model, ENGINE)
    with pytest.raises(ConfigError, match=r"^loading the weights takes 0\.\d\d GB, but 0\.\d\d GB are free: "):
        backend.plan_memory(model, ENGINE, plan.weights + plan.head + plan.workspace)
    assert backend.plan_memory(model, ENGINE, plan.weights + plan.head + plan.workspace + 1).caches > 0
