"""Tiny models of `transformers` as GGUF files, as llama.cpp's converter would write them; knows nothing of our reader.

Each weight of the model goes to one place of the file, so what the file holds can be put back: `Twin.state` are the
very numbers of the file under the model's own names. Types that the gguf package cannot quantise to are random blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor
from transformers import PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

# Columns that blocks of 256 divide.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
WIDE_EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
Kind = Callable[[str], str]  # the type of a matrix, by its name in the file
Parts = Iterator[tuple[str, Tensor]]

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
HEAD = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
PLAIN = ("ssm_conv1d", "ffn_gate_inp", "ffn_gate_inp_shexp")  # float32 in every file


@dataclass(frozen=True)
class Twin:
    path: Path
    state: dict[str, Tensor]  # float32, by the model's own names, the head's included


@dataclass(frozen=True)
class Options:
    kind: Kind = lambda name: "F32"
    head: bool = True  # in the same file
    trunk: bool = True  # False: the head alone, with embedding and output matrix
    fused: bool = False  # gate and up of the experts in one stack
    legacy: bool = False  # Qwen3-Next's q, k, v, z as they were first written
    gate_rank: int = 1  # of the shared expert's gate
    time_step: str = "ssm_dt.bias"
    parts: int = 1
    metadata: tuple[tuple[str, Any], ...] = ()  # None: left out
    more: tuple[str, ...] = ()  # names of other tensors


def wide(moe: bool = False, **more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    made = tiny.moe(**{**WIDE, **WIDE_EXPERTS, **more}) if moe else tiny.hybrid(**{**WIDE, **more})
    return tiny.randomise(made)


def qwen3_next(**more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {**tiny._HYBRID, **WIDE, **WIDE_EXPERTS, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []}
    sizes |= more
    return tiny.randomise(Qwen3NextForCausalLM(Qwen3NextConfig(**sizes)))


def head_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return tiny.head_tensors(model)


def write(model: PreTrainedModel, path: Path, options: Options | None = None) -> Twin:
    options = options or Options()
    state = {name: weight.detach() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    if options.head:
        state |= head_of(model)
    layout = _Layout(model.config, options)
    stored: dict[str, tuple[np.ndarray, str]] = {}
    restored: dict[str, Tensor] = {}
    for name, weight in state.items():
        into, back = _values(name)
        found = torch.empty(weight.numel())
        for in_file, index in layout.parts(name, torch.arange(weight.numel()).view(weight.shape)):
            array = into(weight).flatten()[index].contiguous().numpy()
            kind = "F32" if array.ndim == 1 or in_file.split(".")[-2] in PLAIN else options.kind(in_file)
            data, floats = store(array, kind)
            stored[in_file] = (data, kind)
            if kind == "NVFP4":
                stored[in_file.removesuffix("weight") + "scale"] = (scales_of(array), "F32")
                floats = floats * scales_of(array).reshape(-1, *[1] * (array.ndim - 1))
            found[index.flatten()] = torch.from_numpy(floats).flatten()
        restored[name] = back(found).view(weight.shape)
    stored |= {name: (np.zeros(32, np.float32), "F32") for name in options.more}
    _write_file(layout, path, {name: each for name, each in stored.items() if layout.wanted(name)})
    return Twin(path, restored)


def load(model: PreTrainedModel, twin: Twin) -> PreTrainedModel:
    """The model with the file's numbers."""
    target = {name: weight for name, weight in twin.state.items() if not name.startswith("mtp.")}
    if model.config.tie_word_embeddings:
        target["lm_head.weight"] = target["model.embed_tokens.weight"]
    model.load_state_dict(target)
    return model


