"""What the metadata of qwen35, qwen35moe and qwen3next say beyond that of other models: recurrence, experts, head.

`block_count` includes the layers of the MTP head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.errors import CorruptFile, UnknownModel
from slipstream.load.fields import Fields
from slipstream.load.gguf.header import GgufHeader
from slipstream.load.spec import GdnSpec, HeadSpec, LayerKind, ModelSpec, MoeSpec

INTERVAL = 4  # every fourth layer is full attention, where the file does not say
SOFTMAX = 1  # how a router's scores become weights


def num_head_layers(arch: Fields) -> int:
    return arch.count("nextn_predict_layers", 0)


def num_target_layers(arch: Fields) -> int:
    count, in_head = arch.layers("block_count"), num_head_layers(arch)
    if in_head >= count:
        raise CorruptFile(f"{arch.where}: {in_head} of {count} layers cannot be those of the MTP head.")
    return count - in_head


def same_in_all_layers(arch: Fields, key: str, default: int | None = None) -> int:
    """A size, or a list of one for each layer, 0 where a layer has none."""
    value = arch.raw(key)
    if not isinstance(value, list):
        return arch.size(key, default)
    sizes = {item for item in value if item != 0}
    if len(sizes) != 1:
        raise UnknownModel(
            f"{arch.where}: {key} differs from layer to layer, which is not supported: take a model whose layers are "
            "alike."
        )
    return Fields({key: sizes.pop()}, arch.where).size(key)


def hybrid_spec(spec: ModelSpec, arch: Fields, header: GgufHeader, tiled: bool) -> ModelSpec:
    return replace(
        spec,
        layer_kinds=_layer_kinds(arch, spec.num_layers),
        qk_norm=True,
        gated_attention=True,
        norm_plus_one=True,  # the reader takes the 1 off again
        gdn=_gdn(arch, tiled),
        moe=_moe(arch, header) if spec.architecture == "qwen3_5_moe" else None,
        head=HeadSpec(num_declared_layers=num_head_layers(arch)),
    )


def _layer_kinds(arch: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    recurrent = arch.raw("attention.recurrent_layers")
    if recurrent is None:
        interval = arch.size("full_attention_interval", INTERVAL)
        recurrent = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(recurrent, list) or len(recurrent) < num_layers or not all(map(_is_flag, recurrent)):
        raise CorruptFile(f"{arch.where}: attention.recurrent_layers should say yes or no for each layer.")
    return tuple("linear_attention" if each else "full_attention" for each in recurrent[:num_layers])


def _is_flag(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def _gdn(arch: Fields, tiled: bool) -> GdnSpec:
    num_k, num_v = arch.size("ssm.group_count"), arch.size("ssm.time_step_rank")
    inner = arch.size("ssm.inner_size")
    if num_v % num_k or inner % num_v:
        raise CorruptFile(f"{arch.where}: {num_k} key heads, {num_v} value heads and a width of {inner} do not fit.")
    return GdnSpec(
        num_k_heads=num_k,
        num_v_heads=num_v,
        k_dim=arch.size("ssm.state_size"),
        v_dim=inner // num_v,
        conv_kernel=arch.size("ssm.conv_kernel"),
        tiled=tiled and num_k != num_v,
    )


def _moe(arch: Fields, header: GgufHeader) -> MoeSpec:
    if (kind := arch.count("expert_gating_func", SOFTMAX)) not in (0, SOFTMAX):
        raise UnknownModel(
            f"{arch.where}: routers of kind {kind} are not supported: take a model whose router is a softmax."
        )
    experts, active = arch.size("expert_count"), arch.size("expert_used_count")
    if active > experts:
        raise CorruptFile(f"{arch.where}: {active} of {experts} experts cannot be used.")
    return MoeSpec(
        num_experts=experts,
        num_active=active,
        expert_size=arch.size("expert_feed_forward_length", _columns(header, "blk.0.ffn_down_exps.weight")),
        shared_size=arch.size("expert_shared_feed_forward_length", _columns(header, "blk.0.ffn_down_shexp.weight")),
    )


def _columns(header: GgufHeader, name: str) -> int | None:
    tensor = header.tensors.get(name)
    return None if tensor is None else tensor.shape[-1]
