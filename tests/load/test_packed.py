"""Quantised matrices as folders store them: each is one matrix, with the weights that its tensors stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import packing
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import CorruptFile, LoadError, UnknownModel
from slipstream.load import dequantize
from slipstream.load.hf.folder import HfCheckpoint, read_hints
from slipstream.load.hf.safetensors import open_folder
from slipstream.load.quantized.types import codes_of, container_of
from slipstream.load.random.model import open_random

SPEC = open_random("tiny").spec
X = "model.layers.0.mlp.up_proj"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": False}
CONFIGS = {"gptq-v2-asymmetric": V2, "gptq-asymmetric": {"quant_method": "gptq", "sym": False}}
KINDS = {
    "INT4_32": ("gptq", "gptq-v2", "autoround", "awq-symmetric", "pack-quantized"),
    "INT4_32_ZERO": ("awq", "gptq-asymmetric", "gptq-v2-asymmetric", "gptq-act-order", "pack-quantized-asymmetric"),
    "INT8_32": ("gptq-8-bit", "pack-quantized-8-bit"),
    "INT8_128": ("int8-channel",),
    "FP4_16": ("nvfp4-pack-quantized", "modelopt-nvfp4"),
    "FP4_32": ("mxfp4-pack-quantized",),
    "F8_E4M3": ("fp8-channel",),
    "F8_E4M3_F32": ("fp8-tensor", "fp8-tensor-static", "fp8-block"),
}
TYPES = {name: dtype for dtype, names in KINDS.items() for name in names}


def weights(rows: int = 48, columns: int = 128, seed: int = 0) -> Tensor:
    """Not centred: zero points differ."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) + torch.randn(rows, 1, generator=generator) / 4


def open_tensors(folder: Path, tensors: dict[str, Tensor], config: dict[str, object] | None = None) -> HfCheckpoint:
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return HfCheckpoint(str(folder), SPEC, open_folder(folder), read_hints(folder))


def named(stored: dict[str, Tensor], base: str = X) -> dict[str, Tensor]:
    return {f"{base}.{suffix}": each for suffix, each in stored.items()}


def test_every_packer_is_listed() -> None:
    assert set(TYPES) == set(packing.PACKERS)


