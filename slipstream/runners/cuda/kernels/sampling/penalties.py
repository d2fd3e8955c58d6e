"""Repetition, presence and frequency penalties, and logit bias, at positions that each have their own history.

A program owns a chunk of one position's vocabulary: it counts the history's tokens in a scratch of its own, then
changes the logits of those that occur. Counts are integers, so the result does not depend on their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_CHUNK = 16 * _BLOCK
_BIAS_BLOCK = 128

_IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)  # besides the number of occurrences in the output


@triton.jit
def _penalise_kernel(
    logits,
    slots,
    history_end,
    tokens,
    num_prompt,
    repetition,
    presence,
    frequency,
    counts,
    stride,
    max_tokens,
    vocab_size,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + position).to(tl.int64)
    if slot < 0:
        return
    factor = tl.load(repetition + slot)
    once = tl.load(presence + slot)
    each = tl.load(frequency + slot)
    if (factor == 1.0) & (once == 0.0) & (each == 0.0):
        return
    low = tl.program_id(1) * CHUNK
    high = tl.minimum(low + CHUNK, vocab_size)
    lanes = tl.arange(0, BLOCK)
    counts += position * vocab_size
    for at in range(low, high, BLOCK):
        tl.store(counts + at + lanes, tl.zeros([BLOCK], tl.int32), mask=at + lanes < high)
    tl.debug_barrier()

    end = tl.load(history_end + position)
    prompt_end = tl.minimum(tl.load(num_prompt + slot), end)
    history = tokens + slot * max_tokens
    if factor != 1.0:
        for at in range(0, prompt_end, BLOCK):
            ids = tl.load(history + at + lanes, mask=at + lanes < prompt_end, other=-1)
            marks = tl.full([BLOCK], _IN_PROMPT, tl.int32)
            tl.atomic_or(counts + ids, marks, mask=(ids >= low) & (ids < high), sem="relaxed")
    for at in range(prompt_end, end, BLOCK):
        ids = tl.load(history + at + lanes, mask=at + lanes < end, other=-1)
        tl.atomic_add(counts + ids, tl.full([BLOCK], 1, tl.int32), mask=(ids >= low) & (ids < high), sem="relaxed")
    tl.debug_barrier()

    logits += position * stride
    for at in range(low, high, BLOCK):
        # The atomics count in the second-level cache: read it there.
        count = tl.load(counts + at + lanes, mask=at + lanes < high, other=0, cache_modifier=".cg")
        value = tl.load(logits + at + lanes, mask=count != 0, other=0.0).to(tl.float32)
        value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
        sampled = (count & (_IN_PROMPT - 1)).to(tl.float32)
        value -= sampled * each + tl.where(sampled > 0, once, 0.0)
        tl.store(logits + at + lanes, value.to(logits.dtype.element_ty), mask=count != 0)


@triton.jit
def _bias_kernel(logits, slots, bias_tokens, bias_values, num_bias, stride, max_bias, vocab_size, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + position).to(tl.int64)
    if slot < 0:
        return
    logits += position * stride
    count = tl.load(num_bias + slot)
    for at in range(0, count, BLOCK):
        entries = at + tl.arange(0, BLOCK)
        ids = tl.load(bias_tokens + slot * max_bias + entries, mask=entries < count, other=-1)
        mask = (ids >= 0) & (ids < vocab_size)
        value = tl.load(bias_values + slot * max_bias + entries, mask=mask, other=0.0)
        value += tl.load(logits + ids, mask=mask, other=0.0).to(tl.float32)
        tl.store(logits + ids, value.to(logits.dtype.element_ty), mask=mask)


def penalise(
    logits: Tensor,  # [positions, vocabulary], changed in place; rows may lie apart
    slots: Tensor,  # int32 [positions]; -1: padding
    history_end: Tensor,  # int32 [positions]: length of the position's history, the slot's first tokens
    tokens: Tensor,  # int32 [slots, max tokens]
    num_prompt: Tensor,  # int32 [slots]: where the output begins
    repetition: Tensor,  # float32 [slots]; 1: off. Over the whole history, once per token
    presence: Tensor,  # float32 [slots]; 0: off. Over the output
    frequency: Tensor,  # float32 [slots]; 0: off. Over the output, per occurrence
) -> None:
    """Repetition first, then presence and frequency. Positions of slots that ask for nothing cost nothing."""
    num_positions, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert tokens.is_contiguous()
    counts = torch.empty((num_positions, vocab_size), dtype=torch.int32, device=logits.device)
    _penalise_kernel[(num_positions, triton.cdiv(vocab_size, _CHUNK))](
        logits,
        slots,
        history_end,
        tokens,
        num_prompt,
        repetition,
        presence,
        frequency,
        counts,
        logits.stride(0),
        tokens.shape[1],
        vocab_size,
        CHUNK=_CHUNK,
        BLOCK=_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,  # rounded as the reference rounds
    )


def add_bias(
    logits: Tensor,  # [positions, vocabulary], changed in place; rows may lie apart
    slots: Tensor,  # int32 [positions]; -1: padding
    bias_tokens: Tensor,  # int32 [slots, max bias]: distinct tokens
    bias_values: Tensor,  # float32 [slots, max bias]
    num_bias: Tensor,  # int32 [slots]
) -> None:
    num_positions, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert bias_tokens.shape == bias_values.shape
    assert bias_tokens.is_contiguous()
    assert bias_values.is_contiguous()
    _bias_kernel[(num_positions,)](
        logits,
        slots,
        bias_tokens,
        bias_values,
        num_bias,
        logits.stride(0),
        bias_tokens.shape[1],
        vocab_size,
        BLOCK=_BIAS_BLOCK,
        num_warps=4,
    )
