"""Tiny checkpoints, written on the fly, for the tests of slipstream/load."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from slipstream.load.default_model import default_model_path

BYTES_PER_ELEMENT = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}
Tensors = dict[str, tuple[str, np.ndarray]]


def safetensors_bytes(tensors: Tensors, pad: int = 0, **extra: Any) -> bytes:
    """`pad` spaces after the header shift the data, also to odd offsets."""
    header: dict[str, Any] = dict(extra)
    at = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode() + b" " * pad
    return struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for _, array in tensors.values())


def llama_tensors(
    layers: int = 1, hidden: int = 64, inner: int = 96, vocab: int = 40, kv: int = 32
) -> dict[str, np.ndarray]:
    """A llama model under its Hugging Face names: head_dim 16, 4 heads, 2 key-value heads."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def write_llama_folder(folder: Path, extra: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | config))
    tensors = llama_tensors() | (extra or {})
    packed = safetensors_bytes({name: ("F32", array) for name, array in tensors.items()})
    (folder / "model.safetensors").write_bytes(packed)
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    part, _, kind = name.removeprefix("model.layers.").rpartition(".")
    if part in GGUF_NAMES:
        return f"{GGUF_NAMES[part]}.{kind}"
    layer, _, rest = part.partition(".")
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """What the GGUF converter does to q and k of llama models: row (half, pair) of a head goes to (pair, half)."""
    out = np.empty_like(array)
    head_dim = len(array) // heads
    for row in range(len(array)):
        head, at = divmod(row, head_dim)
        half, pair = divmod(at, head_dim // 2)
        out[head * head_dim + pair * 2 + half] = array[row]
    return out


VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<|end|>", "h", "e", "l", "o", "Ġ", "he", "ll", "<tool>", "Ġhe"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 1, 4, 1],
    "tokenizer.ggml.merges": ["h e", "l l", "Ġ he"],
    "tokenizer.ggml.eos_token_id": 0,
}


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    arch: str = "llama",
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    raw: dict[str, tuple[np.ndarray, str]] | None = None,
) -> Path:
    """Matrices are stored as `kind`; `raw` adds byte arrays under their GGUF names. None in `metadata` leaves out."""
    writer = gguf.GGUFWriter(path, arch)
    values: dict[str, Any] = {
        f"{arch}.block_count": 1,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": 64,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        **VOCABULARY,
        **(metadata or {}),
    }
    for key, value in values.items():
        _add_value(writer, key, value)
    for name, array in (tensors if tensors is not None else llama_tensors()).items():
        _add_tensor(writer, gguf_name(name), array, kind)
    for name, (data, dtype) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        adders[type(value)](key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    if array.ndim == 1 or kind == "F32":
        writer.add_tensor(name, array)
        return
    dtype = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(array, dtype), raw_dtype=dtype)


@pytest.fixture(scope="session")
def build() -> Any:
    """The builders above, for tests that import nothing from here."""

    class Builders:
        safetensors_bytes: Callable[..., bytes] = staticmethod(safetensors_bytes)
        llama_tensors = staticmethod(llama_tensors)
        llama_folder = staticmethod(write_llama_folder)
        gguf = staticmethod(write_gguf)
        interleave = staticmethod(interleave)
        config = LLAMA_CONFIG

    return Builders


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    return default_model_path()


@pytest.fixture(scope="session")
def reference() -> list[dict[str, Any]]:
    path = Path(__file__).parent.parent / "data" / "reference.json"
    return json.loads(path.read_text())
