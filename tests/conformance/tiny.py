"""Tiny random float32 checkpoints of every supported shape, written once per test run by `transformers` itself."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB = 97

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HYBRID = {
    **_COMMON,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def llama(heads: int, kv_heads: int, tied: bool, **more: object) -> PreTrainedModel:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return LlamaForCausalLM(LlamaConfig(**{**_COMMON, **sizes, "tie_word_embeddings": tied, **more}))


def hybrid(**more: object) -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**_HYBRID, **more}))


_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def moe(**more: object) -> PreTrainedModel:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**_HYBRID, **_EXPERTS, **more}))


def next_moe(**more: object) -> PreTrainedModel:
    """Qwen3-Next: the projections of recurrent layers are joined."""
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**_HYBRID, **_EXPERTS, **more}))


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Some frequencies stay, some are divided, some lie between.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_YARN_ODD = {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False}
_MSCALE = {"mscale": 1.5, "mscale_all_dim": 0.5}
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}

MODELS = {
    "llama-mha-untied": lambda: llama(4, 4, tied=False),
    "llama-gqa-tied": lambda: llama(4, 2, tied=True),
    "llama-mqa-tied": lambda: llama(4, 1, tied=True),
    "llama3-rope": lambda: llama(4, 2, tied=False, rope_parameters=_LLAMA3_ROPE),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**_COMMON, **_SMALL})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**_COMMON, **_SMALL, "head_dim": 32})),
    "llama-yarn": lambda: llama(4, 2, tied=True, rope_parameters=_YARN_ODD),
    "qwen2-yarn": lambda: Qwen2ForCausalLM(Qwen2Config(**{**_COMMON, **_SMALL, "rope_parameters": YARN})),
    "qwen3-yarn": lambda: Qwen3ForCausalLM(
        Qwen3Config(**{**_COMMON, **_SMALL, "head_dim": 32, "rope_parameters": {**YARN, **_MSCALE}})
    ),
    "qwen3_5-yarn": lambda: hybrid(rope_parameters={**YARN, "partial_rotary_factor": 0.5}),
    "qwen3_5": lambda: hybrid(),
    "qwen3_5-tied-equal-heads": lambda: hybrid(tie_word_embeddings=True, linear_num_key_heads=4),
    "qwen3_5-one-key-head": lambda: hybrid(linear_num_key_heads=1, full_attention_interval=2),
    "qwen3_5_moe": lambda: moe(),
}


def build(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return randomise(MODELS[kind]())


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Weights large enough that logits differ clearly between tokens."""
    model = model.float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif name.endswith("A_log"):
                # Slow decay: with a state that forgets at once the gated norm divides by next to nothing, and
                # two float32 implementations of the same formula drift apart.
                weight.normal_(-2, 0.5)
            elif "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif name.endswith("bias") and "dt_bias" not in name:
                weight.normal_(0, 0.2)
    return model


def head_tensors(model: PreTrainedModel, seed: int = 1) -> dict[str, torch.Tensor]:
    """A random MTP head of the model's own layer shape (its last layer is full attention in every family)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    tensors = {"mtp.fc.weight": torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5}
    for name, weight in model.state_dict().items():
        if name.startswith(last):
            noise = torch.randn(weight.shape, generator=generator) * 0.02
            tensors["mtp.layers.0." + name.removeprefix(last)] = weight + noise
    plain = 0.0 if model.config.model_type.startswith(("qwen3_5", "qwen3_next")) else 1.0
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{norm}.weight"] = plain + torch.randn(hidden, generator=generator) * 0.1
    return {name: weight.contiguous() for name, weight in tensors.items()}


def save(model: PreTrainedModel, folder: Path, *, head: bool = False) -> Path:
    model.save_pretrained(folder)
    if head:
        grafted = {name: weight.contiguous() for name, weight in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del grafted["lm_head.weight"]
        save_file({**grafted, **head_tensors(model)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def experts_apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with each expert under a name of its own, as some checkpoints have them."""
    apart: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        stem, _, stack = name.partition(".experts.")
        if not stack:
            apart[name] = weight
            continue
        names = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(weight):
            for part, piece in zip(names, matrix.chunk(len(names)), strict=True):
                apart[f"{stem}.experts.{expert}.{part}.weight"] = piece.contiguous()
    return apart
