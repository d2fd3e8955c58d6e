"""Benchmarks: the tensors of a random shape as GGUF stores them, the very numbers that we compute with on a CPU.

The runner makes merged matrices in one piece; so does this, and splits them. Knows GGUF's names and its order of rows
and columns, not its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from slipstream.load.random.model import RandomCheckpoint
from slipstream.load.spec import GdnSpec, MoeSpec
from slipstream.runners.cpu.quantize import q8_0_blocks
from slipstream.runners.torch.ops import TorchOps
from slipstream.runners.torch.random_weights import RandomWeights
from slipstream.runners.torch.weights import DenseFormat

Stored = Literal["Q8_0", "BF16", "F32"]
TWINS: dict[str, Stored] = {"auto": "BF16", "bfloat16": "BF16", "float32": "F32", "int8": "Q8_0"}  # by dtype
ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")  # float32 in every file; here with the numbers of the quantized ones
SLAB = 1 << 24  # elements quantized at once
Named = Iterator[tuple[str, Tensor]]


def twin_tensors(checkpoint: RandomCheckpoint, dtype: str) -> Iterator[tuple[str, np.ndarray[Any, Any], Stored]]:
    """Name, bytes [..., out, bytes of a row] and type of each. The head's are left out."""
    for name, tensor in TwinTensors(checkpoint).all():
        data, stored = _stored(name, tensor, TWINS[dtype])
        yield name, data.numpy(), stored


