"""The GGUF architectures we read: which tensor of a file is which canonical one, and what was changed in it.

`{i}` in a name is the number of a layer. The layer after the last one of the target model is the MTP head's.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from slipstream.load.gguf.changes import (
    ALPHA_ROWS,
    AS_STORED,
    BETA_ROWS,
    CONV,
    HALF_SPLIT_KEYS,
    HALF_SPLIT_QUERIES,
    LESS_ONE,
    LOG_OF_NEGATIVE,
    ONE_ROW,
    QKV_ROWS,
    Z_ROWS,
    Change,
)
from slipstream.load.spec import Architecture

LAYER = "model.layers.{i}."
HEAD_LAYER = "mtp.layers.0."
HEAD_NORM = "mtp.norm.weight"


@dataclass(frozen=True, slots=True)
class FileTensor:
    name: str  # in the file
    change: Change = AS_STORED
    scale: str | None = None  # the tensor that multiplies it


Table = dict[str, list[FileTensor]]  # by canonical name: the names that it may have in a file


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    name: Architecture
    tensors: Table
    hybrid: bool = False
    tiled: bool = False  # value heads in GGUF's own order
    # Known and not used: in files of heads that bring an embedding and an output matrix of their own.
    ignored: tuple[str, ...] = ()
    _by_file_name: dict[str, list[tuple[str, Change]]] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[str, list[tuple[str, Change]]] = {}
        for canonical, choices in self.tensors.items():
            for choice in choices:
                found.setdefault(choice.name, []).append((canonical, choice.change))
        object.__setattr__(self, "_by_file_name", found)

    @property
    def qk_norm(self) -> bool:
        return f"{LAYER}self_attn.q_norm.weight" in self.tensors

    def find(self, names: Iterable[str], num_layers: int) -> tuple[dict[str, FileTensor], list[str]]:
        """The tensors of a file by canonical name, and the names that this architecture does not have. `num_layers`: of
        the target model."""
        present = dict.fromkeys(names)  # in the file's order
        found: dict[str, FileTensor] = {}
        unknown: list[str] = []
        for name in present:
            pattern, layer = _pattern(name)
            if _belongs_to_matrix(name, present) or (self.hybrid and _is_left_out(name, layer, num_layers)):
                continue
            known = self._by_file_name.get(pattern, [])
            if not known and pattern not in self.ignored:
                unknown.append(name)
            scale = name.removesuffix(".weight") + ".scale"
            for canonical, change in known:
                place = _place(canonical, layer, num_layers if self.hybrid else None)
                found[place] = FileTensor(name, change, scale if scale in present else None)
        if f"{HEAD_LAYER}input_layernorm.weight" in found and "output_norm.weight" in present:
            found.setdefault(HEAD_NORM, FileTensor("output_norm.weight", LESS_ONE))
        return found, sorted(unknown)


def _pattern(name: str) -> tuple[str, str]:
    """The name with `{i}` for the number of its layer, and that number."""
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return (f"blk.{{i}}.{name[match.end() :]}", match[1]) if match else (name, "")


def _belongs_to_matrix(name: str, present: Container[str]) -> bool:
    """The scale of a whole matrix, or one of its inputs, which we do not round."""
    stem, _, kind = name.rpartition(".")
    return kind in ("scale", "input_scale") and f"{stem}.weight" in present


def _is_left_out(name: str, layer: str, num_layers: int) -> bool:
    """Layers of a head beyond its first, and the vision tower that some files have."""
    return name.startswith(("v.", "mm.")) or (layer != "" and int(layer) > num_layers)


def _place(canonical: str, layer: str, num_layers: int | None) -> str:
    if num_layers is not None and layer and int(layer) == num_layers:
        return canonical.replace(LAYER, HEAD_LAYER)
    return canonical.format(i=layer)


def _layer(names: Mapping[str, str], kind: str = "weight", change: Change = AS_STORED) -> Table:
    """Weights or biases of every layer."""
    return {
        f"{LAYER}{canonical}.{kind}": [FileTensor(f"blk.{{i}}.{in_file}.{kind}", change)]
        for canonical, in_file in names.items()
    }


_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_TOP: Table = {
    "model.embed_tokens.weight": [FileTensor("token_embd.weight")],
    "lm_head.weight": [FileTensor("output.weight")],
}
_DENSE: Table = {
    **_TOP,
    "model.norm.weight": [FileTensor("output_norm.weight")],
    **_layer(_ATTENTION | _MLP | {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}),
    **_layer(_ATTENTION, "bias"),
}
_INTERLEAVED: Table = {
    f"{LAYER}self_attn.{part}_proj.{kind}": [FileTensor(f"blk.{{i}}.attn_{part}.{kind}", change)]
    for part, change in (("q", HALF_SPLIT_QUERIES), ("k", HALF_SPLIT_KEYS))
    for kind in ("weight", "bias")
}

_HYBRID_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", **_QK_NORMS}
_HEAD: Table = {
    "mtp.fc.weight": [FileTensor("blk.{i}.nextn.eh_proj.weight")],
    "mtp.pre_fc_norm_embedding.weight": [FileTensor("blk.{i}.nextn.enorm.weight", LESS_ONE)],
    "mtp.pre_fc_norm_hidden.weight": [FileTensor("blk.{i}.nextn.hnorm.weight", LESS_ONE)],
    HEAD_NORM: [FileTensor("blk.{i}.nextn.shared_head_norm.weight", LESS_ONE)],
}
_IGNORED = ("blk.{i}.nextn.embed_tokens.weight", "blk.{i}.nextn.shared_head_head.weight")
_GDN = f"{LAYER}linear_attn."
_HYBRID: Table = {
    **_TOP,
    "model.norm.weight": [FileTensor("output_norm.weight", LESS_ONE)],
    **_layer(_HYBRID_NORMS, change=LESS_ONE),
    **_layer(_ATTENTION),
    **_HEAD,
    f"{_GDN}in_proj_qkv.weight": [FileTensor("blk.{i}.attn_qkv.weight")],
    f"{_GDN}in_proj_z.weight": [FileTensor("blk.{i}.attn_gate.weight")],
    f"{_GDN}in_proj_b.weight": [FileTensor("blk.{i}.ssm_beta.weight")],
    f"{_GDN}in_proj_a.weight": [FileTensor("blk.{i}.ssm_alpha.weight")],
    f"{_GDN}conv1d.weight": [FileTensor("blk.{i}.ssm_conv1d.weight", CONV)],
    f"{_GDN}A_log": [FileTensor("blk.{i}.ssm_a", LOG_OF_NEGATIVE)],
    f"{_GDN}dt_bias": [FileTensor("blk.{i}.ssm_dt.bias"), FileTensor("blk.{i}.ssm_dt")],
    f"{_GDN}norm.weight": [FileTensor("blk.{i}.ssm_norm.weight")],
    f"{_GDN}out_proj.weight": [FileTensor("blk.{i}.ssm_out.weight")],
}
_EXPERTS: Table = {
    **_layer({"mlp.gate": "ffn_gate_inp"}),
    **_layer({"mlp.shared_expert_gate": "ffn_gate_inp_shexp"}, change=ONE_ROW),
    **_layer({canonical.replace("mlp", "mlp.shared_expert"): f"{name}_shexp" for canonical, name in _MLP.items()}),
    f"{LAYER}mlp.experts.gate_proj": [FileTensor("blk.{i}.ffn_gate_exps.weight")],
    f"{LAYER}mlp.experts.up_proj": [FileTensor("blk.{i}.ffn_up_exps.weight")],
    f"{LAYER}mlp.experts.down_proj": [FileTensor("blk.{i}.ffn_down_exps.weight")],
    f"{LAYER}mlp.experts.gate_up_proj": [FileTensor("blk.{i}.ffn_gate_up_exps.weight")],
}
# Qwen3-Next keeps its heads' order. b and a are one matrix; q, k, v and z are one in early files.
_NEXT: Table = {
    f"{_GDN}in_proj_b.weight": [FileTensor("blk.{i}.ssm_ba.weight", BETA_ROWS)],
    f"{_GDN}in_proj_a.weight": [FileTensor("blk.{i}.ssm_ba.weight", ALPHA_ROWS)],
    f"{_GDN}in_proj_qkv.weight": [
        FileTensor("blk.{i}.attn_qkv.weight"),
        FileTensor("blk.{i}.ssm_in.weight", QKV_ROWS),
    ],
    f"{_GDN}in_proj_z.weight": [FileTensor("blk.{i}.attn_gate.weight"), FileTensor("blk.{i}.ssm_in.weight", Z_ROWS)],
}

# By `general.architecture`.
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", _DENSE | _INTERLEAVED),
    "qwen2": GgufArchitecture("qwen2", _DENSE),
    "qwen3": GgufArchitecture("qwen3", _DENSE | _layer(_QK_NORMS)),
    "qwen35": GgufArchitecture("qwen3_5", _HYBRID | _layer(_MLP), hybrid=True, tiled=True, ignored=_IGNORED),
    "qwen35moe": GgufArchitecture("qwen3_5_moe", _HYBRID | _EXPERTS, hybrid=True, tiled=True, ignored=_IGNORED),
    "qwen3next": GgufArchitecture("qwen3_5_moe", _HYBRID | _EXPERTS | _NEXT, hybrid=True, ignored=_IGNORED),
}
