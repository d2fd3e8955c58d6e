"""top_k, top_p and min_p without sorting the vocabulary.

Tokens rank by value, of equals the lower id first, and a prefix of that order stays: a border value, and how
many of its equals stay. The border is found by bisection on the bits of the value. Three kernels: a survey of the rows
(the largest value of each small group), the border among the few tokens the survey leaves, and the truncation. Each
row's result depends on that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUP = 64  # tokens that share an entry of the survey
_CHUNK = 2048  # tokens a program surveys, or takes in at once
_MAX_CANDIDATES = 4096  # beyond, the border is searched in the whole row
_BLOCK = 4096  # tokens a program truncates at once

_LOWEST: tl.constexpr = tl.constexpr(-1.0e30)  # below every logit that is not -inf, and finite: differences are no NaN
_BELOW_ALL: tl.constexpr = tl.constexpr(-0x80000000)  # a rank key below every value's


@triton.jit
def _rank_key(value):
    """int32 that orders as the float32 does; both zeros are one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key_value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _settings(position, slots, top_k, top_p, min_p, vocab_size):
    """The slot (-1: padding, or no truncation), its k (0: off), p (1: off) and min_p (0: off)."""
    slot = tl.load(slots + position)
    valid = tl.maximum(slot, 0)
    k = tl.load(top_k + valid)
    k = tl.where(k < vocab_size, tl.maximum(k, 0), 0)
    p = tl.load(top_p + valid)
    share = tl.load(min_p + valid)
    return tl.where((k > 0) | (p < 1.0) | (share > 0.0), slot, -1), k, p, share


