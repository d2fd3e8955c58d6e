"""A random shape as a GGUF file, so that llama.cpp can run the same weights: quantized as our runner does, or in the
types of a quantised file, which we open then as well.

Owns metadata and a vocabulary that means nothing. The MTP head is left out: llama.cpp runs the target model alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from slipstream.load.gguf.architectures import ARCHITECTURES
from slipstream.load.gguf.changes import LESS_ONE, LOG_OF_NEGATIVE
from slipstream.load.random.model import INTERVAL, RandomCheckpoint
from slipstream.load.random.stored import StoredRandomCheckpoint
from slipstream.load.spec import ModelSpec
from slipstream.load.tokenizer.token_bytes import BYTE_OF
from slipstream.runners.backend import Backend

NORMAL_TOKEN = 1


Tensors = Iterable[tuple[str, np.ndarray[Any, Any], str]]  # name, bytes or floats, type


def write_twin(checkpoint: RandomCheckpoint, backend: Backend, path: Path) -> None:
    _write(checkpoint.spec, backend.gguf_twin(checkpoint), path)


def write_stored(checkpoint: StoredRandomCheckpoint, path: Path) -> None:
    _write(checkpoint.spec, _as_in_files(checkpoint), path)


def _as_in_files(checkpoint: StoredRandomCheckpoint) -> Tensors:
    """Random value heads are as good in GGUF's order as in ours."""
    spec = checkpoint.spec
    table = ARCHITECTURES[_architecture(spec)].tensors
    for name in checkpoint.names():
        if spec.head.owns(name):
            continue
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        number = layer[1] if layer else ""
        [stored, *_] = table[name.replace(f"layers.{number}.", "layers.{i}.") if layer else name]
        raw, in_file = checkpoint.get(name), stored.name.format(i=number)
        if stored.change is LESS_ONE:
            yield in_file, raw.data + np.float32(1), "F32"
        elif stored.change is LOG_OF_NEGATIVE:
            yield in_file, -np.exp(raw.data), "F32"
        elif raw.dtype == "F32":
            yield in_file, raw.data.squeeze(), "F32"
        else:
            yield in_file, raw.data.reshape(*raw.shape[:-1], -1), raw.dtype


def _architecture(spec: ModelSpec) -> str:
    return "qwen35moe" if spec.moe else "qwen35"


def _write(spec: ModelSpec, tensors: Tensors, path: Path) -> None:
    writer = GGUFWriter(path, _architecture(spec), use_temp_file=True)  # a large one would not fit into memory
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
    plain[128] = "ab"  # there must be a merge
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([plain.get(token, f"[{token}]") for token in range(size)])
    writer.add_token_types([NORMAL_TOKEN] * size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)
