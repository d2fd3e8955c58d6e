"""FP8 folders: a matrix joined with its scales, what is kept in BF16, and what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tiny_fp8
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CorruptFile, MissingTensor, UnknownModel
from slipstream.load import dequantize, open_model
from slipstream.load.dequantize import E4M3_VALUES
from slipstream.load.head import find_head, open_head
from slipstream.load.hf.config import spec_from_config
from slipstream.load.hf.folder import open_hf
from slipstream.load.hf.safetensors import SafetensorsFile
from slipstream.load.tensor import RawTensor

GATE = "model.layers.0.mlp.gate_proj.weight"
KEPT = ("lm_head", "embed_tokens", "norm", "mtp.fc", "mlp.gate.", "shared_expert_gate")
KEPT += ("conv1d", "in_proj_a", "in_proj_b", "A_log", "dt_bias")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind -> folder; MoE models in both layouts of their experts."""
    made = {kind: tiny_fp8.save(tiny_fp8.build(kind), tmp_path_factory.mktemp(kind)) for kind in tiny_fp8.MODELS}
    stacked = tiny_fp8.build("qwen3_5_moe-odd")
    return made | {"stacked": tiny_fp8.save(stacked, tmp_path_factory.mktemp("stacked"), stacked=True)}


@pytest.fixture
def changed(tmp_path, folders):
    """The dense odd folder with tensors replaced, or taken out where they are None, and fields of its config."""

    def change(**config):
        tensors = load_file(folders["qwen3_5-odd"] / "model.safetensors")
        changes = {name: config.pop(name) for name in list(config) if "." in name}
        kept = {name: weight for name, weight in (tensors | changes).items() if weight is not None}
        save_file(kept, tmp_path / "model.safetensors")
        old = json.loads((folders["qwen3_5-odd"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(old | config))
        return tmp_path

    return change


def test_every_code():
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3_VALUES, wanted)
    assert np.array_equal(np.signbit(E4M3_VALUES[[0, 128]]), [False, True])


def test_what_is_stored_is_read(folders):
    """Names, types, shapes and values against the file as the reference library reads it."""
    for kind, folder in folders.items():
        checkpoint, stored, floats = open_hf(folder), load_file(folder / "model.safetensors"), tiny_fp8.floats(folder)
        assert set(checkpoint.names()) == set(floats), kind
        assert not any(name.endswith("_scale_inv") for name in checkpoint.names())
        for name, wanted in floats.items():
            raw = checkpoint.get(name)
            assert raw.shape == checkpoint.shape(name) == tuple(wanted.shape)
            np.testing.assert_array_equal(dequantize(raw), wanted.numpy())
            is_fp8 = tiny_fp8.is_fp8(stored[name])
            assert is_fp8 != any(part in name for part in KEPT), name
            assert raw.dtype == checkpoint.dtype(name) == ("F8_E4M3" if is_fp8 else "BF16")
            assert (raw.scale is None) != is_fp8


@pytest.mark.parametrize("kind", ["qwen3_5-odd", "qwen3_5_moe-odd", "stacked"])
def test_a_scale_for_each_row_and_group(folders, kind):
    checkpoint, stored = open_hf(folders[kind]), load_file(folders[kind] / "model.safetensors")
    fp8 = [name for name in checkpoint.names() if checkpoint.dtype(name) == "F8_E4M3"]
    assert any(name.startswith("mtp.") for name in fp8)
    for name in fp8:
        raw, scale = checkpoint.get(name), stored[f"{name}_scale_inv"]
        *count, rows, columns = raw.shape
        assert raw.data.dtype == np.uint8
        assert raw.data.shape == raw.shape
        assert raw.scale.dtype == np.float32
        assert raw.scale.shape == (*count, rows, -(-columns // 128))
        for row in (0, min(127, rows - 1), rows - 1):
            np.testing.assert_array_equal(raw.scale[..., row, :], scale[..., row // 128, :].float().numpy())
        assert checkpoint.num_bytes(name) == raw.data.size + scale.nbytes
    assert open_model(str(folders[kind])).num_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_the_elements_are_not_copied(folders):
    checkpoint = open_hf(folders["qwen3_5"])
    assert not checkpoint.get(GATE).data.flags.owndata
    assert not checkpoint.get(GATE).data.flags.writeable


@pytest.mark.parametrize("scales", [torch.float32, torch.float16])
def test_scales_of_other_types(tmp_path, scales):
    folder = tiny_fp8.save(tiny_fp8.build("qwen3"), tmp_path, scales=scales)
    checkpoint = open_hf(folder)
    assert checkpoint.spec.fp8
    assert checkpoint.get(GATE).dtype == checkpoint.dtype(GATE) == "F8_E4M3_F32"
    np.testing.assert_array_equal(dequantize(checkpoint.get(GATE)), tiny_fp8.floats(folder)[GATE].numpy())


def test_rows_take_their_scales_with_them(folders):
    raw = open_hf(folders["stacked"]).get("model.layers.0.mlp.experts.gate_up_proj")
    count, rows, columns = raw.shape
    whole = dequantize(raw)
    part = raw.rows(slice(2 * rows, 3 * rows))
    assert part.shape == (rows, columns)
    assert np.shares_memory(part.data, raw.data)
    np.testing.assert_array_equal(dequantize(part), whole[2])
    picked = np.array([5, count * rows - 1, 200])
    np.testing.assert_array_equal(dequantize(raw.rows(picked)), whole.reshape(-1, columns)[picked])


def test_rows_of_other_types():
    blocks = np.arange(3 * 36, dtype=np.uint8).reshape(3, 36)
    part = RawTensor("w", "Q4_0", (3, 64), blocks).rows(slice(1, 3))
    assert (part.shape, part.scale) == ((2, 64), None)
    np.testing.assert_array_equal(part.data, blocks[1:])


def test_a_multimodal_folder(tmp_path, folders):
    """Where the published ones have their quantisation: outside of text_config, names with one more prefix."""
    source = folders["qwen3_5"]
    text = json.loads((source / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "quantization_config": text.pop("quantization_config"), "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    stored = load_file(source / "model.safetensors")
    visual = {"model.visual.merger.weight": torch.zeros(4, 4)}
    save_file(
        {name.replace("model.", "model.language_model.", 1): weight for name, weight in stored.items()} | visual,
        tmp_path / "model.safetensors",
    )
    checkpoint = open_hf(tmp_path)
    assert set(checkpoint.names()) == set(open_hf(source).names())
    assert checkpoint.get(GATE).name == GATE
    np.testing.assert_array_equal(dequantize(checkpoint.get(GATE)), tiny_fp8.floats(source)[GATE].numpy())


def test_a_head_in_a_file_of_its_own(tmp_path, folders):
    stored = load_file(folders["qwen3_5_moe"] / "model.safetensors")
    path = tmp_path / "head.safetensors"
    save_file({name: weight for name, weight in stored.items() if name.startswith("mtp.")}, path)
    head = open_head(path, open_hf(folders["qwen3_5_moe"]).spec)
    name = "mtp.layers.0.mlp.experts.1.down_proj.weight"
    assert head.dtype(name) == "F8_E4M3"
    np.testing.assert_array_equal(dequantize(head.get(name)), tiny_fp8.floats(folders["qwen3_5_moe"])[name].numpy())


def test_a_head_in_bf16(changed, folders):
    floats = tiny_fp8.floats(folders["qwen3_5-odd"])
    head = {name: floats[name].to(torch.bfloat16) for name in floats if name.startswith("mtp.")}
    gone = {f"{name}_scale_inv": None for name in head}
    checkpoint = open_hf(changed(**head, **gone))
    found, reason = find_head(checkpoint, None)
    assert (found, reason) == (checkpoint, "")
    assert checkpoint.dtype("mtp.layers.0.mlp.up_proj.weight") == "BF16"


def test_missing_scales(changed):
    with pytest.raises(
        MissingTensor, match=rf"{GATE} is stored in FP8, but its scales, '{GATE}_scale_inv', are missing"
    ):
        open_hf(changed(**{f"{GATE}_scale_inv": None}))


@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (2, 3), (6,), (1,), ()])
def test_scales_of_the_wrong_shape(changed, shape):
    """328 x 160: three blocks below each other, two beside each other."""
    with pytest.raises(CorruptFile, match=rf"_scale_inv is {re.escape(str(list(shape)))}, .* needs \[3, 2\]"):
        open_hf(changed(**{f"{GATE}_scale_inv": torch.ones(shape)}))


def test_scales_of_an_unknown_type(changed):
    with pytest.raises(UnknownModel, match=r"_scale_inv is stored as I32, only BF16, F32, F16"):
        open_hf(changed(**{f"{GATE}_scale_inv": torch.ones(3, 2, dtype=torch.int32)}))


def test_scales_without_fp8(changed):
    with pytest.raises(CorruptFile, match=r"is stored as F32, but has FP8 scales"):
        open_hf(changed(**{GATE: torch.ones(328, 160)}))


def test_another_eight_bit_type(changed):
    folder = changed(**{GATE: torch.ones(328, 160).to(torch.float8_e5m2), f"{GATE}_scale_inv": None})
    with pytest.raises(UnknownModel, match=r"is stored as F8_E5M2, only F32, F16, BF16, F8_E4M3"):
        open_hf(folder)


def test_a_vector_in_fp8(changed):
    name = "model.norm.weight"
    with pytest.raises(CorruptFile, match=rf"{name} is stored in FP8, but is no matrix"):
        open_hf(changed(**{name: torch.ones(160).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1)}))


def test_a_broken_head_never_stops_the_model(changed):
    name = "mtp.layers.0.self_attn.o_proj.weight_scale_inv"
    head, reason = find_head(open_hf(changed(**{name: None})), None)
    assert head is None
    assert reason.startswith("no MTP head: ")
    assert f"'{name}', are missing" in reason


def test_the_tensors_decide_not_the_config(changed):
    """modules_to_not_convert that names everything, or no quantization_config at all."""
    everything = tiny_fp8.QUANTISED | {"modules_to_not_convert": ["model", GATE]}
    for quantised in (everything, None):
        assert open_hf(changed(quantization_config=quantised)).dtype(GATE) == "F8_E4M3"


def spec(build, quantised, **outer):
    return spec_from_config(build.config | {"quantization_config": quantised} | outer, {}, "config.json")


@pytest.mark.parametrize(
    "quantised", [tiny_fp8.QUANTISED, tiny_fp8.QUANTISED | {"fmt": "e5m2"}, {"quant_method": "gptq"}, {"bits": 4}]
)
def test_the_config_does_not_say_how_tensors_are_stored(build, folders, quantised):
    assert spec(build, quantised) == spec(build, None)
    assert open_hf(folders["qwen3_5"]).spec.fp8


@pytest.mark.parametrize("method", ["hqq", "aqlm"])
def test_methods_that_are_not_read(changed, method):
    """Their tensors have names of their own."""
    with pytest.raises(UnknownModel, match=rf"is quantised by '{method}', which cannot be read: take the model in"):
        open_hf(changed(quantization_config={"quant_method": method}, **{GATE: None, f"{GATE}_scale_inv": None}))


def test_a_quantisation_that_is_no_object(changed):
    folder = changed(quantization_config="fp8")
    with pytest.raises(CorruptFile, match="quantization_config should be an object"):
        open_hf(folder)


def test_the_reader_alone_gives_bytes(folders):
    raw = SafetensorsFile(folders["qwen3_5"] / "model.safetensors").get(GATE)
    assert (raw.dtype, raw.data.dtype, raw.scale) == ("F8_E4M3", np.uint8, None)