class TwinTensors(RandomWeights):
    """Matrices come as bfloat16 [out, in] or [experts, out, in], everything else as float32."""

    def __init__(self, checkpoint: RandomCheckpoint) -> None:
        ops = TorchOps(torch.device("cpu"), torch.float32)
        super().__init__(checkpoint, ops, DenseFormat(ops), lambda num_bytes: None)
        self.spec = checkpoint.spec

    def all(self) -> Named:
        yield "token_embd.weight", self._rows(["model.embed_tokens"], [self.spec.vocab_size])[0]
        if not self.spec.tied:
            yield "output.weight", self._rows(["lm_head"], [self.spec.vocab_size])[0]
        yield "output_norm.weight", self._norm("model.norm", self.spec.hidden_size)
        for layer, kind in enumerate(self.spec.layer_kinds):
            parts = self._layer(f"model.layers.{layer}", kind == "full_attention")
            yield from ((f"blk.{layer}.{name}", tensor) for name, tensor in parts)

    def _layer(self, name: str, full_attention: bool) -> Named:
        yield "attn_norm.weight", self._norm(f"{name}.input_layernorm", self.spec.hidden_size)
        yield "post_attention_norm.weight", self._norm(f"{name}.post_attention_layernorm", self.spec.hidden_size)
        yield from self._attention(f"{name}.self_attn") if full_attention else self._gdn(f"{name}.linear_attn")
        if self.spec.moe is None:
            yield from self._mlp(f"{name}.mlp", self.spec.intermediate_size)
        else:
            yield from self._moe(f"{name}.mlp", self.spec.moe)

    def _attention(self, name: str) -> Named:
        """Ours has the rows q, k, v, gate; GGUF's attn_q has query and gate alternating by head."""
        spec, dim = self.spec, self.spec.head_dim
        q_rows, kv_rows = spec.num_heads * dim, spec.num_kv_heads * dim
        names = [f"{name}.{part}_proj" for part in ("q", "k", "v")]
        q, k, v, gate = self._rows(names, [q_rows, kv_rows, kv_rows, q_rows])
        # [heads, query or gate, dim, in]
        mixed = torch.stack([part.view(spec.num_heads, dim, -1) for part in (q, gate)], 1)
        yield "attn_q.weight", mixed.flatten(0, 2)
        yield "attn_k.weight", k
        yield "attn_v.weight", v
        yield "attn_output.weight", self._rows([f"{name}.o_proj"], [spec.hidden_size], q_rows)[0]
        yield "attn_q_norm.weight", self._norm(f"{name}.q_norm", dim)
        yield "attn_k_norm.weight", self._norm(f"{name}.k_norm", dim)

    def _gdn(self, name: str) -> Named:
        gdn, hidden = self.spec.gdn, self.spec.hidden_size
        assert gdn is not None
        values = gdn.num_v_heads * gdn.v_dim
        keys = gdn.conv_channels - values
        heads, rows = tiled(gdn, 1), tiled(gdn, gdn.v_dim)
        channels = torch.cat([torch.arange(keys), keys + rows])
        parts = [f"{name}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        qkv, z, b, a = self._rows(parts, [gdn.conv_channels, values, gdn.num_v_heads, gdn.num_v_heads])
        yield "attn_qkv.weight", qkv[channels]
        yield "attn_gate.weight", z[rows]
        yield "ssm_beta.weight", b[heads]
        yield "ssm_alpha.weight", a[heads]
        yield "ssm_out.weight", self._rows([f"{name}.out_proj"], [hidden], values)[0][:, rows]
        conv = self.tensor(f"{name}.conv1d.weight", (gdn.conv_channels, 1, gdn.conv_kernel))
        yield "ssm_conv1d.weight", conv[channels, 0]
        yield "ssm_a", -self.vector(f"{name}.A_log", gdn.num_v_heads).exp()[heads]
        yield "ssm_dt.bias", self.vector(f"{name}.dt_bias", gdn.num_v_heads)[heads]
        yield "ssm_norm.weight", self.vector(f"{name}.norm.weight", gdn.v_dim)

    def _mlp(self, name: str, inner: int, suffix: str = "") -> Named:
        gate, up = self._rows([f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner])
        yield f"ffn_gate{suffix}.weight", gate
        yield f"ffn_up{suffix}.weight", up
        yield f"ffn_down{suffix}.weight", self._rows([f"{name}.down_proj"], [self.spec.hidden_size], inner)[0]

    def _moe(self, name: str, moe: MoeSpec) -> Named:
        count, inner, hidden = moe.num_experts, moe.expert_size, self.spec.hidden_size
        router, shared = self._rows([f"{name}.gate", f"{name}.shared_expert_gate"], [count, 1])
        yield "ffn_gate_inp.weight", router
        yield "ffn_gate_inp_shexp.weight", shared
        yield from self._mlp(f"{name}.shared_expert", moe.shared_size, "_shexp")
        both = self._matrix_of([f"{name}.experts.gate_up_proj"], (count, 2 * inner, hidden))
        yield "ffn_gate_exps.weight", both[:, :inner]
        yield "ffn_up_exps.weight", both[:, inner:]
        yield "ffn_down_exps.weight", self._matrix_of([f"{name}.experts.down_proj"], (count, hidden, inner))

    def _rows(self, names: Sequence[str], outs: Sequence[int], num_in: int | None = None) -> list[Tensor]:
        """The merged matrix of ``names``, split as ``outs`` say."""
        shape = (sum(outs), num_in or self.spec.hidden_size)
        merged = self._matrix_of([f"{name}.weight" for name in names], shape)
        return list(torch.split(merged, list(outs)))

    def _norm(self, name: str, size: int) -> Tensor:
        weight = self.vector(f"{name}.weight", size)
        return weight + 1.0 if self.spec.norm_plus_one else weight


def tiled(gdn: GdnSpec, width: int) -> Tensor:
    """Where GGUF's value heads, ``width`` rows each, come from: ours are grouped by key head, its go round them."""
    each = torch.arange(gdn.num_v_heads * width).view(gdn.num_k_heads, -1, width)
    return each.transpose(0, 1).flatten()


def _stored(name: str, tensor: Tensor, form: Stored) -> tuple[Tensor, Stored]:
    """Bytes [..., out, bytes of a row], and their type. What is no matrix stays float32."""
    if tensor.dtype == torch.float32:
        return _bytes(tensor), "F32"
    if form == "Q8_0" and tensor.shape[-1] % 32:
        form = "BF16"  # as our kernels do
    if name.split(".")[-2] in ROUTERS:
        exact = dequantized(_quantized(tensor)) if form == "Q8_0" else tensor.float()
        return _bytes(exact.squeeze(0)), "F32"
    if form == "Q8_0":
        return _quantized(tensor), "Q8_0"
    return _bytes(tensor if form == "BF16" else tensor.float()), form


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _quantized(tensor: Tensor) -> Tensor:
    """Slab by slab: quantization takes several times the matrix's memory."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    slabs = [q8_0_blocks(slab) for slab in rows.split(max(1, SLAB // rows.shape[1]))]
    return torch.cat(slabs).view(*tensor.shape[:-1], -1)


def dequantized(blocks: Tensor) -> Tensor:
    """The numbers that Q8_0 blocks stand for. float32 [rows, columns]"""
    each = blocks.view(blocks.shape[0], -1, 34)  # a half-precision scale, 32 codes
    scale, codes = each[..., :2].contiguous().view(torch.float16), each[..., 2:].contiguous().view(torch.int8)
    return (scale.float() * codes.float()).flatten(1)
