"""A random shape as a GGUF file, quantized as our runner does, so that llama.cpp can run the same weights.

Owns metadata and a vocabulary that means nothing; the tensors are the backend's. The MTP head is left out: llama.cpp
runs the target model alone.
"""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFWriter

from slipstream.load.random_model import INTERVAL, RandomCheckpoint
from slipstream.load.spec import ModelSpec
from slipstream.load.tokenizer.token_bytes import BYTE_OF
from slipstream.runners.backend import Backend

NORMAL_TOKEN = 1


def write_twin(checkpoint: RandomCheckpoint, backend: Backend, path: Path) -> None:
    tensors, spec = backend.gguf_twin(checkpoint), checkpoint.spec
    writer = GGUFWriter(path, "qwen35moe" if spec.moe else "qwen35")
    _add_sizes(writer, spec)
    _add_vocabulary(writer, spec.vocab_size)
    for name, data, stored in tensors:
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: GGUFWriter, spec: ModelSpec) -> None:
    sizes = {
        "block_count": spec.num_layers,
        "context_length": spec.max_context,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "rope.dimension_count": spec.rope.rotary_dim,
        "full_attention_interval": INTERVAL,
        **_recurrent_sizes(spec),
        **_expert_sizes(spec),
    }
    for key, value in sizes.items():
        writer.add_uint32(f"{writer.arch}.{key}", value)
    writer.add_float32(f"{writer.arch}.attention.layer_norm_rms_epsilon", spec.norm_eps)
    writer.add_float32(f"{writer.arch}.rope.freq_base", spec.rope.theta)
    writer.add_array(f"{writer.arch}.rope.dimension_sections", _sections(spec.rope.rotary_dim // 2))


def _recurrent_sizes(spec: ModelSpec) -> dict[str, int]:
    gdn = spec.gdn
    assert gdn is not None
    assert gdn.k_dim == gdn.v_dim
    return {
        "ssm.conv_kernel": gdn.conv_kernel,
        "ssm.state_size": gdn.k_dim,
        "ssm.group_count": gdn.num_k_heads,
        "ssm.time_step_rank": gdn.num_v_heads,
        "ssm.inner_size": gdn.num_v_heads * gdn.v_dim,
    }


def _expert_sizes(spec: ModelSpec) -> dict[str, int]:
    if spec.moe is None:
        return {}
    return {
        "expert_count": spec.moe.num_experts,
        "expert_used_count": spec.moe.num_active,
        "expert_feed_forward_length": spec.moe.expert_size,
        "expert_shared_feed_forward_length": spec.moe.shared_size,
    }


def _sections(num_angles: int) -> list[int]:
    """Of three interleaved axes; text moves along all of them alike. The fourth would not rotate at all."""
    return [*(-(-(num_angles - axis) // 3) for axis in range(3)), 0]


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """Plain ASCII: llama.cpp keeps half a character back until its other half comes, and tokens would come late.

    It wants an end token: the last one, which nothing waits for.
    """
    plain = {byte: character for character, byte in BYTE_OF.items() if byte < 128}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([plain.get(token, f"[{token}]") for token in range(size)])
    writer.add_token_types([NORMAL_TOKEN] * size)
    writer.add_token_merges(["[ 0"])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)
