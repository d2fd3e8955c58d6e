"""Quantises a matrix and packs it as each kind of quantised folder does. Written from the formats' descriptions, not
from the readers.

Each function takes weights [out, in] and a group, and gives the tensors by suffix and the weights they stand for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def words(codes: Tensor, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """Along the last dimension; place i of a word, the lowest bits first, holds number order[i]. int32"""
    each = codes.to(torch.int64).unflatten(-1, (-1, 32 // bits))
    word = torch.zeros(each.shape[:-1], dtype=torch.int64)
    for place, at in enumerate(order or range(32 // bits)):
        word |= each[..., at] << (bits * place)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def grouped(weight: Tensor, group: int) -> Tensor:
    return weight.unflatten(-1, (-1, weight.shape[-1] if group < 0 else group))


def symmetric(weight: Tensor, group: int, bits: int, scales: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 on, scales [out, groups], and the weights."""
    each, middle = grouped(weight, group), 2 ** (bits - 1)
    scale = (each.abs().amax(-1, keepdim=True) / (middle - 1)).to(scales)
    code = (each / scale.float()).round().clamp(-middle, middle - 1)
    return (code + middle).flatten(-2), scale[..., 0], (code * scale.float()).flatten(-2)


def asymmetric(weight: Tensor, group: int, scales: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, zero points, and the weights, of 4 bits."""
    each = grouped(weight, group)
    low, high = each.amin(-1, keepdim=True).clamp(max=0), each.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).to(scales)
    zero = (-low / scale.float()).round().clamp(0, 15)
    code = (each / scale.float() + zero).round().clamp(0, 15)
    return code.flatten(-2), scale[..., 0], zero[..., 0], ((code - zero) * scale.float()).flatten(-2)


def awq(weight: Tensor, group: int) -> Packed:
    code, scale, zero, floats = asymmetric(weight, group, torch.float16)
    stored = {
        "qweight": words(code.T, order=AWQ_ORDER),
        "qzeros": words(zero.T, order=AWQ_ORDER),
        "scales": scale.T.contiguous(),
    }
    return stored, floats


def awq_symmetric(weight: Tensor, group: int) -> Packed:
    """As AutoRound writes it with packing_format auto_round:auto_awq."""
    code, scale, floats = symmetric(weight, group, 4, torch.float16)
    zeros = words(torch.full_like(scale.T, 8), order=AWQ_ORDER)
    stored = {"qweight": words(code.T, order=AWQ_ORDER), "qzeros": zeros, "scales": scale.T.contiguous()}
    return stored, floats


def gptq(
    weight: Tensor, group: int, *, bits: int = 4, less: int = 1, g_idx: bool = True, scales: torch.dtype = torch.float16
) -> Packed:
    """Symmetric. `less`: what is taken from zero points when they are stored."""
    code, scale, floats = symmetric(weight, group, bits, scales)
    zeros = torch.full_like(scale.T, 2 ** (bits - 1) - less, dtype=torch.float32)
    stored = {
        "qweight": words(code, bits).T.contiguous(),
        "qzeros": words(zeros, bits),
        "scales": scale.T.contiguous(),
    }
    if g_idx:
        stored["g_idx"] = (torch.arange(weight.shape[1]) // (weight.shape[1] // scale.shape[1])).to(torch.int32)
    return stored, floats


def gptq_asymmetric(weight: Tensor, group: int, *, less: int = 1) -> Packed:
    code, scale, zero, floats = asymmetric(weight, group, torch.float16)
    stored = {
        "qweight": words(code).T.contiguous(),
        "qzeros": words((zero.T - less) % 16),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // group).to(torch.int32),
    }
    return stored, floats


def gptq_act_order(weight: Tensor, group: int, *, seed: int = 0) -> Packed:
    """Groups of columns that do not lie beside each other; codes stay where their columns are."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    code, scale, zero, floats = asymmetric(weight[:, order], group, torch.float16)
    back = order.argsort()
    stored = {
        "qweight": words(code[:, back]).T.contiguous(),
        "qzeros": words((zero.T - 1) % 16),
        "scales": scale.T.contiguous(),
        "g_idx": (back // group).to(torch.int32),
    }
    return stored, floats[:, back]


def pack_quantized(weight: Tensor, group: int, *, bits: int = 4) -> Packed:
    """compressed-tensors, symmetric."""
    code, scale, floats = symmetric(weight, group, bits, torch.bfloat16)
    return {
        "weight_packed": words(code, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }, floats


def pack_quantized_asymmetric(weight: Tensor, group: int) -> Packed:
    code, scale, zero, floats = asymmetric(weight, weight.shape[1] if group < 0 else group, torch.bfloat16)
    padded = torch.nn.functional.pad(zero, (0, 0, 0, -weight.shape[0] % 8))
    stored = {
        "weight_packed": words(code),
        "weight_scale": scale,
        "weight_zero_point": words(padded.T).T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, floats


def fp8(weight: Tensor, scale: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """`wide`: the scale of each weight."""
    code = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return code, code.float() * wide


def fp8_channel(weight: Tensor, group: int) -> Packed:
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    code, floats = fp8(weight, scale, scale.float())
    return {"weight": code, "weight_scale": scale}, floats


def fp8_tensor(weight: Tensor, group: int) -> Packed:
    """As ModelOpt: scalars. compressed-tensors has one element instead."""
    scale = weight.abs().max() / 448
    code, floats = fp8(weight, scale, scale)
    return {"weight": code, "weight_scale": scale, "input_scale": torch.tensor(0.37)}, floats


def fp8_tensor_static(weight: Tensor, group: int) -> Packed:
    stored, floats = fp8_tensor(weight, group)
    return {name: each.reshape(1) if name != "weight" else each for name, each in stored.items()}, floats


def fp8_block(weight: Tensor, group: int) -> Packed:
    """compressed-tensors: weight_scale for what Qwen calls weight_scale_inv."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % 128, 0, -rows % 128))
    scale = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3)) / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    code, floats = fp8(weight, scale, wide)
    return {"weight": code, "weight_scale": scale}, floats


def int8_channel(weight: Tensor, group: int) -> Packed:
    scale = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    code = (weight / scale.float()).round().clamp(-128, 127)
    return {"weight": code.to(torch.int8), "weight_scale": scale}, code * scale.float()


def fp4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two codes a byte, the even column low; and their values."""
    code = (weight.abs()[..., None] - E2M1).abs().argmin(-1)
    value = E2M1[code] * torch.where(weight < 0, -1.0, 1.0)
    code = code + 8 * (weight < 0)
    return (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8), value


def nvfp4(weight: Tensor, names: tuple[str, str]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Codes and block scales, the weights, and the factor of all scales."""
    factor = weight.abs().max() / (6 * 448)
    each = grouped(weight, 16)
    scale = (each.abs().amax(-1, keepdim=True) / 6 / factor).clamp(max=448).to(torch.float8_e4m3fn)
    wide = (scale.float() * factor).expand_as(each).flatten(-2)
    code, value = fp4_codes(weight / wide.clamp(min=1e-30))
    return {names[0]: code, names[1]: scale[..., 0]}, value * wide, factor


def nvfp4_pack_quantized(weight: Tensor, group: int) -> Packed:
    """compressed-tensors divides by its global scale."""
    stored, floats, factor = nvfp4(weight, ("weight_packed", "weight_scale"))
    return stored | {"weight_global_scale": (1 / factor).reshape(1), "input_global_scale": torch.ones(1)}, floats


def modelopt_nvfp4(weight: Tensor, group: int) -> Packed:
    stored, floats, factor = nvfp4(weight, ("weight", "weight_scale"))
    return stored | {"weight_scale_2": factor, "input_scale": torch.tensor(0.01)}, floats


def mxfp4_pack_quantized(weight: Tensor, group: int) -> Packed:
    each = grouped(weight, 32)
    exponent = (each.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    wide = exponent.exp2().expand_as(each).flatten(-2)
    code, value = fp4_codes(weight / wide)
    return {"weight_packed": code, "weight_scale": (exponent[..., 0] + 127).to(torch.uint8)}, value * wide


def with_options(pack: Callable[..., Packed], **options: object) -> Callable[[Tensor, int], Packed]:
    return lambda weight, group: pack(weight, group, **options)


PACKERS: dict[str, Callable[[Tensor, int], Packed]] = {
    "awq": awq,
    "awq-symmetric": awq_symmetric,
    "gptq": gptq,
    "gptq-v2": with_options(gptq, less=0),
    "gptq-8-bit": with_options(gptq, bits=8),
    "gptq-asymmetric": gptq_asymmetric,
    "gptq-v2-asymmetric": with_options(gptq_asymmetric, less=0),
    "gptq-act-order": gptq_act_order,
    "autoround": with_options(gptq, g_idx=False, scales=torch.bfloat16),
    "pack-quantized": pack_quantized,
    "pack-quantized-8-bit": with_options(pack_quantized, bits=8),
    "pack-quantized-asymmetric": pack_quantized_asymmetric,
    "fp8-channel": fp8_channel,
    "fp8-tensor": fp8_tensor,
    "fp8-tensor-static": fp8_tensor_static,
    "fp8-block": fp8_block,
    "int8-channel": int8_channel,
    "nvfp4-pack-quantized": nvfp4_pack_quantized,
    "modelopt-nvfp4": modelopt_nvfp4,
    "mxfp4-pack-quantized": mxfp4_pack_quantized,
}
