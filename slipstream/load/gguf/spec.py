"""GGUF metadata -> ModelSpec, and the tensors by canonical name. Reads the data of no tensor but rope_freqs."""

from __future__ import annotations

from slipstream.errors import CorruptFile, UnknownModel
from slipstream.load.fields import Fields
from slipstream.load.gguf.architectures import ARCHITECTURES, FileTensor, GgufArchitecture
from slipstream.load.gguf.header import GgufHeader
from slipstream.load.gguf.hybrid import hybrid_spec, num_head_layers, num_target_layers, same_in_all_layers
from slipstream.load.gguf.rope import ROPE_FREQS, read_rope, short_float
from slipstream.load.spec import ModelSpec, all_full_attention

CONTROL = 3  # a token's type
END_TOKENS = ("<|im_end|>", "<|endoftext|>")


def file_tensors(header: GgufHeader) -> dict[str, FileTensor]:
    """By canonical name. A tensor that the architecture does not have means a model we would compute wrongly."""
    every = Fields(header.metadata, str(header.path))
    architecture = _architecture(every)
    names = (name for name in header.tensors if name != ROPE_FREQS)
    found, unknown = architecture.find(names, num_target_layers(_architecture_fields(every)))
    if unknown:
        raise UnknownModel(
            f"{header.path} holds the tensor {unknown[0]!r}, which is not part of {architecture.name} models: take a "
            "model without it."
        )
    return found


def is_head_alone(header: GgufHeader) -> bool:
    """A file of the MTP head, with embedding and output matrix, but without the other layers."""
    every = Fields(header.metadata, str(header.path))
    has_head = _architecture(every).hybrid and num_head_layers(_architecture_fields(every)) > 0
    return has_head and not any(name.startswith("blk.0.") for name in header.tensors)


def spec_from_gguf(header: GgufHeader) -> ModelSpec:
    every = Fields(header.metadata, str(header.path))
    architecture = _architecture(every)
    arch = _architecture_fields(every)
    _refuse_unsupported(every, arch, architecture)
    heads, hidden = same_in_all_layers(arch, "attention.head_count"), arch.size("embedding_length")
    kv_heads = same_in_all_layers(arch, "attention.head_count_kv", heads)
    if heads % kv_heads or (hidden % heads and arch.raw("attention.key_length") is None):
        raise CorruptFile(f"{header.path}: {heads} heads, {kv_heads} key-value heads and width {hidden} do not fit.")
    head_dim = arch.size("attention.key_length", hidden // heads)
    rope = read_rope(header, arch, head_dim, architecture.hybrid)
    spec = ModelSpec(
        architecture=architecture.name,
        hidden_size=hidden,
        num_layers=num_target_layers(arch),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=0 if architecture.name == "qwen3_5_moe" else same_in_all_layers(arch, "feed_forward_length"),
        vocab_size=_vocab_size(header),
        max_context=arch.size("context_length") if rope.yarn is None else rope.yarn.context,
        norm_eps=short_float(arch.number("attention.layer_norm_rms_epsilon")),
        rope=rope,
        tied="output.weight" not in header.tensors,
        layer_kinds=all_full_attention(num_target_layers(arch)),
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        qk_norm=architecture.qk_norm,
        eos_token_ids=_eos(every, architecture.hybrid),
        name=every.text("general.name", header.path.stem),
    )
    return hybrid_spec(spec, arch, header, architecture.tiled) if architecture.hybrid else spec


def _architecture(every: Fields) -> GgufArchitecture:
    name = every.text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnknownModel(
            f"{every.where}: GGUF architecture {name!r} is not supported: take a model of one of {known}."
        )
    return ARCHITECTURES[name]


def _architecture_fields(every: Fields) -> Fields:
    prefix = every.text("general.architecture") + "."
    values = {key.removeprefix(prefix): value for key, value in every.values.items() if key.startswith(prefix)}
    return Fields(values, f"{every.where}, {prefix}*")


def _refuse_unsupported(every: Fields, arch: Fields, architecture: GgufArchitecture) -> None:
    if arch.count("expert_count", 0) and not architecture.hybrid:
        experts = " or ".join(name for name, each in ARCHITECTURES.items() if each.name == "qwen3_5_moe")
        raise UnknownModel(
            f"{every.where} is a mixture of experts of architecture {architecture.name}, which is not supported: of "
            f"models with experts take one of {experts}."
        )
    if 0 < arch.count("attention.sliding_window", 0) < arch.size("context_length"):
        raise UnknownModel(
            f"{every.where} uses sliding-window attention, which is not supported: take a model whose layers see the "
            "whole context."
        )
    key_dim = arch.count("attention.key_length", 0)
    if arch.count("attention.value_length", key_dim) != key_dim:
        raise UnknownModel(
            f"{every.where}: heads whose keys and values differ in width are not supported: take a model whose keys "
            "and values have one width."
        )


def _vocab_size(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptFile(f"{header.path} has no tensor 'token_embd.weight', which every model needs.")
    return embedding.shape[0]


def _eos(every: Fields, hybrid: bool) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (token for key in keys for token in every.token_ids(f"tokenizer.ggml.{key}"))
    return tuple(dict.fromkeys((*ids, *(_ends_of_turns(every) if hybrid else ()))))


def _ends_of_turns(every: Fields) -> list[int]:
    """Qwen's models end a turn or a text with these, of which their files name one."""
    tokens, kinds = (every.raw(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(kinds, list) or len(kinds) != len(tokens):
        return []
    return [token for text in END_TOKENS if text in tokens and kinds[token := tokens.index(text)] == CONTROL]
