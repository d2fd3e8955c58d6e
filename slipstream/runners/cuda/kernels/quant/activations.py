"""Activations in FP8, rounded on the fly: a code (e4m3) times the scale of a token's ``TILE`` columns.

The scale is the largest magnitude over 448, in float32; codes are rounded to the nearest, ties to even. Codes lie in
the order of ``Fp8Matrix.codes``, so that a product may read both as they are: a sum does not care for the order.
A tile with a value that is infinite or no number gets a scale that is no number, and so do the token's products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options
from slipstream.runners.cuda.kernels.quant.fp8 import MAX_VALUE, TILE

MAX_BLOCK = 256  # tokens: no product takes more at once
_MAX_VALUE = tl.constexpr(MAX_VALUE)
_SMALLEST = tl.constexpr(2.0**-100)  # of a scale, times 448: neither it nor its inverse leaves float32's normal range


@dataclass(frozen=True, slots=True)
class Fp8Activations:
    codes: Tensor  # float8 [tokens, columns], contiguous
    scales: Tensor  # float32 [tiles, tokens as padded]: finite beyond the last token, too


@triton.jit
def fp8_codes(x, inverse):
    """x times inverse, rounded to e4m3: the codes as int32. Beyond 448 the largest code. x: float32"""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x) * inverse
    size_bits = size.to(tl.int32, bitcast=True)
    rounded = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960  # 3 bits after the first, exponent - 120
    # Below 2^-6 codes are multiples of 2^-9, which is the last bit of a float32 next to 2^14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.minimum(tl.where(size < 0.015625, small, rounded), 0x7E)
    return codes | ((bits >> 24) & 0x80)


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_kernel(
    x, words, scales, num_tokens, stride, padded, WIDTH: tl.constexpr, T: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """T tokens of one tile."""
    launch_dependents_and_wait()
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    tile = tl.program_id(1)
    inside = (tokens < num_tokens)[:, None]
    columns = tl.arange(0, K // 2)
    source = x + tokens.to(tl.int64)[:, None] * stride + (tile * K + columns)[None, :]
    near = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    far = tl.load(source + K // 2, mask=inside, other=0.0).to(tl.float32)
    # As whole numbers they compare as sizes do, and what is no number is larger than all that are.
    near_size = near.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    far_size = far.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_size = tl.max(tl.maximum(near_size, far_size), axis=1)
    finite = largest_size < 0x7F800000
    near = tl.where(finite[:, None], near, 0.0)
    far = tl.where(finite[:, None], far, 0.0)
    largest = tl.maximum(tl.where(finite, largest_size, 0).to(tl.float32, bitcast=True), _SMALLEST)
    inverse = tl.div_rn(tl.full([T], _MAX_VALUE, tl.float32), largest)[:, None]
    scale = tl.where(finite, tl.div_rn(largest, tl.full([T], _MAX_VALUE, tl.float32)), float("nan"))
    tl.store(scales + tile * padded + tokens, scale, mask=tokens < padded)
    word = fp8_codes(near, inverse) | (fp8_codes(far, inverse) << 8)
    target = words + tokens.to(tl.int64)[:, None] * (WIDTH // 2) + (tile * (K // 2) + columns)[None, :]
    tl.store(target, word.to(tl.int16), mask=inside)


def padded_tokens(num_tokens: int) -> int:
    """As many as whole blocks of a product have, whatever their size."""
    if num_tokens > MAX_BLOCK:
        return -(-num_tokens // MAX_BLOCK) * MAX_BLOCK
    return max(16, 1 << (num_tokens - 1).bit_length())


def quantized_activations(x: Tensor) -> Fp8Activations:
    """x: [tokens, columns] of any float type; rows may lie apart."""
    num_tokens, width = x.shape
    assert width % TILE == 0
    assert x.stride(1) == 1
    padded, each = padded_tokens(num_tokens), 1 if num_tokens <= 16 else 4 if num_tokens <= 512 else 16
    codes = torch.empty((num_tokens, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((width // TILE, padded), dtype=torch.float32, device=x.device)
    _quantize_kernel[(triton.cdiv(padded, each), width // TILE)](
        x, codes.view(torch.int16), scales, num_tokens, x.stride(0), padded, WIDTH=width, T=each, K=TILE,
        num_warps=1 if each < 16 else 4, enable_fp_fusion=False, **pdl_options(x.device),
    )  # fmt: skip
    return Fp8Activations(codes, scales)
