"""Folders that other tools quantised, on MLX: what its layouts hold is repacked and exact, the rest is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_packed
import torch
from harness import Ask, Traffic, alone
from safetensors.torch import load_file, save_file

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import UnknownModel
from slipstream.load import open_model
from slipstream.sampling import SamplingParams

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_tiny import open_mlx

from slipstream.runners.mlx.loaders.models import load_shapes, load_target
from slipstream.runners.mlx.loading import model_shape

TOKENS = torch.randint(0, tiny.VOCAB, (30,), generator=torch.Generator().manual_seed(3)).tolist()
REPACKED = ["qwen-gptq", "intel-autoround", "autoround-as-awq", "quanttrio-awq", "cyankiwi-stacked", "int8", "mxfp4"]
REPACKED += ["cyankiwi-asymmetric", "gptq-that-claims-a-quantised-head", "quantised-embedding", "int8-packed"]
REPACKED += ["gptq-asymmetric", "gptq-v2", "gptq-v2-asymmetric", "gptq-8-bit"]
REPACKED += ["next-gptq", "next-awq"]
FP8, NVFP4 = "is stored in FP8", "is stored in NVFP4"
REFUSED = {
    "gptq-act-order": "is stored in act-order",
    **dict.fromkeys(["redhat-nvfp4", "sakamakismile-nvfp4", "next-nvfp4"], NVFP4),
    **dict.fromkeys(["fp8-static", "fp8-block-quantised-head", "next-fp8"], FP8),
    **dict.fromkeys(["nvidia-nvfp4", "unsloth-nvfp4"], f"({FP8}|{NVFP4})"),
}


@pytest.mark.parametrize("name", REPACKED)
def test_logits(tmp_path: Path, name: str) -> None:
    twin = tiny_packed.save(tiny_packed.LAYOUTS[name], tmp_path)
    with torch.no_grad():
        expected = twin(torch.tensor([TOKENS])).logits[0]
    model = open_model(str(tmp_path), any_architecture=True)
    loaded = load_target(model, "float32")
    logits = torch.tensor(loaded(mx.array([TOKENS]))[0].tolist())
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
    planned = model_shape(model, EngineConfig(), RunnerConfig(dtype="float32")).weights
    assert sum(planned.values()) == sum(array.nbytes for _, array in tree_flatten(loaded.parameters()))


@pytest.mark.parametrize("name", ["intel-autoround", "cyankiwi-stacked", "quantised-embedding", "gptq-v2", "next-gptq"])
def test_drafts_change_no_token(tmp_path: Path, name: str) -> None:
    """Heads that are quantised, one by one and in one file, and one that is not."""
    tiny_packed.save(tiny_packed.LAYOUTS[name], tmp_path)
    runner = open_mlx(tmp_path)
    ask = Ask(tuple(TOKENS[:9]), SamplingParams(temperature=0.0, max_tokens=16, seed=1, draft=3))
    traffic = Traffic(runner, EngineConfig(max_streams=4))
    assert traffic.run([ask]) == [alone(runner, ask)]
    assert traffic.snapshot.num_draft_tokens > 0


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_refused(tmp_path: Path, name: str) -> None:
    """By our own readers, before mlx-lm fails over it: with the tensor, how it is stored, and what to take instead. To
    plan as well, but for act-order, which the headers do not show."""
    tiny_packed.save(tiny_packed.LAYOUTS[name], tmp_path)
    model = open_model(str(tmp_path), any_architecture=True)
    sentence = (
        rf"{tmp_path}: (model|lm_head)\.[\w.]+ {REFUSED[name]}, which is not read on MLX: use --runner torch, or the "
        r"model in BF16 or converted to MLX\."
    )
    for load in (load_target,) if name == "gptq-act-order" else (load_target, load_shapes):
        with pytest.raises(UnknownModel) as raised:
            load(model, "auto")
        assert re.fullmatch(sentence, str(raised.value))


def test_what_no_runner_reads_is_said_by_our_readers(tmp_path: Path) -> None:
    tiny_packed.save(tiny_packed.LAYOUTS["qwen2-awq"], tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj"
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{name}.{part}"]
    tensors |= {f"{name}.weight": torch.zeros(3072, 1, dtype=torch.uint8), f"{name}.weight.absmax": torch.zeros(96)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        UnknownModel, match=r"up_proj\.weight is stored by bitsandbytes, which cannot be read: take the"
    ):
        load_shapes(open_model(str(tmp_path), any_architecture=True), "auto")


def test_experts_of_several_types_are_refused(tmp_path: Path) -> None:
    layout = tiny_packed.LAYOUTS["next-gptq"]
    tiny_packed.save(replace(layout, rules=[(r"experts\.3\.up", None), *layout.rules]), tmp_path)
    with pytest.raises(UnknownModel, match=r"several types or shapes \(BF16, INT4_32\), .*: use --runner torch\.$"):
        load_shapes(open_model(str(tmp_path), any_architecture=True), "auto")


@pytest.mark.parametrize("name", ["cyankiwi-stacked", "experts-in-int4-and-bfloat16"])
def test_experts_run_as_they_are_stored(tmp_path: Path, name: str) -> None:
    """Scales or experts in 16 bits: MLX's CPU build multiplies experts in float32 only, so there they become that."""
    tiny_packed.save(tiny_packed.LAYOUTS[name], tmp_path)
    ask = Ask(tuple(TOKENS[:9]), SamplingParams(temperature=0.0, max_tokens=6, seed=1, draft=2))
    [tokens] = Traffic(open_mlx(tmp_path, dtype="auto"), EngineConfig(max_streams=4)).run([ask])
    assert len(tokens) == 6
