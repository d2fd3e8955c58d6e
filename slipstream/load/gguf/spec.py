"""GGUF metadata -> ModelSpec, and the tensors by canonical name. Reads the data of no tensor but rope_freqs."""

from __future__ import annotations

import math

import numpy as np

from slipstream.errors import CorruptFile, UnknownModel
from slipstream.load.fields import Fields
from slipstream.load.gguf.architectures import ARCHITECTURES, FileTensor, GgufArchitecture
from slipstream.load.gguf.header import GgufHeader
from slipstream.load.gguf.hybrid import hybrid_spec, num_head_layers, num_target_layers, same_in_all_layers
from slipstream.load.spec import ModelSpec, RopeSpec, all_full_attention

CONTROL = 3  # a token's type
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
ROPE_FREQS = "rope_freqs.weight"  # read here: it becomes a part of the spec


def file_tensors(header: GgufHeader) -> dict[str, FileTensor]:
    """By canonical name. A tensor that the architecture does not have means a model we would compute wrongly."""
    every = Fields(header.metadata, str(header.path))
    architecture = _architecture(every)
    names = (name for name in header.tensors if name != ROPE_FREQS)
    found, unknown = architecture.find(names, num_target_layers(_architecture_fields(every)))
    if unknown:
        raise UnknownModel(
            f"{header.path} holds the tensor {unknown[0]!r}, which is not part of {architecture.name} models."
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
    spec = ModelSpec(
        architecture=architecture.name,
        hidden_size=hidden,
        num_layers=num_target_layers(arch),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=0 if architecture.name == "qwen3_5_moe" else same_in_all_layers(arch, "feed_forward_length"),
        vocab_size=_vocab_size(header),
        max_context=arch.size("context_length"),
        norm_eps=_short_float(arch.number("attention.layer_norm_rms_epsilon")),
        rope=_rope(header, arch, head_dim, architecture.hybrid),
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
        raise UnknownModel(f"{every.where}: GGUF architecture {name!r} is not one of {known}.")
    return ARCHITECTURES[name]


def _architecture_fields(every: Fields) -> Fields:
    prefix = every.text("general.architecture") + "."
    values = {key.removeprefix(prefix): value for key, value in every.values.items() if key.startswith(prefix)}
    return Fields(values, f"{every.where}, {prefix}*")


def _refuse_unsupported(every: Fields, arch: Fields, architecture: GgufArchitecture) -> None:
    if arch.count("expert_count", 0) and not architecture.hybrid:
        raise UnknownModel(f"{every.where} is a mixture of experts, which is not supported from GGUF.")
    if 0 < arch.count("attention.sliding_window", 0) < arch.size("context_length"):
        raise UnknownModel(f"{every.where} uses sliding-window attention, which is not supported.")
    scaling = arch.text("rope.scaling.type", "none")
    if scaling != "none" or arch.number("rope.scale_linear", 1.0) != 1.0:
        raise UnknownModel(f"{every.where}: rotary scaling of type {scaling!r} is not supported.")
    key_dim = arch.count("attention.key_length", 0)
    if arch.count("attention.value_length", key_dim) != key_dim:
        raise UnknownModel(f"{every.where}: heads whose keys and values differ in width are not supported.")


def _vocab_size(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptFile(f"{header.path} has no tensor 'token_embd.weight', which every model needs.")
    return embedding.shape[0]


def _rope(header: GgufHeader, arch: Fields, head_dim: int, hybrid: bool) -> RopeSpec:
    theta = _short_float(arch.number("rope.freq_base", 10000.0))
    rotary_dim = arch.size("rope.dimension_count", head_dim // 4 if hybrid else head_dim)
    if hybrid and (rotary_dim % 2 or rotary_dim > head_dim):
        raise CorruptFile(f"{header.path}: {rotary_dim} rotary dimensions of a head of {head_dim} cannot be.")
    if rotary_dim != head_dim and not hybrid:
        raise UnknownModel(f"{header.path} rotates {rotary_dim} of {head_dim} head dimensions, only all is supported.")
    if ROPE_FREQS not in header.tensors:
        return RopeSpec(theta, rotary_dim)
    return _rope_from_freqs(header, theta, rotary_dim)


def _rope_from_freqs(header: GgufHeader, theta: float, rotary_dim: int) -> RopeSpec:
    """Llama 3.1 files carry the divisor of each frequency instead of the parameters it comes from."""
    tensor = header.tensors[ROPE_FREQS]
    if tensor.dtype != "F32" or tensor.shape != (rotary_dim // 2,):
        raise CorruptFile(f"{header.path}: {ROPE_FREQS} should be F32 [{rotary_dim // 2}], it is {list(tensor.shape)}.")
    # [rotary_dim / 2]
    found = tensor.data.view("<f4")
    rope = RopeSpec(theta, rotary_dim, llama3_factor=float(found.max()))
    if not np.allclose(found, llama3_divisors(rope), rtol=1e-4):
        raise UnknownModel(f"{header.path}: {ROPE_FREQS} is not Llama 3.1's rescaling, no other is supported.")
    return rope


def llama3_divisors(rope: RopeSpec) -> np.ndarray:
    """The divisor of each rotary frequency in Llama 3.1's rescaling."""
    assert rope.llama3_factor is not None
    # [rotary_dim / 2]
    frequency = rope.theta ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    turns = rope.llama3_original_context * frequency / (2 * math.pi)
    smooth = (turns - rope.llama3_low_freq) / (rope.llama3_high_freq - rope.llama3_low_freq)
    smooth = np.clip(smooth, 0.0, 1.0)
    divisors: np.ndarray = 1.0 / ((1.0 - smooth) / rope.llama3_factor + smooth)
    return divisors


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


def _short_float(value: float) -> float:
    """Metadata is float32: 1e-5 comes back as 9.999999747e-06. The shortest decimal is meant."""
    return float(str(np.float32(value)))