def _values(name: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    if name.endswith("A_log"):
        return (lambda w: -w.exp()), (lambda w: (-w).log())
    if "norm" in name and not name.endswith("linear_attn.norm.weight"):
        return (lambda w: w + 1), (lambda w: w - 1)
    return (lambda w: w), (lambda w: w)


class _Layout:
    def __init__(self, config: Any, options: Options) -> None:
        self.config, self.options = config, options
        self.arch = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}.get(config.model_type, "qwen3next")
        self.num_layers = config.num_hidden_layers

    def wanted(self, name: str) -> bool:
        return self.options.trunk or not name.startswith("blk.") or name.startswith(f"blk.{self.num_layers}.")

    def parts(self, name: str, index: Tensor) -> Parts:
        """Where the weights of a tensor go: names in the file, and numbers of weights in the file's order."""
        if name == "model.norm.weight":
            yield "output_norm.weight", index
        elif name in TOP:
            yield TOP[name], index
        elif name in HEAD:
            yield f"blk.{self.num_layers}.{HEAD[name]}", index
        else:
            head = name.startswith("mtp.")
            _, _, layer, rest = (
                name.split(".", 3) if not head else ("", "", str(self.num_layers), name.split(".", 3)[3])
            )
            yield from ((f"blk.{layer}.{part}", piece) for part, piece in self._layer(rest, index))

    def _layer(self, name: str, index: Tensor) -> Parts:
        stem, _, kind = name.rpartition(".")
        special = {"A_log": "ssm_a", "dt_bias": self.options.time_step}
        if name.startswith("mlp.experts."):
            yield from self._experts(name, index)
        elif stem == "linear_attn.in_proj_qkvz":
            yield from self._joined_entry(index)
        elif kind in special:
            yield special[kind], self._tiled(index, 1)
        elif name == "linear_attn.conv1d.weight":
            yield "ssm_conv1d.weight", self._after_keys(index[:, 0])
        elif name == "mlp.shared_expert_gate.weight":
            yield "ffn_gate_inp_shexp.weight", index[0] if self.options.gate_rank == 1 else index
        else:
            yield f"{NAMES[stem]}.{kind}", self._ordered(stem, index)

    def _ordered(self, stem: str, index: Tensor) -> Tensor:
        width = self.config.linear_value_head_dim
        if stem == "linear_attn.in_proj_qkv":
            return self._after_keys(index)
        if stem == "linear_attn.in_proj_z":
            return self._tiled(index, width)
        if stem in ("linear_attn.in_proj_a", "linear_attn.in_proj_b"):
            return self._tiled(index, 1)
        return self._tiled(index.T, width).T if stem == "linear_attn.out_proj" else index

    def _after_keys(self, index: Tensor) -> Tensor:
        keys = 2 * self.config.linear_num_key_heads * self.config.linear_key_head_dim
        return torch.cat([index[:keys], self._tiled(index[keys:], self.config.linear_value_head_dim)])

    def _tiled(self, index: Tensor, width: int) -> Tensor:
        """Value head t of the file is head (t % keys) * ratio + t // keys of the model; not in Qwen3-Next."""
        keys, values = self.config.linear_num_key_heads, self.config.linear_num_value_heads
        if self.arch == "qwen3next":
            return index
        heads = [(t % keys) * (values // keys) + t // keys for t in range(values)]
        return torch.cat([index[head * width : (head + 1) * width] for head in heads])

    def _experts(self, name: str, index: Tensor) -> Parts:
        if name.endswith("down_proj"):
            yield "ffn_down_exps.weight", index
        elif self.options.fused:
            yield "ffn_gate_up_exps.weight", index
        else:
            yield "ffn_gate_exps.weight", index.chunk(2, 1)[0]
            yield "ffn_up_exps.weight", index.chunk(2, 1)[1]

    def _joined_entry(self, index: Tensor) -> Parts:
        """Each key head has rows of q, k, v and z."""
        if self.options.legacy:
            yield "ssm_in.weight", index
            return
        config = self.config
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        wide = values // keys * config.linear_value_head_dim
        sizes = [config.linear_key_head_dim, config.linear_key_head_dim, wide, wide]
        q, k, v, z = (each.flatten(0, 1) for each in index.view(keys, -1, index.shape[1]).split(sizes, 1))
        yield "attn_qkv.weight", torch.cat([q, k, v])
        yield "attn_gate.weight", z

    def metadata(self) -> dict[str, Any]:
        config, moe = self.config, "moe" in self.config.model_type or self.arch == "qwen3next"
        rotary = int(config.head_dim * 0.25)
        values: dict[str, Any] = {
            "block_count": self.num_layers + (1 if self.options.head else 0),
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": None if moe else config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": float(config.rope_parameters["rope_theta"]),
            "rope.dimension_count": rotary,
            "rope.dimension_sections": _sections(rotary // 2) if self.arch != "qwen3next" else None,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "full_attention_interval": config.layer_types.index("full_attention") + 1,
            "nextn_predict_layers": 1 if self.options.head else None,
            "expert_count": config.num_experts if moe else None,
            "expert_used_count": config.num_experts_per_tok if moe else None,
            "expert_feed_forward_length": config.moe_intermediate_size if moe else None,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size if moe else None,
        }
        changed = {f"{self.arch}.{key}": value for key, value in values.items()} | dict(self.options.metadata)
        return {key: value for key, value in changed.items() if value is not None}


def _sections(num_angles: int) -> list[int]:
    """Three axes that take turns."""
    return [*(-(-(num_angles - axis) // 3) for axis in range(3)), 0]


def store(array: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The array as it lies in the file, and the numbers it then holds."""
    if kind == "F32":
        return array, array
    dtype = GGMLQuantizationType[kind]
    try:
        data = quantize(array, dtype)
    except NotImplementedError:
        data = random_blocks(kind, array.shape, float(array.std()))
    return data, dequantize(data, dtype).reshape(array.shape)


def scales_of(array: np.ndarray) -> np.ndarray:
    """NVFP4: a number beside each matrix of a stack, or beside the one."""
    count = array.shape[0] if array.ndim == 3 else 1
    return np.linspace(0.5, 1.5, count + 1, dtype=np.float32)[1:]


# Where the half-precision scale of a block lies, and that of its minimums.
SCALE_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
MIDDLE = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}  # of the codes: minimums that move weights to both sides of 0


def random_blocks(kind: str, shape: tuple[int, ...], spread: float) -> np.ndarray:
    """Blocks whose weights have about that standard deviation. [*rows, bytes of a row]"""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(zlib.crc32(f"{kind} {shape}".encode()))
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    set_scales(data, kind, 1.0)
    flat = data.reshape(*shape[:-1], -1)
    found = float(dequantize(flat, GGMLQuantizationType[kind]).std())
    set_scales(data, kind, spread / found)
    return flat


def set_scales(blocks: np.ndarray, kind: str, scale: float) -> None:
    if kind == "NVFP4":  # a byte for each 16 columns: 2 to the power of -5
        blocks[..., :4] = 2 << 3 if scale < 1.0 else 7 << 3
        return
    if kind == "IQ1_M":  # in the highest bits of four words
        bits = int(np.float16(scale).view(np.uint16))
        for word in range(4):
            high = blocks[..., 49 + 2 * word]
            high[...] = high & 15 | (bits >> 4 * word & 15) << 4
        return
    for at, size in zip(SCALE_AT.get(kind, (0,)), (scale, scale * MIDDLE.get(kind, 0.0)), strict=False):
        blocks[..., at : at + 2] = np.array([size], np.float16).view(np.uint8)


def _write_file(layout: _Layout, path: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> None:
    count = layout.options.parts
    names = list(tensors)
    for number in range(count):
        name = f"{path.stem}-{number + 1:05}-of-{count:05}.gguf" if count > 1 else path.name
        writer = GGUFWriter(path.with_name(name), layout.arch)
        if number == 0:
            add_values(writer, _vocabulary(layout.config.vocab_size) | layout.metadata())
        if count > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", count)
            writer.add_int32("split.tensors.count", len(names))
        for each in names[number::count]:
            data, kind = tensors[each]
            writer.add_tensor(each, data, raw_dtype=GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def add_values(writer: GGUFWriter, values: dict[str, Any]) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in values.items():
        (writer.add_array if isinstance(value, list) else adders[type(value)])(key, value)


def _vocabulary(size: int) -> dict[str, Any]:
    """A letter a token; the last one ends a text."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [*map(chr, range(33, 126)), "!!", *(f"[{token}]" for token in range(94, size))],
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.ggml.add_bos_token": False,
    }
