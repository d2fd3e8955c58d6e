"""Heads from raw and converted files, in the model's own checkpoint and beside it: the same head each time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx
import tiny
import tiny_fp8
from mlx.utils import tree_flatten
from mlx_tiny import open_mlx, packed
from safetensors.torch import load_file, save_file

from slipstream.load import open_model
from slipstream.runners.mlx.loaders.heads import load_head
from slipstream.runners.mlx.loaders.models import load_target
from slipstream.runners.mlx.mtp import MtpHead
from slipstream.runners.mlx.target import OpenTarget


def head_of(folder: Path, mtp: Path | None = None) -> MtpHead:
    opened = open_model(str(folder), str(mtp) if mtp else None, any_architecture=True)
    assert opened.head is not None
    return load_head(opened.head, opened.spec.architecture, OpenTarget(load_target(opened, "auto")).args, mx.float32)


def norms(head: MtpHead) -> dict[str, list[float]]:
    return {name: array.tolist() for name, array in tree_flatten(head.parameters()) if "norm" in name}


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe", "llama-gqa-tied"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_norms_get_their_one_exactly_once(tmp_path: Path, kind: str) -> None:
    model = tiny.build(kind)
    raw = tiny.save(model, tmp_path / "raw", head=True)
    converted = packed(raw, tmp_path / "converted", 8)
    beside = tmp_path / "head.safetensors"
    save_file(tiny.head_tensors(model), beside)
    stored = tiny.head_tensors(model)["mtp.norm.weight"]
    wanted = stored + 1.0 if kind.startswith("qwen3_5") else stored
    for head in (head_of(raw), head_of(converted), head_of(converted, beside), head_of(raw, beside)):
        assert norms(head)["norm.weight"] == pytest.approx(wanted.tolist(), abs=1e-6)
        assert norms(head) == norms(head_of(raw))


def test_a_packed_head_keeps_its_bits(tmp_path: Path, kind: str) -> None:
    raw = tiny.save(tiny.build(kind), tmp_path / "raw", head=True)
    head = head_of(packed(raw, tmp_path / "packed", 4))
    assert (head.fc.bits, head.fc.group_size) == (4, 32)
    assert head.layers[0].self_attn.q_proj.bits == 4


def test_separate_experts_are_joined(tmp_path: Path) -> None:
    model = tiny.build("qwen3_5_moe")
    raw = tiny.save(model, tmp_path / "raw", head=True)
    save_file(tiny.experts_apart(tiny.head_tensors(model)), tmp_path / "head.safetensors")
    fused, separate = (dict(tree_flatten(head_of(raw, m).parameters())) for m in (None, tmp_path / "head.safetensors"))
    assert fused.keys() == separate.keys()
    assert all(mx.array_equal(fused[name], separate[name]) for name in fused)


def test_a_head_of_another_model_is_refused_and_the_model_runs(tmp_path: Path) -> None:
    raw = tiny.save(tiny.build("llama-gqa-tied"), tmp_path / "raw")
    save_file(tiny.head_tensors(tiny.build("qwen3_5")), tmp_path / "head.safetensors")
    runner = open_mlx(raw, mtp=tmp_path / "head.safetensors")
    assert runner.info.max_depth == 0
    assert "is not an MTP head of this model" in runner.info.why_no_draft


def test_a_head_in_fp8_is_a_reason(tmp_path: Path) -> None:
    """The target model runs; it says why it does not draft."""
    folder = tiny_fp8.save(tiny_fp8.build("qwen3_5"), tmp_path)
    target = {name: weight for name, weight in tiny_fp8.floats(folder).items() if not name.startswith("mtp.")}
    head = {name: weight for name, weight in load_file(folder / "model.safetensors").items() if name.startswith("mtp.")}
    save_file(target | head, folder / "model.safetensors", {"format": "pt"})
    info = open_mlx(folder).info
    assert info.max_depth == 0
    assert "mtp.layers.0.mlp.down_proj.weight is stored in FP8, which is not read on MLX: use --r" in info.why_no_draft
