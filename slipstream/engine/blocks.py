"""The KV blocks: which are free. Owns the free list and nothing else; who holds a block is the sequence's to know."""

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
        return tuple(self._free.pop() for _ in range(count))

    def release(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)
        assert self.num_free <= self.num_blocks, "a block was freed twice"

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Every block is free or owned, exactly once."""
        seen = Counter(self._free)
        seen.update(owned)
        wrong = [block for block in range(self.num_blocks) if seen[block] != 1]
        assert not wrong, f"blocks lost or held twice: {wrong[:8]}"
        assert len(seen) == self.num_blocks
