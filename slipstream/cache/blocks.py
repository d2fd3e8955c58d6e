"""The KV blocks: which are free, and how many rows hold each of the others. Knows no rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # the lowest is handed out first
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def capacity(self) -> int:
        """Tokens all blocks hold together."""
        return self.num_blocks * self.block_size

    def count_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

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
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._holders[block] > 0, "a block was freed twice"
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Every block is free, or held as often as the pool knows."""
        free, seen = Counter(self._free), Counter(held)
        wrong = [
            block for block, count in enumerate(self._holders) if seen[block] != count or free[block] != (count == 0)
        ]
        assert not wrong, f"blocks lost or held twice: {wrong[:8]}"
        assert seen.keys() <= set(range(self.num_blocks))