@triton.jit
def _survey_kernel(
    logits,
    slots,
    inv_temperature,
    top_k,
    top_p,
    min_p,
    group_peaks,
    chunk_peaks,
    chunk_masses,
    stride,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a position and chunk: the largest value of each group, and the chunk's sum of exp."""
    position = tl.program_id(0).to(tl.int64)
    slot, _, _, _ = _settings(position, slots, top_k, top_p, min_p, vocab_size)
    if slot < 0:
        return
    groups = tl.program_id(1) * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(logits + position * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    peaks = tl.max(values, axis=1)
    tl.store(group_peaks + position * num_groups + groups, peaks, mask=groups < num_groups)
    peak = tl.maximum(tl.max(peaks, axis=0), _LOWEST)
    weights = tl.exp((values - peak) * tl.load(inv_temperature + slot))
    at_part = position * tl.num_programs(1) + tl.program_id(1)
    tl.store(chunk_peaks + at_part, peak)
    tl.store(chunk_masses + at_part, tl.sum(tl.sum(weights, axis=1), axis=0))


@triton.jit
def _above(values, count, key, peak, scale, ONES: tl.constexpr, BLOCK: tl.constexpr):
    """How many values rank above the key, or their sum of exp. float32"""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, count, BLOCK):
        value = tl.load(values + at + lanes, mask=at + lanes < count, other=float("-inf")).to(tl.float32)
        if ONES:
            weight = tl.where(at + lanes < count, 1.0, 0.0)
        else:
            weight = tl.exp((value - peak) * scale)
        total += tl.where(_rank_key(value) > key, weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _lowest_border(values, count, low, high, target, peak, scale, ONES: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key in [low, high] with less than the target above it. int32"""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        if _above(values, count, middle.to(tl.int32), peak, scale, ONES, BLOCK) < target:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.int32)


@triton.jit
def _nth_equal(values, count, key, nth, BLOCK: tl.constexpr):
    """Index of the nth value of this key, or of the last one if there are fewer; -1 if there is none. int32"""
    lanes = tl.arange(0, BLOCK)
    found = tl.full([], -1, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for at in range(0, count, BLOCK):
        value = tl.load(values + at + lanes, mask=at + lanes < count, other=0.0).to(tl.float32)
        equal = ((_rank_key(value) == key) & (at + lanes < count)).to(tl.int32)
        ranks = seen + tl.cumsum(equal, axis=0)
        found = tl.maximum(found, tl.max(tl.where((equal != 0) & (ranks <= nth), at + lanes, -1), axis=0))
        seen += tl.sum(equal, axis=0)
    return found


@triton.jit
def _border(values, count, k, p, low, peak, row_mass, scale, BLOCK: tl.constexpr):
    """The border's key, and the index of the last of its equals that stays (-1: none). int32, int32"""
    high = _rank_key(peak)
    border = low
    stay = tl.full([], 0x7FFFFFFF, tl.int32)
    mass = row_mass
    if k > 0:
        border = _lowest_border(values, count, low, high, k.to(tl.float32), peak, scale, True, BLOCK)
        over = _above(values, count, border, peak, scale, True, BLOCK)
        equals = _above(values, count, border - 1, peak, scale, True, BLOCK) - over
        stay = k - over.to(tl.int32)
        at_border = tl.minimum(equals, stay.to(tl.float32)) * tl.exp((_key_value(border) - peak) * scale)
        mass = _above(values, count, border, peak, scale, False, BLOCK) + at_border
    if p < 1.0:
        lower = border
        border = _lowest_border(values, count, lower, high, p * mass, peak, scale, False, BLOCK)
        room = p * mass - _above(values, count, border, peak, scale, False, BLOCK)
        # Of equals, the i-th stays while the mass ranked before it is less than p: at least the first.
        equals = tl.ceil(tl.div_rn(room, tl.exp((_key_value(border) - peak) * scale)))
        equals = tl.maximum(tl.minimum(equals, 1.0e9), 1.0).to(tl.int32)
        stay = tl.where(border == lower, tl.minimum(stay, equals), equals)
    return border, _nth_equal(values, count, border, stay, BLOCK)


@triton.jit
def _floor(group_max, inside, k, p, peak, row_mass, scale, vocab_size, num_groups):
    """A lower bound of the border, from the survey alone. float32"""
    floor = tl.full([], float("-inf"), tl.float32)
    if k > 0:
        if k <= num_groups:
            # Each group's largest is a token: the k-th largest token is not below the k-th largest of them.
            keys = tl.where(inside, _rank_key(group_max), _BELOW_ALL)
            low = tl.min(tl.where(inside, keys, 0x7FFFFFFF), axis=0).to(tl.int64)
            high = _rank_key(peak).to(tl.int64)
            while low < high:
                middle = (low + high) >> 1
                if tl.sum((keys > middle.to(tl.int32)).to(tl.int32), axis=0) < k:
                    high = middle
                else:
                    low = middle + 1
            floor = _key_value(low.to(tl.int32))
    else:
        # Were all tokens as likely as one this far down, they would not hold half of the mass that top_p may drop.
        floor = peak + tl.div_rn(tl.log(0.5 * (1.0 - p) * row_mass / vocab_size), scale)
        floor -= tl.abs(floor) * 2.4e-7
    return floor


@triton.jit
def _gather(
    row,
    group_list,
    num_listed,
    floor,
    values,
    ids,
    vocab_size,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """Write the values of the listed groups that are not below the floor, in the order of their ids. -> how many"""
    lanes = tl.arange(0, CHUNK)
    count = tl.full([], 0, tl.int32)
    for at in range(0, num_listed, CHUNK // GROUP):
        listed = at + lanes // GROUP
        token = tl.load(group_list + listed, mask=listed < num_listed, other=0) * GROUP + lanes % GROUP
        value = tl.load(row + token, mask=(listed < num_listed) & (token < vocab_size), other=float("-inf"))
        value = value.to(tl.float32)
        taken = (value >= floor) & (value > float("-inf"))
        targets = count + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(values + targets, value, mask=taken & (targets < MAX_CANDIDATES))
        tl.store(ids + targets, token, mask=taken & (targets < MAX_CANDIDATES))
        count += tl.sum(taken.to(tl.int32), axis=0)
    return count


@triton.jit
def _border_kernel(
    logits,
    slots,
    inv_temperature,
    top_k,
    top_p,
    min_p,
    group_peaks,
    chunk_peaks,
    chunk_masses,
    group_lists,
    candidates,
    candidate_ids,
    border_keys,
    border_ids,
    row_peaks,
    stride,
    vocab_size,
    num_groups,
    num_chunks,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    WIDE_GROUPS: tl.constexpr,
    WIDE_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a position."""
    position = tl.program_id(0).to(tl.int64)
    slot, k, p, _ = _settings(position, slots, top_k, top_p, min_p, vocab_size)
    if slot < 0:
        return
    scale = tl.load(inv_temperature + slot)
    chunks = tl.arange(0, WIDE_CHUNKS)
    peaks = tl.load(chunk_peaks + position * num_chunks + chunks, mask=chunks < num_chunks, other=_LOWEST)
    masses = tl.load(chunk_masses + position * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    peak = tl.max(peaks, axis=0)
    row_mass = tl.sum(masses * tl.exp((peaks - peak) * scale), axis=0)
    key = tl.full([], _BELOW_ALL, tl.int32)
    last = tl.full([], -1, tl.int32)
    if (k > 0) | (p < 1.0):
        row = logits + position * stride
        groups = tl.arange(0, WIDE_GROUPS)
        inside = groups < num_groups
        group_max = tl.load(group_peaks + position * num_groups + groups, mask=inside, other=float("-inf"))
        floor = _floor(group_max, inside, k, p, peak, row_mass, scale, vocab_size, num_groups)
        listed = (inside & (group_max >= floor)).to(tl.int32)
        group_list = group_lists + position * num_groups
        tl.store(group_list + tl.cumsum(listed, axis=0) - 1, groups, mask=listed != 0)
        tl.debug_barrier()
        values = candidates + position * MAX_CANDIDATES
        ids = candidate_ids + position * MAX_CANDIDATES
        count = _gather(
            row, group_list, tl.sum(listed, axis=0), floor, values, ids, vocab_size, GROUP, CHUNK, MAX_CANDIDATES
        )
        tl.debug_barrier()
        low = _rank_key(floor)
        if count <= MAX_CANDIDATES:
            key, last = _border(values, count, k, p, low, peak, row_mass, scale, BLOCK)
            last = tl.load(ids + tl.maximum(last, 0), mask=last >= 0, other=-1)
        else:
            key, last = _border(row, vocab_size, k, p, low, peak, row_mass, scale, BLOCK)
    tl.store(border_keys + position, key)
    tl.store(border_ids + position, last)
    tl.store(row_peaks + position, peak)


@triton.jit
def _truncate_kernel(
    logits,
    slots,
    inv_temperature,
    top_k,
    top_p,
    min_p,
    border_keys,
    border_ids,
    row_peaks,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    slot, _, _, share = _settings(position, slots, top_k, top_p, min_p, vocab_size)
    if slot < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    targets = logits + position * stride + ids
    values = tl.load(targets, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    keys = _rank_key(values)
    border = tl.load(border_keys + position)
    keep = (keys > border) | ((keys == border) & (ids <= tl.load(border_ids + position)))
    keep &= tl.exp((values - tl.load(row_peaks + position)) * tl.load(inv_temperature + slot)) >= share
    lost = tl.full([BLOCK], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(targets, lost, mask=(ids < vocab_size) & (keep == 0))


def truncate(
    logits: Tensor,  # [positions, vocabulary], changed in place; rows may lie apart
    slots: Tensor,  # int32 [positions]; -1: padding
    inv_temperature: Tensor,  # float32 [slots]
    top_k: Tensor,  # int32 [slots]; 0: off
    top_p: Tensor,  # float32 [slots]; 1: off
    min_p: Tensor,  # float32 [slots]; 0: off
) -> None:
    """-inf for tokens dropped by top_k, then top_p, then min_p, at the slot's temperature. The best token stays."""
    num_positions, vocab_size = logits.shape
    assert logits.stride(1) == 1
    device = logits.device
    num_groups, num_chunks = triton.cdiv(vocab_size, _GROUP), triton.cdiv(vocab_size, _CHUNK)
    settings = (slots, inv_temperature, top_k, top_p, min_p)
    # Scratch per position: the survey, the candidates and the border.
    floats = torch.empty(num_positions * (num_groups + 2 * num_chunks + _MAX_CANDIDATES + 1), device=device)
    ints = torch.empty(num_positions * (num_groups + _MAX_CANDIDATES + 2), dtype=torch.int32, device=device)
    group_peaks, chunk_peaks, chunk_masses, candidates, row_peaks = floats.split(
        [num_positions * size for size in (num_groups, num_chunks, num_chunks, _MAX_CANDIDATES, 1)]
    )
    group_lists, candidate_ids, border_keys, border_ids = ints.split(
        [num_positions * size for size in (num_groups, _MAX_CANDIDATES, 1, 1)]
    )
    _survey_kernel[(num_positions, num_chunks)](
        logits, *settings, group_peaks, chunk_peaks, chunk_masses, logits.stride(0), vocab_size, num_groups,
        GROUP=_GROUP, CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
    _border_kernel[(num_positions,)](
        logits, *settings, group_peaks, chunk_peaks, chunk_masses, group_lists, candidates, candidate_ids,
        border_keys, border_ids, row_peaks, logits.stride(0), vocab_size, num_groups, num_chunks,
        GROUP=_GROUP, CHUNK=_CHUNK, MAX_CANDIDATES=_MAX_CANDIDATES,
        WIDE_GROUPS=triton.next_power_of_2(num_groups), WIDE_CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCK=1024, num_warps=8,
    )  # fmt: skip
    _truncate_kernel[(num_positions, triton.cdiv(vocab_size, _BLOCK))](
        logits, *settings, border_keys, border_ids, row_peaks, logits.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=8
    )
