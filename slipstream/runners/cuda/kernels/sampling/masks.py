"""Masks over the vocabulary, applied at the positions that have one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _mask_kernel(logits, slots, mask_index, masks, stride, width, vocab_size, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64)
    which = tl.load(mask_index + position).to(tl.int64)
    if (which < 0) | (tl.load(slots + position) < 0):
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    byte = tl.load(masks + which * width + (ids >> 3), mask=inside, other=255).to(tl.int32)
    lost = ((byte >> (ids & 7)) & 1) == 0
    nothing = tl.full([BLOCK], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + position * stride + ids, nothing, mask=inside & lost)


def apply_masks(
    logits: Tensor,  # [positions, vocabulary], changed in place; rows may lie apart
    slots: Tensor,  # int32 [positions]; -1: padding
    mask_index: Tensor,  # int32 [positions]: which mask; -1: none
    masks: Tensor,  # uint8 [masks, bytes]: a bit a token, the lowest first
) -> None:
    """-inf for tokens that are not allowed."""
    num_positions, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert masks.is_contiguous()
    assert masks.shape[1] * 8 >= vocab_size
    _mask_kernel[(num_positions, triton.cdiv(vocab_size, _BLOCK))](
        logits, slots, mask_index, masks, logits.stride(0), masks.shape[1], vocab_size, BLOCK=_BLOCK, num_warps=4
    )
