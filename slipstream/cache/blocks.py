"""The KV blocks: which are free, and how many rows hold each of the others. Knows no rows.

The prefix cache is one more holder. Blocks that only it holds are idle: it gives them back when somebody needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_idle = 0
        self.num_cached = 0  # idle or not
        self._free = list(range(num_blocks - 1, -1, -1))  # the lowest is handed out first
        self._holders = [0] * num_blocks  # the cache among them
        self._cached = [0] * num_blocks  # how often the cache holds each: once a place in its tree

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Free ones, and those that the cache would give back."""
        return len(self._free) + self.num_idle

    @property
    def num_used(self) -> int:
        """Held by rows."""
        return self.num_blocks - self.num_available

    def count_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def count_idle(self, blocks: Iterable[int]) -> int:
        return sum(self.is_idle(block) for block in blocks)

    def is_idle(self, block: int) -> bool:
        return 0 < self._cached[block] == self._holders[block]

    def allocate(self, count: int) -> tuple[int, ...]:
        assert 0 <= count <= self.num_free
        blocks = tuple(self._free.pop() for _ in range(count))
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more row holds these."""
        for block in blocks:
            assert self._holders[block] > 0, "a free block was shared"
            self.num_idle -= self.is_idle(block)
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._holders[block] > 0, "a block was freed twice"
            assert not self.is_idle(block), "a row freed a block that only the cache holds"
            self._holders[block] -= 1
            self.num_idle += self.is_idle(block)
            if not self._holders[block]:
                self._free.append(block)

    def cache(self, blocks: Iterable[int]) -> None:
        """The cache holds these as well as the row that has them."""
        for block in blocks:
            assert self._holders[block] > 0, "a free block was cached"
            self.num_idle -= self.is_idle(block)
            self._holders[block] += 1
            self._cached[block] += 1
            self.num_idle += self.is_idle(block)
            self.num_cached += self._cached[block] == 1

    def uncache(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._cached[block], "a block that is not cached was given back"
            self.num_idle -= self.is_idle(block)
            self._holders[block] -= 1
            self._cached[block] -= 1
            self.num_idle += self.is_idle(block)
            self.num_cached -= not self._cached[block]
            if not self._holders[block]:
                self._free.append(block)

    def check_integrity(self, held: Iterable[int], cached: Iterable[int] = ()) -> None:
        """Every block is free, or held as often as the pool knows. ``held``: by rows"""
        cached = Counter(cached)
        free, seen = Counter(self._free), Counter(held) + cached
        wrong = [
            block for block, count in enumerate(self._holders) if seen[block] != count or free[block] != (count == 0)
        ]
        assert not wrong, f"blocks lost or held twice: {wrong[:8]}"
        assert seen.keys() <= set(range(self.num_blocks))
        assert cached == {block: count for block, count in enumerate(self._cached) if count}
        assert self.num_cached == len(cached)
        assert self.num_idle == self.count_idle(range(self.num_blocks))
