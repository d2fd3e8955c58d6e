"""GGUF files that we would compute wrongly: each is refused in one sentence that ends with what to take instead."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
from tiny_gguf import Options

from slipstream.errors import UnknownModel, printable
from slipstream.load import open_model
from slipstream.load.gguf.file import open_gguf

FREQS = np.linspace(9, 1, 8, dtype=np.float32)
YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
LLAMA: dict[str, tuple[dict[str, Any], str]] = {
    "experts": (
        {"llama.expert_count": 8},
        "mixture of experts of architecture llama, .* take one of qwen35moe or qwen3",
    ),
    "linear scaling": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        "scaling with type 'linear' .* take a file with plain YaRN, or with none",
    ),
    "a factor alone": ({"llama.rope.scaling.factor": 2.0}, "scaling with type 'linear'"),
    "an early factor": ({"llama.rope.scale_linear": 2.0}, "scaling with type 'linear'"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, "scaling with type 'longrope'"),
    "yarn with a weight": (YARN | {"llama.rope.scaling.yarn_log_multiplier": 0.1}, "with rope.scaling.yarn_log_mult"),
    "sliding windows": ({"llama.attention.sliding_window": 64}, "sliding-window .* take a model whose layers see"),
    "some rotary dimensions": ({"llama.rope.dimension_count": 8}, "8 of 16 .* take a model that rotates all"),
    "widths": (
        {"llama.attention.key_length": 16, "llama.attention.value_length": 8},
        "take a model whose keys and values",
    ),
    "layers": ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer, .* take a model whose layers"),
    "pre-tokenizer": (
        {"tokenizer.ggml.pre": "viking"},
        "'viking' is not one of .*: take the model's Hugging Face folder",
    ),
    "tokenizer": (
        {"tokenizer.ggml.model": "rwkv"},
        "'rwkv' is not supported, .*: take the model's Hugging Face folder",
    ),
}
RAW: dict[str, tuple[dict[str, tuple[np.ndarray, str]], str]] = {
    "sinks": ({"blk.0.attn_sinks.weight": (np.ones(64, np.float32), "F32")}, "'blk.0.attn_sinks.weight', which is not"),
    "norms": ({"blk.0.attn_q_norm.weight": (np.ones(16, np.float32), "F32")}, "not part of llama models: take a model"),
    "biases": ({"blk.0.ffn_up.bias": (np.ones(96, np.float32), "F32")}, "'blk.0.ffn_up.bias', which is not part"),
    "divisors": ({"rope_freqs.weight": (FREQS, "F32")}, "not Llama 3.1's rescaling, .*: take a model with that"),
}
Write = Callable[[Path, Any], None]  # a file, with the builders


def written() -> dict[str, tuple[Write, str]]:
    made: dict[str, tuple[Write, str]] = {
        name: (lambda path, build, values=values: build.gguf(path, metadata=values), says)
        for name, (values, says) in LLAMA.items()
    }
    made |= {name: (lambda path, build, raw=raw: build.gguf(path, raw=raw), says) for name, (raw, says) in RAW.items()}
    made["architecture"] = (
        lambda path, build: build.gguf(path, arch="gemma"),
        "architecture 'gemma' is not supported: take a model of one of llama, qwen2, qwen3, qwen35",
    )
    made["divisors and yarn"] = (
        lambda path, build: build.gguf(path, metadata=YARN, raw={"rope_freqs.weight": (FREQS, "F32")}),
        "by rope_freqs.weight and by YaRN: take a file with one of them",
    )
    made["version"] = (
        lambda path, build: path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100)),
        "version 1 .*: take a newer file of the model",
    )
    made["router"] = (write_router, "routers of kind 2 are not supported: take a model whose router is a softmax")
    return made


def write_router(path: Path, build: Any) -> None:
    model = tiny_gguf.wide(moe=True, num_experts=4, num_hidden_layers=2, full_attention_interval=2)
    tiny_gguf.write(model, path, Options(metadata=(("qwen35moe.expert_gating_func", 2),)))


@pytest.mark.parametrize("name", written())
def test_what_we_would_compute_wrongly(tmp_path: Path, build: Any, name: str) -> None:
    write, says = written()[name]
    path = tmp_path / "x.gguf"
    write(path, build)
    with pytest.raises(UnknownModel, match=says) as refused:
        _ = open_model(str(path)).tokenizer
    said = str(refused.value)
    assert str(path) in said
    assert ": take " in said or " take one of " in said
    assert said.endswith(".")
    assert len(printable(said).splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "shown"),
    [(26, "26 (I32)"), (137, "137 (IQ2_K of ik_llama.cpp)"), (152, "152 (IQ5_KS of ik_llama.cpp)"), (200, "200")],
)
def test_a_type_that_llama_cpp_does_not_write(build: Any, tmp_path: Path, number: int, shown: str) -> None:
    """By its number, and by its name where a well-known fork has it."""
    path = build.gguf(tmp_path / "x.gguf", raw={"x": (np.ones(4, np.int32), "I32")})
    info = struct.pack("<Q", 1) + b"x" + struct.pack("<IQ", 1, 4)
    before, after = (info + struct.pack("<I", kind) for kind in (26, number))
    content = path.read_bytes()
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, after))
    with pytest.raises(UnknownModel) as refused:
        open_gguf(path)
    assert str(refused.value) == (
        f"{path}: tensor 'x' is of type {shown}, which llama.cpp's own quantised files do not have: take a file in one "
        "of its types, such as Q4_K_M, UD-Q4_K_XL, IQ4_XS or Q8_0."
    )
