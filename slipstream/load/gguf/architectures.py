"""The GGUF architectures we read: for each, canonical tensor name -> (name in the file, transform).

A transform turns a tensor as llama.cpp's converter stored it into the tensor as Hugging Face has it. It works on whole
rows, so it may be given raw blocks. `{i}` in a name is the number of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from slipstream.load.spec import Architecture, ModelSpec

Transform = Callable[[np.ndarray, ModelSpec], np.ndarray]


def as_stored(data: np.ndarray, spec: ModelSpec) -> np.ndarray:
    return data


def half_split_queries(data: np.ndarray, spec: ModelSpec) -> np.ndarray:
    return half_split_rows(data, spec.num_heads)


def half_split_keys(data: np.ndarray, spec: ModelSpec) -> np.ndarray:
    return half_split_rows(data, spec.num_kv_heads)


def half_split_rows(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows (pair, half) of each head, as llama.cpp's rotary kernel reads them, -> rows (half, pair)."""
    # [heads, head_dim / 2, 2, columns or bytes of a row]
    pairs = data.reshape(heads, -1, 2, *data.shape[1:])
    return pairs.swapaxes(1, 2).reshape(data.shape)


@dataclass(frozen=True, slots=True)
class FileTensor:
    name: str  # in the file
    transform: Transform = as_stored


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    name: Architecture
    tensors: Mapping[str, FileTensor]  # by canonical name

    @property
    def qk_norm(self) -> bool:
        return "model.layers.{i}.self_attn.q_norm.weight" in self.tensors

    def find(self, names: Iterable[str]) -> tuple[dict[str, FileTensor], list[str]]:
        """The tensors of a file by canonical name, and the names that this architecture does not have."""
        canonical_of = {tensor.name: canonical for canonical, tensor in self.tensors.items()}
        found: dict[str, FileTensor] = {}
        unknown: list[str] = []
        for name in names:
            pattern, layer = _pattern(name)
            if pattern in canonical_of:
                canonical = canonical_of[pattern]
                found[canonical.format(i=layer)] = FileTensor(name, self.tensors[canonical].transform)
            else:
                unknown.append(name)
        return found, unknown


def _pattern(name: str) -> tuple[str, str]:
    """The name with `{i}` for the number of its layer, and that number."""
    match = re.match(r"blk\.(\d+)\.", name)
    return (f"blk.{{i}}.{name[match.end() :]}", match[1]) if match else (name, "")


def _layer(names: Mapping[str, str], kind: str) -> dict[str, FileTensor]:
    """Weights or biases of every layer, stored as they are."""
    return {
        f"model.layers.{{i}}.{canonical}.{kind}": FileTensor(f"blk.{{i}}.{in_file}.{kind}")
        for canonical, in_file in names.items()
    }


_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_OTHERS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_DENSE: dict[str, FileTensor] = {
    "model.embed_tokens.weight": FileTensor("token_embd.weight"),
    "model.norm.weight": FileTensor("output_norm.weight"),
    "lm_head.weight": FileTensor("output.weight"),
    **_layer(_ATTENTION | _OTHERS, "weight"),
    **_layer(_ATTENTION, "bias"),
}
_INTERLEAVED = {
    f"model.layers.{{i}}.self_attn.{part}_proj.{kind}": FileTensor(f"blk.{{i}}.attn_{part}.{kind}", transform)
    for part, transform in (("q", half_split_queries), ("k", half_split_keys))
    for kind in ("weight", "bias")
}
_QK_NORMS = _layer({"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}, "weight")

# By `general.architecture`.
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", _DENSE | _INTERLEAVED),
    "qwen2": GgufArchitecture("qwen2", _DENSE),
    "qwen3": GgufArchitecture("qwen3", _DENSE | _QK_NORMS),
}
