"""The shape of a model, whatever file described it. Parsed once, frozen, read by runners and by the memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "other"]  # other: its runner knows better
LayerKind = Literal["full_attention", "linear_attention"]


def all_full_attention(num_layers: int) -> tuple[LayerKind, ...]:
    kind: LayerKind = "full_attention"
    return (kind,) * num_layers


@dataclass(frozen=True, slots=True)
class RopeSpec:
    theta: float
    rotary_dim: int  # of each head's head_dim, the first rotary_dim are rotated
    llama3_factor: float | None = None  # None: plain rotary; else Llama 3.1's frequency rescaling
    llama3_low_freq: float = 1.0
    llama3_high_freq: float = 4.0
    llama3_original_context: int = 8192


@dataclass(frozen=True, slots=True)
class GdnSpec:
    """Gated DeltaNet: the recurrent layers of the hybrid architectures."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class MoeSpec:
    num_experts: int
    num_active: int
    expert_size: int
    shared_size: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: Architecture
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # dense MLP; 0 for MoE architectures
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: RopeSpec
    tied: bool  # output matrix is the embedding
    layer_kinds: tuple[LayerKind, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    gated_attention: bool = False  # q_proj yields query and output gate
    norm_plus_one: bool = False  # RMSNorm applies 1 + w (GDN's gated norm excepted)
    gdn: GdnSpec | None = None
    moe: MoeSpec | None = None
    num_mtp_layers: int = 0  # as the config claims; whether the tensors exist is another question
    eos_token_ids: tuple[int, ...] = ()
    fp8: bool = False  # most matrices are stored in FP8
    name: str = ""

    @property
    def num_attention_layers(self) -> int:
        return sum(kind == "full_attention" for kind in self.layer_kinds)

    @property
    def num_gdn_layers(self) -> int:
        return self.num_layers - self.num_attention_layers
