"""Every refusal of a folder is one sentence that ends with what to take or to do instead."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import packing
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import slipstream
from slipstream.errors import LoadError
from slipstream.load import open_model

INSTEAD = re.compile(r"[:;] (take|fetch|use|merge) [^:]*\.$")
Q = "model.layers.0.self_attn.q_proj."
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "gemma3"},
    {"model_type": "mistral", "sliding_window": 64},
    {"model_type": "qwen3_5_text", "attn_output_gate": False},
    {"model_type": "qwen3_5_text", "layer_types": ["mamba"]},
    {"model_type": "qwen3_next", "norm_topk_prob": False},
    {"model_type": "qwen3_next", "decoder_sparse_step": 2},
    {"model_type": "qwen3_5_text", "linear_num_key_heads": 3, "linear_num_value_heads": 4},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
    {"partial_rotary_factor": 3.0},
    {"hidden_act": "gelu"},
    {"mlp_bias": True},
    {"layer_types": ["full_attention"] * 7},
    {"num_attention_heads": 3},
    {"num_key_value_heads": 3},
    {"intermediate_size": 100},  # not that of the tensors
    {"quantization_config": {"quant_method": "hqq"}, "tie_word_embeddings": False},
]
INT = torch.int32
E5M2 = torch.zeros(64, 64).to(torch.float8_e5m2)


def packed(kind: str, **changes: Tensor | None) -> dict[str, Tensor | None]:
    """q_proj packed so, with some of its tensors changed. None: without that tensor."""
    stored = packing.PACKERS[kind](torch.randn(64, 64), 32)[0] | changes
    return {f"{Q}weight": None} | {Q + suffix: each for suffix, each in stored.items()}


TENSORS: dict[str, dict[str, Tensor | None]] = {
    "e5m2": {f"{Q}weight": E5M2},
    "int64": {f"{Q}weight": torch.zeros(64, 64, dtype=torch.int64)},
    "complex": {f"{Q}weight": None, f"{Q}weight_packed": torch.zeros(64, 8, dtype=torch.complex64)},
    "missing": {"model.norm.weight": None},
    "twice": {"model.language_model.norm.weight": torch.ones(64)},
    "a bias": {f"{Q}bias": torch.ones(64)},
    "smoothing": {f"{Q}pre_quant_scale": torch.ones(64) * 2},
    "an adapter": {f"{Q}lora_A.weight": torch.ones(4, 64)},
    "unknown": {f"{Q}R1": torch.ones(64)},
    "bitsandbytes": {f"{Q}SCB": torch.ones(64)},
    "bitsandbytes of 4 bits": {f"{Q}weight.absmax": torch.ones(64)},
    "mlx": {f"{Q}scales": torch.ones(64, 2)},
    "sparse": {f"{Q}meta": torch.ones(64)},
    "scales beside floats": {f"{Q}weight_scale": torch.ones(64, 1)},
    "a global scale": packed("fp8-channel", weight_scale_2=torch.ones(())),
    "fp8 without scales": packed("fp8-channel", weight_scale=None),
    "fp8 by other blocks": packed("fp8-channel", weight_scale=torch.ones(2, 2)),
    "fp8 with odd scales": packed("fp8-channel", weight_scale=torch.ones(64, 1, dtype=INT)),
    "fp8 of no matrix": {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)},
    "fp8 of no matrix, with scales": {
        "model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn),
        "model.norm.weight_scale": torch.ones(1),
    },
    "int4 in bytes": packed("modelopt-nvfp4", weight_scale=torch.ones(64, 2)),
    "awq without scales": packed("awq", scales=None),
    "awq with other zeros": packed("awq", qzeros=torch.ones(2, 5, dtype=INT)),
    "gemv": packed("awq", scales=torch.ones(2, 40)),
    "three bits": packed("gptq", qzeros=torch.ones(2, 6, dtype=INT)),
    "eight bits with zero points": packed("gptq-8-bit", qzeros=torch.arange(32, dtype=INT).reshape(2, 16)),
    "five bits": packed("pack-quantized", weight_shape=torch.tensor([64, 48])),
    "groups of 24": packed("pack-quantized", weight_scale=torch.ones(64, 3)),
    "no matrix": packed("gptq", scales=torch.ones(0, 64)),
    "int8 with zero points": packed("int8-channel", weight_zero_point=torch.ones(64, 1, dtype=torch.int8)),
}


def refusal(folder: Path) -> str:
    with pytest.raises(LoadError) as raised:
        open_model(str(folder))
    return str(raised.value)


def check(said: str) -> None:
    assert "\n" not in said
    assert INSTEAD.search(said), said


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_configurations(tmp_path: Path, build: Any, changes: dict[str, Any]) -> None:
    check(refusal(build.llama_folder(tmp_path, **changes)))


@pytest.mark.parametrize("which", TENSORS)
def test_tensors(tmp_path: Path, build: Any, which: str) -> None:
    build.llama_folder(tmp_path)
    tensors = {name: torch.from_numpy(array) for name, array in build.llama_tensors().items()} | TENSORS[which]
    save_file(
        {name: each.contiguous() for name, each in tensors.items() if each is not None}, tmp_path / "model.safetensors"
    )
    check(refusal(tmp_path))


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _renamed(*names: str) -> Callable[[Path], None]:
    def rename(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_bytes(content)

    return rename


def _indexed(weight_map: object, *names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        _renamed(*names)(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


FILES: dict[str, Callable[[Path], None]] = {
    "truncated": _cut,
    "too short": lambda folder: (folder / "model.safetensors").write_bytes(b"PK") and None,
    "of another format": lambda folder: (folder / "model.safetensors").write_bytes(b"PK" * 50) and None,
    "without weights": _renamed("pytorch_model.bin"),
    "without an index": _renamed("a.safetensors", "b.safetensors"),
    "no index": _indexed(None),
    "index of a path": _indexed({"model.norm.weight": "../x"}),
    "without a shard": _indexed({"model.norm.weight": "x.safetensors"}),
    "shard without its tensor": _indexed({"lm_head.weight": "x.safetensors"}, "x.safetensors"),
    "tensor in two shards": _indexed(
        {"model.norm.weight": "x.safetensors", "model.embed_tokens.weight": "y.safetensors"},
        *("x.safetensors", "y.safetensors"),
    ),
}


@pytest.mark.parametrize("which", FILES)
def test_files(tmp_path: Path, build: Any, which: str) -> None:
    FILES[which](build.llama_folder(tmp_path))
    check(refusal(tmp_path))


@pytest.mark.parametrize(
    "tokenizer", [None, {"decoder": 3}, {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}], ids=str
)
def test_tokenizers(tmp_path: Path, build: Any, tokenizer: dict[str, Any] | None) -> None:
    build.llama_folder(tmp_path)
    if tokenizer is not None:
        model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
        whole = {"version": "1.0", "added_tokens": [], "model": model} | tokenizer
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(LoadError) as raised:
        _ = open_model(str(tmp_path)).tokenizer
    check(str(raised.value))


# What our own code asks for although it is not there, and what `open_model` asked before.
OTHERS = ("has no tensor", "is not a folder")
ENDS = re.compile(r"OTHER_TYPES|OTHER_MODEL|AGAIN|PUBLISHED_CONFIG|: (take|fetch|merge) ")
WITH_AN_END = ("_unsupported", "_inconsistent", "unreadable", "_what_is_wrong")


def raised_in_folders() -> Iterator[tuple[str, str]]:
    folder = Path(slipstream.__file__).parent / "load" / "hf"
    for path in sorted(folder.rglob("*.py")):
        if path.stem in ("hub", "fetch_bars"):  # of downloads
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                yield f"{path.name}:{node.lineno}", ast.unparse(node.exc)


def test_no_sentence_was_forgotten() -> None:
    """Also those that no case above meets."""
    found = dict(raised_in_folders())
    assert len(found) > 40
    named = (*OTHERS, *WITH_AN_END)
    assert not [
        f"{at}: {text}" for at, text in found.items() if not ENDS.search(text) and not any(n in text for n in named)
    ]