@pytest.mark.parametrize("kind", packing.PACKERS)
def test_one_matrix(tmp_path: Path, kind: str) -> None:
    stored, expected = packing.PACKERS[kind](weights(), 32)
    checkpoint = open_tensors(tmp_path, named(stored), CONFIGS.get(kind))
    assert list(checkpoint.names()) == [f"{X}.weight"]
    raw = checkpoint.get(f"{X}.weight")
    assert raw.name == f"{X}.weight"
    assert raw.dtype == checkpoint.dtype(raw.name) == TYPES[kind]
    assert raw.shape == checkpoint.shape(raw.name) == (48, 128)
    assert checkpoint.num_bytes(raw.name) == sum(each.nbytes for each in stored.values())
    np.testing.assert_allclose(dequantize(raw), expected.numpy(), rtol=2e-6, atol=2e-6)
    rows = np.array([5, 0, 47])
    np.testing.assert_array_equal(dequantize(raw.rows(rows)), dequantize(raw)[rows])
    if container_of(raw.dtype) is not None:
        assert codes_of(raw).codes.shape == raw.shape
        assert raw.scale is not None
        assert (raw.scale.dtype, raw.scale.shape) == (np.float32, (48, 128 // int(TYPES[kind].split("_")[1])))


@pytest.mark.parametrize("kind", ["pack-quantized", "nvfp4-pack-quantized", "modelopt-nvfp4", "int8-channel"])
def test_codes_that_are_ours_already_are_not_copied(tmp_path: Path, kind: str) -> None:
    checkpoint = open_tensors(tmp_path, named(packing.PACKERS[kind](weights(), 32)[0]))
    data = checkpoint.get(f"{X}.weight").data
    assert not data.flags.owndata
    assert not data.flags.writeable


@pytest.mark.parametrize(
    ("group", "columns", "size"),
    [(16, 128, 16), (64, 128, 64), (128, 256, 128), (256, 512, 128), (48, 96, 16), (-1, 256, 128), (-1, 96, 32)],
)
@pytest.mark.parametrize("kind", ["gptq", "pack-quantized", "pack-quantized-asymmetric"])
def test_groups_of_any_size(tmp_path: Path, kind: str, group: int, columns: int, size: int) -> None:
    stored, expected = packing.PACKERS[kind](weights(columns=columns), group)
    checkpoint = open_tensors(tmp_path, named(stored))
    assert checkpoint.dtype(f"{X}.weight") == f"INT4_{size}" + ("_ZERO" if "asymm" in kind else "")
    np.testing.assert_allclose(dequantize(checkpoint.get(f"{X}.weight")), expected.numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("group", "columns"), [(24, 48), (40, 200), (8, 64)])
def test_groups_that_cannot_be(tmp_path: Path, group: int, columns: int) -> None:
    checkpoint = open_tensors(tmp_path, named(packing.pack_quantized(weights(columns=columns), group)[0]))
    with pytest.raises(UnknownModel, match=rf"has {columns} columns and {columns // group} scales a row, no groups"):
        checkpoint.shape(f"{X}.weight")


def test_rows_that_are_no_multiple_of_8(tmp_path: Path) -> None:
    """compressed-tensors packs zero points along the rows."""
    stored, expected = packing.pack_quantized_asymmetric(weights(rows=13), 32)
    raw = open_tensors(tmp_path, named(stored)).get(f"{X}.weight")
    np.testing.assert_allclose(dequantize(raw), expected.numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("config", [None, {"sym": True}, {"sym": True, "checkpoint_format": "gptq_v2"}])
def test_symmetric_zero_points_whatever_the_config_says(
    tmp_path: Path, less: int, config: dict[str, object] | None
) -> None:
    stored, expected = packing.gptq(weights(), 32, less=less)
    raw = open_tensors(tmp_path, named(stored), config).get(f"{X}.weight")
    assert raw.zero is None
    np.testing.assert_allclose(dequantize(raw), expected.numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("packing_format", ["auto_round:auto_gptq", "auto_round"])
def test_zero_points_of_autoround(tmp_path: Path, packing_format: str) -> None:
    """Stored less one in the packing of GPTQ, as they are in its own."""
    stored, expected = packing.gptq_asymmetric(weights(), 32, less=int("gptq" in packing_format))
    config = {"quant_method": "auto-round", "packing_format": packing_format, "sym": False}
    raw = open_tensors(tmp_path, named(stored), config).get(f"{X}.weight")
    np.testing.assert_allclose(dequantize(raw), expected.numpy(), rtol=2e-6, atol=2e-6)


def test_act_order_keeps_the_groups_together(tmp_path: Path) -> None:
    stored, expected = packing.gptq_act_order(weights(), 32)
    raw = open_tensors(tmp_path, named(stored)).get(f"{X}.weight")
    assert raw.order is not None
    assert sorted(raw.order) == list(range(128))
    np.testing.assert_array_equal(stored["g_idx"].numpy()[raw.order], np.arange(128) // 32)
    np.testing.assert_allclose(codes_of(raw).weights(), expected.numpy()[:, raw.order], rtol=2e-6, atol=2e-6)


def test_act_order_of_compressed_tensors(tmp_path: Path) -> None:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    stored, floats = packing.pack_quantized(weights()[:, order], 32)
    back = order.argsort()
    code = packing.symmetric(weights()[:, order], 32, 4, torch.bfloat16)[0][:, back]
    stored |= {"weight_packed": packing.words(code), "weight_g_idx": (back // 32).to(torch.int32)}
    raw = open_tensors(tmp_path, named(stored)).get(f"{X}.weight")
    np.testing.assert_allclose(dequantize(raw), floats[:, back].numpy(), rtol=2e-6, atol=2e-6)


def test_groups_of_different_sizes(tmp_path: Path) -> None:
    stored = packing.gptq_act_order(weights(), 32)[0]
    stored["g_idx"][0] = (stored["g_idx"][0] + 1) % 4
    with pytest.raises(UnknownModel, match="groups of different sizes"):
        open_tensors(tmp_path, named(stored)).get(f"{X}.weight")


@pytest.mark.parametrize("dot", [True, False])
@pytest.mark.parametrize(
    "kind", ["pack-quantized", "pack-quantized-asymmetric", "nvfp4-pack-quantized", "modelopt-nvfp4", "fp8-channel"]
)
def test_stacks_of_experts(tmp_path: Path, kind: str, dot: bool) -> None:
    """A matrix after the other in each tensor; suffixes after a dot or an underscore."""
    each = [packing.PACKERS[kind](weights(seed=seed), 32) for seed in range(3)]
    stored = {}
    for suffix in each[0][0]:
        name = f"{STACK}.{suffix}" if dot else STACK if suffix == "weight" else f"{STACK}_{suffix}"
        stored[name] = each[0][0][suffix] if suffix == "weight_shape" else torch.stack([one[suffix] for one, _ in each])
    checkpoint = open_tensors(tmp_path, stored)
    assert list(checkpoint.names()) == [STACK]
    raw = checkpoint.get(STACK)
    assert raw.shape == checkpoint.shape(STACK) == (3, 48, 128)
    expected = torch.stack([floats for _, floats in each]).numpy()
    np.testing.assert_allclose(dequantize(raw), expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(dequantize(raw.rows(slice(48, 96))), expected[1], rtol=2e-6, atol=2e-6)


def test_scales_of_activations_and_caches_are_no_tensors(tmp_path: Path) -> None:
    others = {f"{X}.weight": torch.ones(4, 4), "model.layers.0.self_attn.k_scale": torch.ones(())}
    others |= {"model.layers.0.self_attn.k_proj.v_scale": torch.ones(1), f"{X}.input_scale": torch.ones(1)}
    assert list(open_tensors(tmp_path, others).names()) == [f"{X}.weight"]


BITSANDBYTES = {f"{X}.weight": torch.zeros(64, 1, dtype=torch.uint8), f"{X}.weight.absmax": torch.zeros(2)}
BITSANDBYTES |= {f"{X}.weight.quant_map": torch.zeros(16)}
BITSANDBYTES |= {f"{X}.weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}
MLX = {f"{X}.weight": torch.zeros(8, 8, dtype=torch.uint32), f"{X}.scales": torch.zeros(8, 1)}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (BITSANDBYTES, "stored by bitsandbytes, which cannot be read: take the model in 4 bits"),
        (MLX | {f"{X}.biases": torch.zeros(8, 1)}, "in MLX's layout: use --runner mlx"),
        (named({"weight": torch.zeros(8, 64, dtype=torch.int8), "SCB": torch.zeros(8)}), "stored by bitsandbytes"),
    ],
)
def test_what_is_refused_by_name(tmp_path: Path, tensors: dict[str, Tensor], says: str) -> None:
    checkpoint = open_tensors(tmp_path, tensors)
    assert list(checkpoint.names()) == [f"{X}.weight"]
    assert isinstance(checkpoint.dtype(f"{X}.weight"), str)
    with pytest.raises(UnknownModel, match=says):
        checkpoint.get(f"{X}.weight")


def changed(kind: str, **changes: Tensor | None) -> dict[str, Tensor]:
    stored = packing.PACKERS[kind](weights(), 32)[0] | changes
    return named({suffix: each for suffix, each in stored.items() if each is not None})


INT = torch.int32


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (changed("awq", scales=None), r"up_proj\.scales' is missing"),
        (changed("awq", scales=torch.ones(4, 40)), "not GPTQ's or AWQ's"),
        (changed("awq", qzeros=torch.ones(4, 5, dtype=INT)), r"qzeros is \[4, 5\], .* should be \[4, 6\]"),
        (changed("awq", qweight=torch.ones(128, 6)), "qweight is stored as F32, only I32"),
        (changed("gptq", qzeros=torch.ones(4, 3, dtype=INT)), "has 2-bit codes, which cannot be read: take"),
        (changed("gptq", g_idx=torch.ones(127, dtype=INT)), r"g_idx is \[127\], .* should be \[128\]"),
        (changed("gptq", scales=torch.ones(0, 48)), "scales is no matrix"),
        (changed("gptq-8-bit", qzeros=torch.arange(48, dtype=INT).reshape(4, 12)), "8-bit codes with zero points"),
        (changed("pack-quantized", weight_shape=torch.tensor([48, 127])), "has 127 columns in 16 words"),
        (changed("pack-quantized", weight_shape=torch.tensor([48, -5])), "has -5 columns"),
        (changed("pack-quantized", weight_scale=torch.ones(47, 4)), r"weight_scale is \[47, 4\]"),
        (changed("pack-quantized-asymmetric", weight_zero_point=torch.ones(5, 4, dtype=INT)), "weight_zero_point is"),
        (changed("nvfp4-pack-quantized", weight_global_scale=None), r"weight_global_scale' is missing"),
        (changed("modelopt-nvfp4", weight_scale_2=torch.ones(3)), r"weight_scale_2 is \[3\]"),
        (changed("fp8-channel", weight_scale=torch.ones(47, 1)), "one for each row, or one in all"),
        (changed("fp8-channel", weight_scale_2=torch.ones(())), "stored as F8_E4M3 with a scale of its scales"),
        (changed("pack-quantized", weight_global_scale=torch.ones(1)), "stored as INT4_32 with a scale of its scales"),
        (changed("int8-channel", weight_zero_point=torch.ones(48, 1, dtype=torch.int8)), "codes with zero points"),
        (changed("int8-channel", weight=torch.ones(48, 100, dtype=torch.int8)), "no groups of a multiple of 16"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensors: dict[str, Tensor], says: str) -> None:
    with pytest.raises(LoadError, match=says) as raised:
        open_tensors(tmp_path, tensors).get(f"{X}.weight")
    assert str(tmp_path) in str(raised.value)


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    twice = {f"{STACK}.weight_packed": torch.ones(1, dtype=INT), f"{STACK}_packed": torch.ones(1, dtype=INT)}
    with pytest.raises(CorruptFile, match=re.escape("the same tensor twice")):
        open_tensors(tmp_path, twice)
