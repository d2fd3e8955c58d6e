"""Tiny checkpoints in the layout of published FP8 ones: blocks of 128 x 128, a tensor of scales next to each matrix.

Kept in BF16: embedding, output, norms, routers, the small projections of Gated DeltaNet, the head's fc. Experts are
stored one by one, or as stacks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

BLOCK = 128
CONVERTED = (
    *("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"),
    *("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"),
    *("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    *("experts.gate_up_proj", "experts.down_proj"),
)
QUANTISED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}

# Whole blocks, several of them: transformers can read these.
_WHOLE = {"hidden_size": 256, "intermediate_size": 384, "linear_key_head_dim": 32, "linear_value_head_dim": 64}
_EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
# Incomplete blocks below and on the right.
_ODD = {"hidden_size": 160, "intermediate_size": 328, "linear_key_head_dim": 24, "linear_value_head_dim": 40}
_ODD_EXPERTS = {"moe_intermediate_size": 136, "shared_expert_intermediate_size": 72}
_QWEN3 = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_QWEN3 |= {"vocab_size": tiny.VOCAB, "hidden_size": 256, "intermediate_size": 384, "eos_token_id": None}

WHOLE = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_QWEN3)),
    "qwen3_5": lambda: tiny.hybrid(**_WHOLE),
    "qwen3_5_moe": lambda: tiny.moe(**_WHOLE, **_EXPERTS),
}
ODD = {
    "qwen3_5-odd": lambda: tiny.hybrid(**_ODD),
    "qwen3_5_moe-odd": lambda: tiny.moe(**_ODD, **_ODD_EXPERTS),
}
MODELS = WHOLE | ODD


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return tiny.randomise(MODELS[kind]())


def save(
    model: PreTrainedModel, folder: Path, *, stacked: bool = False, scales: torch.dtype = torch.bfloat16, **config: Any
) -> Path:
    """TargetModel and head. ``config``: changes to config.json."""
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTISED} | config))
    tensors = model.state_dict() | tiny.head_tensors(model)
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    stored: dict[str, Tensor] = {}
    for name, weight in (tensors if stacked else tiny.experts_apart(tensors)).items():
        stored |= _stored(name, weight, scales)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def floats(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder in float32, multiplied out by PyTorch alone."""
    stored = load_file(folder / "model.safetensors")
    return {
        name: _multiplied(weight.float(), stored[f"{name}_scale_inv"]) if is_fp8(weight) else weight.float()
        for name, weight in stored.items()
        if not name.endswith("_scale_inv")
    }


def is_fp8(weight: Tensor) -> bool:
    return weight.dtype == torch.float8_e4m3fn


def save_floats(folder: Path, target: Path) -> Path:
    """The same model without quantisation: ``floats(folder)``, for readers that cannot open the folder."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    save_file(floats(folder), target / "model.safetensors", {"format": "pt"})
    return target


def _stored(name: str, weight: Tensor, scales: torch.dtype) -> dict[str, Tensor]:
    if not name.endswith(CONVERTED):
        return {name: weight.to(torch.bfloat16).contiguous()}
    scale = _block_maxima(weight).div(448).to(scales)
    whole = weight / _multiplied(torch.ones_like(weight), scale)
    return {name: whole.clamp(-448, 448).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.contiguous()}


def _block_maxima(weight: Tensor) -> Tensor:
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).amax((-1, -3))


def _multiplied(weight: Tensor, scale: Tensor) -> Tensor:
    rows, columns = weight.shape[-2:]
    wide = scale.float().repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return weight * wide[..., :rows, :columns]
