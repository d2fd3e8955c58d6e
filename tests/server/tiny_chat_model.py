"""A model of one small random layer with the default model's vocabulary and chat template: chats cost little."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from slipstream.load.default_model import default_model_path
from slipstream.load.opened import open_tokenizer

HIDDEN, INNER, KV = 64, 96, 32


def write_tiny_chat_model(folder: Path) -> Path:
    tokenizer = open_tokenizer(default_model_path())
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": tokenizer.template_text}))
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": list(tokenizer.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(tokenizer.vocab_size), folder / "model.safetensors")
    return folder


def _tensors(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV, HIDDEN),
        "self_attn.v_proj": (KV, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
