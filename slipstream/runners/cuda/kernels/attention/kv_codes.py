"""Keys and values in FP8 inside kernels: codes (e4m3), and one scale for those of a head at a position.

By integer arithmetic, which every GPU has and the interpreter as well; many GPUs convert no e4m3 themselves. A code's
exponent and mantissa, moved to where float16 has its own, are the code's value times 2^-8, also where it is subnormal.
runners/torch/caches.py is the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.runners.torch.caches import LARGEST, LEAST_SCALE, LayerKv
from slipstream.runners.torch.ops import HeadShape

_LARGEST, _LEAST = tl.constexpr(LARGEST), tl.constexpr(LEAST_SCALE)
_UNIT = tl.constexpr(256.0)  # by which decoded values are too small
_CUT_OFF = tl.constexpr(448.0)
_LEAST_NORMAL = tl.constexpr(2.0**-6)


def check_layout(kv: LayerKv, heads: HeadShape) -> None:
    """That kernels read caches by: a block's heads after each other, with or without scales behind them."""
    block_size = kv.k.shape[2]
    assert kv.k.stride() == kv.v.stride()
    assert kv.k.stride()[1:] == (block_size * heads.dim, heads.dim, 1)
    for scale in (kv.k_scale, kv.v_scale):
        if scale is not None:
            assert kv.k.element_size() == 1
            assert scale.stride() == (kv.k.stride(0) // 2, block_size, 1)


@triton.jit
def decoded(codes, dtype: tl.constexpr):
    """Exact in any type. The scales of ``loaded_scales`` go with them."""
    bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16512  # 0xBF80: without the sign's second copy
    return bits.to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def loaded_scales(scales):
    """float32, for codes as ``decoded`` makes them. scales: pointers"""
    return tl.load(scales).to(tl.float32) * _UNIT


@triton.jit
def encoded(x):
    """Codes, rounded to the nearest, ties to even, and scales. x: float32 [rows, dim] -> [rows, dim], [rows]"""
    bits = (tl.max(tl.abs(x), axis=1) / _LARGEST).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536  # of the nearest bfloat16
    scale = tl.maximum(bits.to(tl.float32, bitcast=True), _LEAST)
    bits = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)).to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    size = bits.to(tl.float32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the exponent's bias is 7, not 127
    # Below, codes are multiples of 2^-9, the last bit of floats from 2^14 to 2^15.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < _LEAST_NORMAL, small, normal)
    code = tl.where(size < _CUT_OFF, code, 0x7F)  # not a number
    return (code | sign).to(tl.uint8), scale.to(tl.bfloat16)
