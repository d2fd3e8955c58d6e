"""Quantised folders with damage of every kind: one sentence each, no crash, and little memory."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import packing
import pytest
import tiny_packed
import torch
from safetensors.torch import save

from slipstream.errors import LoadError
from slipstream.load import dequantize, open_model

CASES = [40, pytest.param(500, marks=pytest.mark.exhaustive)]
DTYPES = [
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "I8",
    "U8",
    "I16",
    "I32",
    "I64",
    "BOOL",
    "F4",
    "",
    7,
    None,
]
SIZES = [-1, 0, 1, 2, 3, 7, 31, 2**31, 2**63, 10**30, 1.5, None, "8", []]
SUFFIXES = ["weight", "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_2"]
SUFFIXES += ["weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx", "biases", "SCB", "input_scale"]
HINTS: list[Any] = [None, [], "gptq", {"quant_method": 3, "sym": "no"}, {"quant_method": "gptq", "sym": False}]
HINTS += [{"checkpoint_format": {}}, {"quant_method": "auto-round", "packing_format": 5}]
SLACK = 1 << 15  # Python's own objects, of a file of a few kilobytes


def whole_file(kind: str, build: Any) -> bytes:
    """A llama model whose matrices are all packed as `kind`, and each scale that is ignored."""
    tensors: dict[str, torch.Tensor] = {"model.layers.0.self_attn.k_scale": torch.ones(())}
    for name, array in build.llama_tensors().items():
        weight = torch.from_numpy(array)
        if weight.ndim < 2 or "embed" in name:
            tensors[name] = weight
        else:
            stored = packing.PACKERS[kind](weight, 32)[0]
            tensors |= {name.removesuffix("weight") + each: part.contiguous() for each, part in stored.items()}
    return save(tensors)


def damaged(whole: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", whole[:8])
    how = rng.randrange(8)
    if how == 0:
        return whole[: rng.randrange(len(whole))]
    if how == 1:
        made = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            made[rng.randrange(8 + length if rng.random() < 0.8 else len(whole))] = rng.randrange(256)
        return bytes(made)
    header = json.loads(whole[8 : 8 + length])
    for _ in range(rng.randint(1, 3)):
        damage_header(header, how, rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + whole[8 + length :]


def damage_header(header: dict[str, Any], how: int, rng: random.Random) -> None:
    name = rng.choice([each for each in header if each != "__metadata__"])
    entry = header[name]
    if how == 2:
        entry["dtype"] = rng.choice(DTYPES)
    elif how == 3 and entry["shape"]:
        entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(SIZES)
    elif how == 4:
        entry["shape"] = rng.choice([entry["shape"][::-1], entry["shape"] + [1], entry["shape"][1:], [0, 8], []])
    elif how == 5:
        entry["data_offsets"] = rng.choice([[0, 0], [0, 2**60], entry["data_offsets"][::-1], [5], []])
    elif how == 6:
        header.pop(name)
    else:
        stem, _, _ = name.rpartition(".")
        header[f"{stem}.{rng.choice(SUFFIXES)}"] = header.pop(name)


def write(folder: Path, build: Any, weights: bytes, quantised: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(json.dumps(build.config | {"quantization_config": quantised}))


def read_all(folder: Path) -> None:
    model = open_model(str(folder))
    for name in model.checkpoint.names():
        raw = model.checkpoint.get(name)
        assert raw.shape == model.checkpoint.shape(name)
        assert raw.dtype == model.checkpoint.dtype(name)
        with np.errstate(all="ignore"):
            assert dequantize(raw).shape == raw.shape
        assert model.checkpoint.num_bytes(name) >= 0


def check(folder: Path, size: int) -> str:
    """The sentence; empty: it opened, the damage does no harm."""
    tracemalloc.start()
    try:
        model = open_model(str(folder))
        for name in model.checkpoint.names():
            model.checkpoint.get(name)
    except LoadError as error:
        said = str(error)
        assert str(folder) in said
        assert "\n" not in said
        return said
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * size + SLACK, f"{peak} bytes for a file of {size}"
    read_all(folder)
    return ""


@pytest.mark.parametrize("count", CASES)
@pytest.mark.parametrize("kind", packing.PACKERS)
def test_damage(tmp_path: Path, build: Any, kind: str, count: int) -> None:
    whole = whole_file(kind, build)
    write(tmp_path / "m", build, whole, None)
    assert not check(tmp_path / "m", len(whole)), "the whole file opens"
    refused = 0
    for seed in range(count):
        rng = random.Random(seed)
        made = damaged(whole, rng)
        write(tmp_path / "m", build, made, rng.choice(HINTS))
        refused += bool(check(tmp_path / "m", len(made)))
    assert refused > count * 0.6


@pytest.mark.parametrize("count", [15, pytest.param(500, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["cyankiwi-stacked", "nvidia-nvfp4", "intel-autoround", "next-awq"])
def test_damage_of_published_layouts(tmp_path: Path, name: str, count: int) -> None:
    """Stacks of experts, mixed types, a head beside the index, joined projections."""
    tiny_packed.save(tiny_packed.LAYOUTS[name], tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    size = sum(len(whole) for whole in files.values())
    assert not check(tmp_path, size), "the whole folder opens"
    refused = 0
    for seed in range(count):
        rng = random.Random(seed)
        path = rng.choice(sorted(files))
        path.write_bytes(damaged(files[path], rng))
        refused += bool(check(tmp_path, size))
        path.write_bytes(files[path])
    assert refused > count * 0.4  # what the model does not use may be damaged
