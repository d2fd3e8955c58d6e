"""The tile configs of attention's launches, and the parts in which contexts are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import triton
import triton.language as tl

PROMPT_TILE = 64  # tokens of one piece of attention work where prompts are read
SHORTEST_SPLIT = tl.constexpr(128)  # positions: below it, merging costs more than the split gains
LONG_CONTEXT = 8192
LONGEST_UNSPLIT = 32768  # positions: up to it, steps of many tokens are read whole
MANY_TOKENS = 512  # that fill the processors, and more
MAX_PARTS = 12
MAX_PART_TOKENS, FEW_PART_TOKENS = 4096, 2048  # of long contexts, of others: 24 heads of 256 take 25 KB each
NEARLY = 1.03  # times the shortest time: then fewer parts are better, since merging them is not counted
SCRATCH_BYTES = 10 << 10  # of a program, at most, beside queries, keys and values: as compiled, 2 to 8.5 KiB
WIDE_BYTES = 197_000  # shared memory of a program with 128 pairs of width 256: queries, two buffers of keys and values


@dataclass(frozen=True, slots=True)
class Blocks:
    """The tile config of a launch."""

    block_m: int  # (token, query head) pairs a program holds
    block_n: int  # positions it reads at a time
    block_d: int
    num_warps: int
    num_stages: int
    wide: bool = False  # prompts: one program a processor, see WIDE_BYTES


@cache
def plan_blocks(num_pairs: int, dim: int, num_bytes: int, few: bool, shared_bytes: int) -> Blocks:
    """Two buffers of keys and values to each program, no spilled registers at a head of 256.

    Five stages make two buffers, because the rows' addresses are loaded first; where the tensor cores read shared
    memory themselves (64 pairs), three do. Exact float32 products keep their operands in registers: 16 pairs. At wide
    heads one buffer is better (three stages), and few programs are fastest with a whole short split in it.

    Prompts at a head of 256 are bound by arithmetic: 128 pairs for each row of keys, where shared memory is large.

    Source: logs 91 and 155 for heads of 256 in 16 bits; the others are not in the log.
    """
    block_d = max(16, triton.next_power_of_2(dim))
    if shared_bytes >= WIDE_BYTES and num_bytes == 2 and dim == 256 and num_pairs >= 128:
        return Blocks(128, 64, block_d, num_warps=8, num_stages=2, wide=True)
    block_m = min(64 if num_bytes == 2 else 16, max(16, triton.next_power_of_2(num_pairs)))
    row_bytes, num_buffers = block_d * num_bytes, 1
    if block_m * block_d > 8192:
        plan = Blocks(block_m, max(16, 2**15 // row_bytes), block_d, num_warps=8, num_stages=3)
    elif num_bytes == 2 and block_d == 256:
        plan = Blocks(block_m, 128, block_d, 8, 2) if few else Blocks(block_m, 1024 // block_m, block_d, 4, 3)
    else:
        plan = Blocks(block_m, min(128, max(16, 2**14 // row_bytes)), block_d, num_warps=4, num_stages=5)
        num_buffers = 2
    return _fitted(plan, row_bytes, num_buffers, shared_bytes)


def _fitted(plan: Blocks, row_bytes: int, num_buffers: int, shared_bytes: int) -> Blocks:
    """With no more positions at a time than shared memory holds: queries, buffers of keys and values, and some KiB."""
    room = shared_bytes - plan.block_m * row_bytes - SCRATCH_BYTES
    block_n = plan.block_n
    while block_n > 16 and 2 * num_buffers * block_n * row_bytes > room:
        block_n //= 2
    return replace(plan, block_n=block_n)


def with_codes(plan: Blocks, num_bytes: int) -> Blocks:
    """Decoded keys and values are in registers: at wide heads half as many at a time, or they would be spilled.

    Source: not in the log; no GPU has run it.
    """
    wide = plan.block_d * num_bytes >= 512 or num_bytes == 4
    return replace(plan, block_n=max(16, plan.block_n // 2)) if wide else plan


def split_count(num_programs: int, context: int, num_processors: int) -> int:
    """Parts in which each context is read: two programs a processor, four where the context is long.

    Source: not in the log.
    """
    wanted = (2 if context < LONG_CONTEXT else 4) * num_processors // num_programs
    return max(1, min(wanted, context // int(SHORTEST_SPLIT.value)))


def even_split_count(num_programs: int, context: int, num_processors: int, num_tokens: int) -> int:
    """Parts in which the contexts of prompts are read, where one program runs on a processor at a time.

    Of long contexts, so that the last programs do not run alone; of others where few tokens leave processors idle.
    Parts take memory, so few of many tokens.

    Source: log 155; for few tokens a calculation (log 252).
    """
    is_long = context > LONGEST_UNSPLIT
    if not is_long and num_tokens > MANY_TOKENS:
        return max(1, min(num_processors // num_programs, context // int(SHORTEST_SPLIT.value)))
    most = min(MAX_PARTS, (MAX_PART_TOKENS if is_long else FEW_PART_TOKENS) // num_tokens)
    parts = range(1, max(1, min(most, context // int(SHORTEST_SPLIT.value))) + 1)
    seconds = {n: -(-num_programs * n // num_processors) * (1 / n + 0.01) for n in parts}
    return min(n for n in parts if seconds[n] <= NEARLY * min(seconds.values()))


def num_busy_programs(num_tokens: int, num_tiles: int, num_parts: int) -> int:
    """Programs of a KV head that work long where prompts are read: of full tiles ``num_parts``. A step has room for a
    tile more for each of its rows: of a row that decodes one program works, and half of these rows have a context as
    long as the prompt's, at a guess.
    """
    full = -(-num_tokens // PROMPT_TILE)
    return full * num_parts + max(0, num_tiles - full - 1) // 2
