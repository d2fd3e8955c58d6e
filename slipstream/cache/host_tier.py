"""The second tier of the prefix cache: copies of blocks and states in host memory.

It has a tree and a pool of its own, over block numbers of the runner's host memory. What a row leaves is copied behind
it, a few blocks a step; a prompt that the device has forgotten is copied back. Knows no rows and moves no bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial

from slipstream.cache.blocks import BlockPool
from slipstream.cache.disk_tier import DiskHit, DiskTier
from slipstream.cache.prefix_cache import MISS, PROMPT, Hit, PrefixCache
from slipstream.cache.prefix_tree import KeptState
from slipstream.engine.contract import Transfer

SAVED_BLOCKS = 64  # copied out in one step: some ten megabytes, while a step reads gigabytes
MIN_SAVED = 256  # tokens that are worth a copy
MAX_JOBS = 64  # that wait: what is not saved may still be on the device


@dataclass(slots=True)
class _Job:
    """A prefix on its way to the host."""

    key: Hashable
    tokens: list[int]  # up to its position, and the one after
    held: list[int] = field(default_factory=list)  # host blocks: those of the part that was there, and of its own
    begun: bool = False

    @property
    def position(self) -> int:
        return len(self.tokens) - 1


@dataclass(eq=False, slots=True)
class _Written:
    """A prefix on its way to the disk. Its blocks and its state are held."""

    key: Hashable
    tokens: list[int]
    blocks: list[int]
    state: KeptState | None


class HostTier:
    def __init__(self, num_blocks: int, block_size: int, num_states: int, disk: DiskTier | None = None) -> None:
        self.disk = disk
        self._to_write: list[_Written] = []  # copied by the last plan
        self._writing: list[_Written] = []
        self._reading: list[list[int]] = []  # host blocks
        self._pool = BlockPool(num_blocks, block_size)
        self._recurrent = num_states > 0
        self.prefixes = PrefixCache(self._pool, 0, num_states)
        self._jobs: deque[_Job] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._to_write)

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()

    def want(self, key: Hashable, tokens: list[int], positions: Iterable[int]) -> None:
        """Copies of these prefixes, as soon as there is time. What is on disk of them was used."""
        if self.disk is not None:
            self.disk.touch(key, tokens)
        for position in positions:
            if position < MIN_SAVED or len(self._jobs) >= MAX_JOBS:
                continue
            if self.prefixes.at(key, tokens, position) is MISS:
                self._jobs.append(_Job(key, tokens[: position + 1]))

    def saves(self, device: PrefixCache) -> list[Transfer]:
        """The next copies. What the device has dropped meanwhile cannot be copied any more."""
        self._write_behind()
        budget, found = SAVED_BLOCKS, []
        while self._jobs and budget > 0:
            job = self._jobs[0]
            transfer, is_done = self._continue(job, device, budget)
            if transfer is not None:
                found.append(transfer)
                budget -= len(transfer.blocks) + 1
            if is_done:
                self._pool.release(job.held)
                self._jobs.popleft()
        return found

    def _continue(self, job: _Job, device: PrefixCache, budget: int) -> tuple[Transfer | None, bool]:
        """A piece of a job, and whether it has ended."""
        source = device.at(job.key, job.tokens, job.position)
        if source is MISS or (not job.begun and self.prefixes.at(job.key, job.tokens, job.position) is not MISS):
            return None, True
        if not job.begun:
            self._begin(job)
        missing = source.blocks[len(job.held) : len(job.held) + budget]
        if len(missing) > self._pool.num_available:
            return None, True
        host_blocks = self._allocate(len(missing))
        job.held += host_blocks
        if len(job.held) < len(source.blocks):
            return Transfer(missing, host_blocks), False
        host_state = self.prefixes.take_state() if self._recurrent else None
        if self._recurrent and host_state is None:
            return None, True
        kept = self.prefixes.insert(job.key, job.tokens, job.held, host_state, PROMPT)
        self._to_write.append(self._held(_Written(job.key, job.tokens, job.held, kept)))
        return Transfer(missing, host_blocks, source.state.slot if source.state else None, host_state), True

    def _begin(self, job: _Job) -> None:
        """Blocks that are there already stay there."""
        job.begun = True
        job.held = self.prefixes.known_blocks(job.key, job.tokens)
        self._pool.share(job.held)

    # The disk.

    def _held(self, written: _Written) -> _Written:
        self._pool.share(written.blocks)
        if written.state is not None:
            written.state.num_pins += 1
        return written

    def _write_behind(self) -> None:
        """What the last plan has copied."""
        to_write, self._to_write = self._to_write, []
        for written in to_write:
            self._writing.append(written)
            finish = partial(self._written, written)
            if self.disk is None:
                finish()
            else:
                slot = None if written.state is None else written.state.slot
                self.disk.write(written.key, written.tokens, written.blocks, slot, finish)

    def _written(self, written: _Written) -> None:
        self._writing.remove(written)
        self._pool.release(written.blocks)
        if written.state is not None:
            self.prefixes.release_state(written.state)

    def fetch(self, key: Hashable, tokens: list[int], hit: DiskHit, finish: Callable[[], None]) -> bool:
        """Read a prefix from disk. False: there is no room. ``finish``: called when it is here, or never will be."""
        assert self.disk is not None
        tokens = tokens[: hit.num_tokens + 1]
        known = self.prefixes.known_blocks(key, tokens)
        self._pool.share(known)
        count = hit.num_tokens // self._pool.block_size - len(known)
        slot = self.prefixes.take_state() if self._recurrent else None
        if count > self._pool.num_available or (self._recurrent and slot is None):
            self._pool.release(known)
            if slot is not None:
                self.prefixes.give_back(slot)
            return False
        own = list(self._allocate(count))
        blocks = known + own
        self._reading.append(blocks)

        def done(is_good: bool) -> None:
            if is_good:
                self.prefixes.insert(key, tokens, blocks, slot, PROMPT)
            elif slot is not None:
                self.prefixes.give_back(slot)
            self._reading.remove(blocks)
            self._pool.release(blocks)
            finish()

        self.disk.read(hit, len(known) * self._pool.block_size, own, slot, done)
        return True

    def _allocate(self, count: int) -> tuple[int, ...]:
        if count > self._pool.num_free:
            self.prefixes.evict(count - self._pool.num_free)
        return self._pool.allocate(count)

    def load(self, hit: Hit, blocks: list[int], state: int | None) -> Transfer:
        """The end of a prefix, copied to these blocks."""
        host_blocks = hit.blocks[len(hit.blocks) - len(blocks) :]
        return Transfer(tuple(blocks), host_blocks, state, hit.state.slot if hit.state else None)

    def release(self, hit: Hit) -> None:
        """The plan that copies it has gone out, or never will."""
        self._pool.release(hit.blocks)
        if hit.state is not None:
            self.prefixes.release_state(hit.state)

    def check_integrity(self, held: Iterable[int]) -> None:
        """``held``: by rows that will start from copies of them."""
        jobs = [block for job in self._jobs for block in job.held]
        moved = [block for written in (*self._to_write, *self._writing) for block in written.blocks]
        read = [block for blocks in self._reading for block in blocks]
        self._pool.check_integrity([*held, *jobs, *moved, *read], self.prefixes.check_integrity())
