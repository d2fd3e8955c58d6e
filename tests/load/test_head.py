"""MTP heads: separate, grafted, absent, of another model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.errors import HeadError
from slipstream.load.default_model import default_head_path
from slipstream.load.gguf.file import open_gguf
from slipstream.load.head import expert_layout, find_any_head, find_head, head_shapes, open_head, try_head
from slipstream.load.hf.folder import open_hf
from slipstream.load.spec import HeadSpec, ModelSpec, MoeSpec


def head_tensors(spec: ModelSpec, layout="fused"):
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in head_shapes(spec, layout).items()}


@pytest.fixture
def target(tmp_path, build):
    return open_hf(build.llama_folder(tmp_path / "target"))


@pytest.fixture
def write(tmp_path, build):
    def write(tensors):
        path = tmp_path / "head.safetensors"
        path.write_bytes(build.safetensors_bytes({name: ("F32", array) for name, array in tensors.items()}))
        return path

    return write


def test_separate_head(target, write):
    tensors = head_tensors(target.spec)
    assert len(tensors) == 13
    head, reason = find_head(target, write(tensors))
    assert reason == ""
    np.testing.assert_array_equal(head.get("mtp.fc.weight").data, tensors["mtp.fc.weight"])


def test_every_tensor_is_needed(target, write):
    tensors = head_tensors(target.spec)
    for name in tensors:
        rest = {other: array for other, array in tensors.items() if other != name}
        with pytest.raises(HeadError, match=f"'{name}' is missing"):
            open_head(write(rest), target.spec)


def test_every_shape_is_checked(target, write):
    tensors = head_tensors(target.spec)
    for name, array in tensors.items():
        with pytest.raises(HeadError, match=f"{name} is "):
            open_head(write(tensors | {name: array[:-1]}), target.spec)


def test_head_of_another_model(target, write):
    other = replace(target.spec, hidden_size=48)
    path = write(head_tensors(other))
    with pytest.raises(HeadError, match=r"fc\.weight is \[48, 96\], this model needs \[64, 128\]"):
        open_head(path, target.spec)
    with pytest.raises(HeadError, match=r"The MTP head that was given cannot be used: .*\[48, 96\]"):
        find_head(target, path)
    head, reason = try_head(path, target.spec)
    assert head is None
    assert reason.startswith("no MTP head: ")
    assert "[48, 96]" in reason


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"garbage", "too short"),
        (b"A text, which is no head.\n", "claims a header of"),
        (b"GGUF\x03\0\0\0", "it is truncated"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_a_damaged_head_is_an_error_where_it_was_given(target, tmp_path, content, says):
    path = tmp_path / "head.safetensors"
    path.write_bytes(content)
    for find in (find_head, find_any_head):
        with pytest.raises(HeadError, match=f"The MTP head that was given cannot be used: {path} .*{says}"):
            find(target, path)
    head, reason = try_head(path, target.spec)
    assert head is None
    assert says in reason
    with pytest.raises(HeadError, match="does not exist"):
        open_head(tmp_path / "nowhere.safetensors", target.spec)


def test_no_head(target):
    head, reason = find_head(target, None)
    assert head is None
    assert reason == "no MTP head: the checkpoint has no mtp.* tensors; give one with --mtp"


def test_a_head_that_the_configuration_announces_is_missed_by_name(target):
    target.spec = replace(target.spec, head=HeadSpec(num_declared_layers=1))
    for find in (find_head, find_any_head):
        head, reason = find(target, None)
        assert head is None
        announced = "config.json announces 1 MTP layer(s), but the checkpoint has no mtp.* tensors"
        assert reason == f"no MTP head: {announced}; give one with --mtp"


def test_a_file_without_a_head_is_an_error(tmp_path, build, target):
    whole = build.llama_folder(tmp_path / "whole") / "model.safetensors"
    with pytest.raises(HeadError, match=r"cannot be used: .*'mtp\.fc\.weight' is missing"):
        find_head(target, whole)
    with pytest.raises(HeadError, match=r"cannot be used: .*has no MTP head: it holds no mtp\.\* tensors"):
        find_any_head(target, whole)


def test_a_bad_head_that_was_given_does_not_hide_behind_the_models_own(tmp_path, build, target, write):
    grafted = open_hf(build.llama_folder(tmp_path / "grafted", extra=head_tensors(target.spec)))
    with pytest.raises(HeadError, match="cannot be used"):
        find_head(grafted, write(head_tensors(replace(target.spec, hidden_size=48))))


def test_a_gguf_without_a_head_misses_its_own_names(tmp_path, build):
    checkpoint = open_gguf(build.gguf(tmp_path / "x.gguf"))
    why = "no MTP head: the checkpoint has no nextn.* tensors; give one with --mtp"
    assert find_head(checkpoint, None) == (None, why)
    checkpoint.spec = replace(checkpoint.spec, head=HeadSpec(num_declared_layers=1))
    _, why = find_head(checkpoint, None)
    assert why.startswith("no MTP head: its metadata announces 1 MTP layer(s), but the checkpoint has no nextn.*")


def test_names_and_cache_of_a_head():
    head = HeadSpec()
    assert head.input_norms == ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    assert (head.fc, head.layers, head.norm) == ("mtp.fc", ("mtp.layers.0",), "mtp.norm")
    assert head.num_kv_layers == 1
    assert head.owns("mtp.fc.weight")
    assert not head.owns("model.norm.weight")


def test_grafted_head(tmp_path, build, target):
    tensors = head_tensors(target.spec)
    grafted = open_hf(build.llama_folder(tmp_path / "grafted", extra=tensors))
    assert find_head(grafted, None) == (grafted, "")
    del tensors["mtp.norm.weight"]
    partial = open_hf(build.llama_folder(tmp_path / "partial", extra=tensors))
    head, reason = find_head(partial, None)
    assert head is None
    assert "'mtp.norm.weight' is missing" in reason


def test_gated_head_has_norms_and_twice_the_queries(target):
    gated = replace(target.spec, gated_attention=True, qk_norm=True)
    shapes = head_shapes(gated)
    assert shapes["mtp.layers.0.self_attn.q_proj.weight"] == (128, 64)
    assert shapes["mtp.layers.0.self_attn.o_proj.weight"] == (64, 64)
    assert shapes["mtp.layers.0.self_attn.q_norm.weight"] == (16,)


@pytest.mark.parametrize("layout", ["fused", "stacks", "separate"])
def test_experts_in_both_layouts(target, write, layout):
    spec = replace(target.spec, moe=MoeSpec(num_experts=3, num_active=2, expert_size=8, shared_size=12))
    tensors = head_tensors(spec, layout)
    head = open_head(write(tensors), spec)
    assert expert_layout(head, spec) == layout
    experts = {name: array.shape for name, array in tensors.items() if ".experts." in name}
    assert len(experts) == {"fused": 2, "stacks": 3, "separate": 9}[layout]
    if layout == "fused":
        assert experts["mtp.layers.0.mlp.experts.gate_up_proj"] == (3, 16, 64)
    last = sorted(experts)[-1]
    with pytest.raises(HeadError, match="is missing"):
        open_head(write({name: array for name, array in tensors.items() if name != last}), spec)


def test_default_head_fits_the_default_model(default_gguf):
    head, reason = find_head(open_gguf(default_gguf), default_head_path())
    assert reason == ""
    assert len(list(head.names())) == 13
    assert head.get("mtp.fc.weight").dtype == "BF16"
