"""The sampled token of each position: argmax of the logits, or of logits with the noise of (seed, position, token id).

The formula is the one of ``noise.py``, bit for bit up to the platform's logarithm. Two kernels: partial maxima over
chunks of the vocabulary, then one program a position over the partials. The token does not depend on the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options

_BLOCK = 1024
_MAX_CHUNK = 16 * _BLOCK
_PROGRAMS = 512  # about four to a processor: enough to fill the largest GPUs

_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # below every logit that is not -inf, and finite: differences are no NaN
_NO_TOKEN: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _noise_key(seed, position):
    """64 bits for (seed, position): splitmix64. uint64"""
    z = (seed.to(tl.uint64) ^ (position.to(tl.uint64) * 0x9E3779B97F4A7C15)) + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _gumbel(key, ids):
    """Standard Gumbel noise of the token ids under a key. float32, as ids"""
    x = ids.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = x ^ (x >> 13) ^ (key >> 32).to(tl.uint32)
    x = x * 0xC2B2AE35
    x = x ^ (x >> 16)
    uniform = ((x >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _some(row, ids, end):
    return tl.load(row + ids, mask=ids < end, other=float("-inf")).to(tl.float32)


@triton.jit
def _partial_kernel(
    logits,
    slots,
    index,
    inv_temperature,
    seeds,
    greedy,
    best_values,
    best_ids,
    peaks,
    masses,
    stride,
    vocab_size,
    chunk,
    SURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a position and chunk: the best value and its lowest id; with SURE, the largest logit and the sum."""
    launch_dependents_and_wait()
    position = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * chunk
    lanes = tl.arange(0, BLOCK)
    row = logits + position * stride
    value = _some(row, start + lanes, vocab_size)  # the next logits are always being loaded
    slot = tl.load(slots + position)
    if slot < 0:
        return
    noisy = tl.load(greedy + slot).to(tl.int32) == 0
    scale = tl.load(inv_temperature + slot)
    key = _noise_key(tl.load(seeds + slot), tl.load(index + position))

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = start + lanes
    peak = tl.full([BLOCK], _LOWEST, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for at in range(start, start + chunk, BLOCK):
        ids = at + lanes
        following = _some(row, ids + BLOCK, tl.minimum(vocab_size, start + chunk))
        if SURE:
            higher = tl.maximum(peak, value)
            mass = mass * tl.exp(peak - higher) + tl.exp(value - higher)
            peak = higher
        if noisy:
            value = value * scale + _gumbel(key, ids)
        better = value > best
        best = tl.where(better, value, best)
        best_id = tl.where(better, ids, best_id)
        value = following

    at_part = position * tl.num_programs(1) + tl.program_id(1)
    top = tl.max(best, axis=0)
    tl.store(best_values + at_part, top)
    tl.store(best_ids + at_part, tl.min(tl.where(best == top, best_id, _NO_TOKEN), axis=0))
    if SURE:
        highest = tl.max(peak, axis=0)
        tl.store(peaks + at_part, highest)
        tl.store(masses + at_part, tl.sum(mass * tl.exp(peak - highest), axis=0))


@triton.jit(do_not_specialize=["num_chunks"])
def _combine_kernel(
    slots,
    best_values,
    best_ids,
    peaks,
    masses,
    tokens,
    sure,
    vocab_size,
    num_chunks,
    SURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a position, over its chunks' partials."""
    launch_dependents_and_wait()
    position = tl.program_id(0).to(tl.int64)
    if tl.load(slots + position) < 0:
        tl.store(tokens + position, 0)
        if SURE:
            tl.store(sure + position, 0.0)
        return
    chunks = tl.arange(0, BLOCK)
    mask = chunks < num_chunks
    parts = position * num_chunks + chunks
    values = tl.load(best_values + parts, mask=mask, other=float("-inf"))
    ids = tl.load(best_ids + parts, mask=mask, other=_NO_TOKEN)
    lowest = tl.min(tl.where(values == tl.max(values, axis=0), ids, _NO_TOKEN), axis=0)
    # A row of NaN has no maximum, but readers rely on a valid token.
    tl.store(tokens + position, tl.minimum(lowest, vocab_size - 1))
    if SURE:
        peak = tl.load(peaks + parts, mask=mask, other=_LOWEST)
        mass = tl.load(masses + parts, mask=mask, other=0.0)
        total = tl.sum(mass * tl.exp(peak - tl.max(peak, axis=0)), axis=0)
        tl.store(sure + position, 1.0 / total)


def choose(
    logits: Tensor,  # [positions, vocabulary]: any float; rows may lie apart
    slots: Tensor,  # int32 [positions]; -1: padding, its token is 0
    index: Tensor,  # int32 [positions]: the index of the sampled token in its row
    inv_temperature: Tensor,  # float32 [slots]
    seeds: Tensor,  # int64 [slots]
    greedy: Tensor,  # bool or uint8 [slots]
) -> Tensor:
    """One token per position; of equals, the lowest id. int32 [positions]"""
    return _choose(logits, slots, index, inv_temperature, seeds, greedy, None)


def choose_sure(
    logits: Tensor, slots: Tensor, index: Tensor, inv_temperature: Tensor, seeds: Tensor, greedy: Tensor
) -> tuple[Tensor, Tensor]:
    """``choose``, and from the same pass the largest probability of each row at temperature 1. float32 [positions]"""
    sure = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    return _choose(logits, slots, index, inv_temperature, seeds, greedy, sure), sure


def _choose(
    logits: Tensor,
    slots: Tensor,
    index: Tensor,
    inv_temperature: Tensor,
    seeds: Tensor,
    greedy: Tensor,
    sure: Tensor | None,
) -> Tensor:
    num_positions, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert slots.shape == index.shape == (num_positions,)
    chunk = _chunk_size(num_positions, vocab_size)
    num_chunks = triton.cdiv(vocab_size, chunk)
    # The partials: best value, its id, and for the confidence the largest logit and the sum. [4, positions, chunks]
    values, ids, peaks, masses = torch.empty(
        (4, num_positions, num_chunks), dtype=torch.float32, device=logits.device
    ).unbind()
    ids = ids.view(torch.int32)
    tokens = torch.empty(num_positions, dtype=torch.int32, device=logits.device)
    _partial_kernel[(num_positions, num_chunks)](
        logits,
        slots,
        index,
        inv_temperature,
        seeds,
        greedy,
        values,
        ids,
        peaks,
        masses,
        logits.stride(0),
        vocab_size,
        chunk,
        SURE=sure is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # the product is rounded before the noise is added, as in the reference
        **pdl_options(logits.device),
    )
    _combine_kernel[(num_positions,)](
        slots,
        values,
        ids,
        peaks,
        masses,
        tokens,
        sure,
        vocab_size,
        num_chunks,
        SURE=sure is not None,
        BLOCK=triton.next_power_of_2(triton.cdiv(vocab_size, _BLOCK)),  # the same for any number of positions
        num_warps=1,
        **pdl_options(logits.device),
    )
    return tokens


def _chunk_size(num_positions: int, vocab_size: int) -> int:
    """Tokens a program reads: many programs for few positions, long programs for many."""
    fair = triton.cdiv(num_positions * vocab_size, _PROGRAMS)
    return int(min(_MAX_CHUNK, max(_BLOCK, triton.next_power_of_2(fair))))
