"""The shape of a model, whatever its file format. Parsed once, frozen, read by runners and by the memory plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from slipstream.load.fields import MAX_CONTEXT

# "other": loaded by the runner itself, its ModelSpec is exact only in part.
Architecture = Literal["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "other"]
LayerKind = Literal["full_attention", "linear_attention"]
HeadInput = Literal["embedding", "hidden"]


def all_full_attention(num_layers: int) -> tuple[LayerKind, ...]:
    kind: LayerKind = "full_attention"
    return (kind,) * num_layers


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """YaRN: a context stretched by a factor, in which fast rotations stay as they are."""

    factor: float
    original_context: int
    fast_turns: float = 32.0  # rotations in the original context from which on a frequency stays
    slow_turns: float = 1.0  # and up to which it is divided by the factor
    whole_bounds: bool = True  # the dimensions in between are counted from a whole one to a whole one
    rotary_scale: float = 1.0  # of cosines and sines

    @property
    def context(self) -> int:
        return max(1, int(min(self.original_context * self.factor, MAX_CONTEXT)))


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """How much larger cosines and sines are, by the paper; 1 without YaRN."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    theta: float
    rotary_dim: int  # of each head's head_dim, the first rotary_dim are rotated
    llama3_factor: float | None = None  # None: plain rotary; else Llama 3.1's frequency rescaling
    llama3_low_freq: float = 1.0
    llama3_high_freq: float = 4.0
    llama3_original_context: int = 8192
    yarn: YarnSpec | None = None


@dataclass(frozen=True, slots=True)
class GdnSpec:
    """Gated DeltaNet: the recurrent layers of the hybrid architectures."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int
    # Which key head a value head belongs to: head % num_k_heads, as in GGUF files, instead of head // ratio.
    tiled: bool = False

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
class HeadSpec:
    """The MTP head of a model: wiring, layers with a cache, names of its tensors.

    norm each input -> fc over both -> a decoder layer with the target model's attention shape and MLP -> norm -> output
    matrix. One wiring so far, Qwen3.5's. A checkpoint may lack the tensors of its head: OpenedModel.head_reason.
    """

    num_declared_layers: int = 0  # that the configuration announces
    num_modules: int = 1  # one module drafts at every depth
    inputs: tuple[HeadInput, ...] = ("embedding", "hidden")  # in the order of fc's columns
    layer_kind: LayerKind = "full_attention"
    own_output: bool = False  # False: the target model's output matrix
    prefix: str = "mtp."

    @property
    def num_kv_layers(self) -> int:
        return self.num_modules if self.layer_kind == "full_attention" else 0

    @property
    def fc(self) -> str:
        return f"{self.prefix}fc"

    @property
    def input_norms(self) -> tuple[str, ...]:
        """One for each of `inputs`."""
        return tuple(f"{self.prefix}pre_fc_norm_{name}" for name in self.inputs)

    @property
    def layers(self) -> tuple[str, ...]:
        """One for each module."""
        return tuple(f"{self.prefix}layers.{i}" for i in range(self.num_modules))

    @property
    def norm(self) -> str:
        return f"{self.prefix}norm"

    def owns(self, name: str) -> bool:
        """Whether a canonical tensor name belongs to the head."""
        return name.startswith(self.prefix)


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
    head: HeadSpec = HeadSpec()  # the MTP head that fits this model, if there is one
    eos_token_ids: tuple[int, ...] = ()
    fp8: bool = False  # some matrices are stored in FP8
    name: str = ""

    @property
    def num_attention_layers(self) -> int:
        return sum(kind == "full_attention" for kind in self.layer_kinds)

    @property
    def num_gdn_layers(self) -> int:
        return self.num_layers - self.num_attention_layers
