"""A Hugging Face or MLX folder of any architecture and quantisation, for a runner with loaders of its own.

Reads the engine's fields of config.json and the names of the tensors; checks nothing else.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import LoadError
from slipstream.load.fields import Fields
from slipstream.load.hf.config import ARCHITECTURES, HYBRID, context_length, eos_tokens, gdn_of, has_mixed_layers
from slipstream.load.hf.folder import HfCheckpoint, read_hints
from slipstream.load.hf.safetensors import open_folder
from slipstream.load.json_file import read_json, read_json_if_there
from slipstream.load.spec import Architecture, HeadSpec, ModelSpec, RopeSpec, all_full_attention


def open_any(folder: Path, name: str = "") -> HfCheckpoint:
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder.")
    spec = _rough_spec(folder, name or folder.resolve().name)
    return HfCheckpoint(str(folder), spec, open_folder(folder), read_hints(folder))


def _architecture(model_type: str, text: Fields) -> Architecture:
    """ "other": also Qwen3-Next with layers that our architecture does not have."""
    if model_type == "qwen3_next" and has_mixed_layers(text):
        return "other"
    return ARCHITECTURES.get(model_type, "other")


def _rough_spec(folder: Path, name: str) -> ModelSpec:
    """Exact in the fields that the engine and the tokenizer read (vocabulary, context, end tokens, MTP layers), and in
    what splits the joined projections of recurrent layers."""
    config = folder / "config.json"
    outer = Fields(read_json(config), str(config))
    generation = Fields(read_json_if_there(folder / "generation_config.json"), str(config))
    text = outer.level("text_config") if outer.raw("text_config") is not None else outer
    hidden, heads = text.size("hidden_size"), text.size("num_attention_heads", 1)
    num_layers = text.layers("num_hidden_layers")
    head_dim = text.size("head_dim", max(1, hidden // heads))
    architecture = _architecture(outer.text("model_type"), text)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=text.size("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=text.size("intermediate_size", hidden),
        vocab_size=text.size("vocab_size"),
        max_context=context_length(text, 32768),
        norm_eps=text.number("rms_norm_eps", 1e-6),
        rope=RopeSpec(text.number("rope_theta", 10000.0), head_dim),
        tied=outer.flag("tie_word_embeddings") or text.flag("tie_word_embeddings"),
        layer_kinds=all_full_attention(num_layers),
        gdn=gdn_of(text) if architecture in HYBRID else None,
        head=HeadSpec(num_declared_layers=text.count("mtp_num_hidden_layers", 0)),
        eos_token_ids=eos_tokens(generation, outer, text),
        name=name,
    )
