"""The tensors that a model of a given spec must have, and their shapes. Pure arithmetic over ModelSpec, no files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from slipstream.errors import MissingTensor
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import Checkpoint

Shapes = dict[str, tuple[int, ...]]
# The experts of a layer: gate and up in one stack, in a stack each, or every matrix under a name of its own.
ExpertLayout = Literal["fused", "stacks", "separate"]


def check_model(checkpoint: Checkpoint) -> None:
    """Raises MissingTensor for the first tensor of the model that is absent or has the wrong shape."""
    for shapes in _by_layer(checkpoint.spec, lambda prefix: stored_experts(checkpoint, prefix)):
        for name, shape in shapes.items():
            if wrong := mismatch(checkpoint, name, shape):
                raise MissingTensor(f"{checkpoint.path}: {wrong}: fetch it again, or take another copy of the model.")


def model_shapes(spec: ModelSpec, layout: Callable[[str], ExpertLayout] = lambda prefix: "fused") -> Shapes:
    """Every tensor but the head's. `layout`: how the layer of that prefix stores its experts."""
    return {name: shape for shapes in _by_layer(spec, layout) for name, shape in shapes.items()}


def _by_layer(spec: ModelSpec, layout: Callable[[str], ExpertLayout]) -> Iterator[Shapes]:
    """One after the other: a damaged file may claim many layers, and has not the first of them."""
    yield top_shapes(spec)
    for layer, kind in enumerate(spec.layer_kinds):
        prefix = f"model.layers.{layer}."
        attention = layer_shapes(spec, prefix, kind == "full_attention")
        yield attention | mlp_shapes(spec, prefix + "mlp.", layout(prefix))


def mismatch(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> str:
    """The fault of a tensor, as a clause; empty if it has none."""
    if name not in checkpoint:
        return f"tensor {name!r} is missing"
    found = checkpoint.shape(name)
    return "" if found == shape else f"{name} is {list(found)}, this model needs {list(shape)}"


def separate_experts(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether a layer stores its experts apart instead of all of them in one tensor."""
    return f"{prefix}mlp.experts.0.gate_proj.weight" in checkpoint


def stored_experts(checkpoint: Checkpoint, prefix: str) -> ExpertLayout:
    if separate_experts(checkpoint, prefix):
        return "separate"
    return "stacks" if f"{prefix}mlp.experts.gate_proj" in checkpoint else "fused"


def top_shapes(spec: ModelSpec) -> Shapes:
    matrix = (spec.vocab_size, spec.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": matrix, "model.norm.weight": (spec.hidden_size,)}
    return shapes if spec.tied else shapes | {"lm_head.weight": matrix}


def layer_shapes(spec: ModelSpec, prefix: str, full_attention: bool) -> Shapes:
    """One decoder layer without its MLP."""
    norms: Shapes = {
        f"{prefix}input_layernorm.weight": (spec.hidden_size,),
        f"{prefix}post_attention_layernorm.weight": (spec.hidden_size,),
    }
    if full_attention:
        return norms | attention_shapes(spec, prefix + "self_attn.")
    return norms | gdn_shapes(spec, prefix + "linear_attn.")


def attention_shapes(spec: ModelSpec, prefix: str) -> Shapes:
    q, kv, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
    rows = {"q_proj": q * (2 if spec.gated_attention else 1), "k_proj": kv, "v_proj": kv}
    shapes: Shapes = {f"{prefix}{part}.weight": (size, hidden) for part, size in rows.items()}
    shapes[f"{prefix}o_proj.weight"] = (hidden, q)
    if spec.qkv_bias:
        shapes |= {f"{prefix}{part}.bias": (size,) for part, size in rows.items()}
    if spec.o_bias:
        shapes[f"{prefix}o_proj.bias"] = (hidden,)
    if spec.qk_norm:
        shapes |= {f"{prefix}{part}.weight": (spec.head_dim,) for part in ("q_norm", "k_norm")}
    return shapes


def gdn_shapes(spec: ModelSpec, prefix: str) -> Shapes:
    gdn, hidden = spec.gdn, spec.hidden_size
    assert gdn is not None
    values = gdn.num_v_heads * gdn.v_dim
    return {
        f"{prefix}in_proj_qkv.weight": (gdn.conv_channels, hidden),
        f"{prefix}in_proj_z.weight": (values, hidden),
        f"{prefix}in_proj_b.weight": (gdn.num_v_heads, hidden),
        f"{prefix}in_proj_a.weight": (gdn.num_v_heads, hidden),
        f"{prefix}conv1d.weight": (gdn.conv_channels, 1, gdn.conv_kernel),
        f"{prefix}dt_bias": (gdn.num_v_heads,),
        f"{prefix}A_log": (gdn.num_v_heads,),
        f"{prefix}norm.weight": (gdn.v_dim,),
        f"{prefix}out_proj.weight": (hidden, values),
    }


def mlp_shapes(spec: ModelSpec, prefix: str, layout: ExpertLayout) -> Shapes:
    """The dense MLP, or the experts."""
    if spec.moe is None:
        return dense_shapes(prefix, spec.hidden_size, spec.intermediate_size)
    moe, hidden = spec.moe, spec.hidden_size
    shapes: Shapes = {
        f"{prefix}gate.weight": (moe.num_experts, hidden),
        f"{prefix}shared_expert_gate.weight": (1, hidden),
    }
    shapes |= dense_shapes(f"{prefix}shared_expert.", hidden, moe.shared_size)
    if layout != "separate":
        count, inner = moe.num_experts, moe.expert_size
        parts = {"gate_up_proj": 2 * inner} if layout == "fused" else {"gate_proj": inner, "up_proj": inner}
        shapes |= {f"{prefix}experts.{part}": (count, rows, hidden) for part, rows in parts.items()}
        shapes[f"{prefix}experts.down_proj"] = (count, hidden, inner)
        return shapes
    for expert in range(moe.num_experts):
        shapes |= dense_shapes(f"{prefix}experts.{expert}.", hidden, moe.expert_size)
    return shapes


def dense_shapes(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }
