"""The KV blocks of all rows, and the point from which each row starts.

Rows are known by a key. A row is admitted with blocks, grows, starts from an empty cache, from another row's or from
what the prefix cache has, and releases its blocks at its end or when it is preempted. Chooses no victims among rows and
knows neither sequences nor budgets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from slipstream.cache.blocks import BlockPool
from slipstream.cache.host_tier import HostTier
from slipstream.cache.prefix_cache import MISS, NOTHING_FOUND, Found, Hit, PrefixCache
from slipstream.engine.contract import EMPTY, Start, Transfer


@dataclass(frozen=True, slots=True)
class RowDemand:
    """The size of a row that waits for admission."""

    key: str
    num_tokens: int  # its blocks must cover these
    num_shared: int = 0  # the first tokens, computed by another row: their full blocks will be shared
    found: Found = NOTHING_FOUND  # the first tokens, in the prefix cache


@dataclass(frozen=True, slots=True)
class CachedRow:
    """A row at rest, without drafts, from whose cache another row starts."""

    key: str
    slot: int
    num_computed: int


@dataclass(slots=True)
class RowBlocks:
    """The block table of one row."""

    blocks: list[int] = field(default_factory=list)
    num_awaited: int = 0  # shared blocks that will be put before them when the row starts
    num_sent: int = 0  # the first ones: a plan with them went out
    hit: Hit = MISS  # it will start from it
    host: Hit = MISS  # or from a copy of this one, whose state comes into a state slot
    state: int | None = None


class CacheManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        first_state: int = 0,
        num_states: int = 0,
        host: HostTier | None = None,
    ) -> None:
        """``num_states``: state slots of the prefix cache, numbered from ``first_state`` on."""
        self._pool = BlockPool(num_blocks, block_size)
        self._rows: dict[str, RowBlocks] = {}
        self._recurrent = num_states > 0
        self._loads: list[Transfer] = []
        self.prefixes = PrefixCache(self._pool, first_state, num_states)
        self.host = host

    @property
    def num_free(self) -> int:
        """Those that the prefix cache would give back among them."""
        return self._pool.num_available

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    def can_admit(self, demands: Iterable[RowDemand], num_running: int) -> bool:
        """Whether all of them fit and each running row can still have one more block: it may need it soon."""
        num_needed = num_running
        for demand in demands:
            num_needed += self._num_own(demand) + self._pool.count_idle(demand.found.hit.blocks)
        return num_needed <= self._pool.num_available

    def admit(self, demand: RowDemand) -> int:
        """How many of its tokens the prefix cache has."""
        assert demand.key not in self._rows
        hit, host = demand.found.hit, demand.found.host
        self.prefixes.hold(hit)
        blocks = [*hit.blocks, *self._allocate(self._num_own(demand))]
        row = RowBlocks(blocks, demand.num_shared // self._pool.block_size, hit=hit)
        self._rows[demand.key] = row
        return self._take_from_host(row, host) if host.num_tokens > hit.num_tokens else hit.num_tokens

    def _take_from_host(self, row: RowBlocks, host: Hit) -> int:
        assert self.host is not None
        row.state = self.prefixes.take_state() if self._recurrent else None
        if self._recurrent and row.state is None:
            return row.hit.num_tokens
        self.host.prefixes.hold(host)
        if row.hit.state is not None:
            self.prefixes.release_state(row.hit.state)
            row.hit = replace(row.hit, state=None)
        row.host = host
        return host.num_tokens

    def _num_own(self, demand: RowDemand) -> int:
        num_shared = demand.num_shared // self._pool.block_size + len(demand.found.hit.blocks)
        return self._pool.count_for(demand.num_tokens) - num_shared

    def _allocate(self, count: int) -> tuple[int, ...]:
        if count > self._pool.num_free:
            self.prefixes.evict(count - self._pool.num_free)
        return self._pool.allocate(count)

    def stop_sharing(self, key: str) -> None:
        """The row computes by itself the tokens it would have shared; the blocks for them must be free."""
        row = self._rows[key]
        row.blocks += self._allocate(row.num_awaited)
        row.num_awaited = 0

    def reserve(self, key: str, num_tokens: int) -> bool:
        """Blocks for that many tokens. False, and nothing changes, where too few are free."""
        row = self._rows[key]
        missing = max(0, self._pool.count_for(num_tokens) - len(row.blocks))
        if missing > self._pool.num_available:
            return False
        row.blocks += self._allocate(missing)
        return True

    def reserve_drafts(self, key: str, num_tokens: int, depth: int) -> int:
        """The deepest draft that free blocks allow: the head writes ahead for drafts 2, 3, ... -> the depth"""
        while depth > 1 and not self.reserve(key, num_tokens + depth - 1):
            depth -= 1
        return depth

    def start(self, key: str, source: CachedRow | None = None) -> Start:
        """Where a joining row starts: with an empty cache, where the prefix cache ends, or where the source stands.

        Full blocks of the source are shared from now on, a partly filled one is copied into the row's own.
        """
        row = self._rows[key]
        assert not row.num_sent
        if source is None:
            assert not row.num_awaited
            return self._start_from_cache(row)
        num_full, rest = divmod(source.num_computed, self._pool.block_size)
        assert num_full == row.num_awaited
        parent_blocks = self._rows[source.key].blocks
        copied = (parent_blocks[num_full], row.blocks[0]) if rest else None
        self._pool.share(parent_blocks[:num_full])
        row.blocks = parent_blocks[:num_full] + row.blocks
        row.num_awaited, row.num_sent = 0, num_full + (copied is not None)
        return Start(source.num_computed, tuple(row.blocks[: row.num_sent]), copied, source.slot)

    def _start_from_cache(self, row: RowBlocks) -> Start:
        if row.host.num_tokens:
            return self._start_from_host(row)
        hit, row.hit = row.hit, MISS
        if not hit.num_tokens:
            return EMPTY
        row.num_sent = len(hit.blocks)
        if hit.state is None:
            return Start(hit.num_tokens, hit.blocks)
        self.prefixes.release_state(hit.state)
        return Start(hit.num_tokens, hit.blocks, None, hit.state.slot)

    def _start_from_host(self, row: RowBlocks) -> Start:
        """Its first blocks are on the device; the others, which are its own, are copied."""
        assert self.host is not None
        host, num_here = row.host, len(row.hit.blocks)
        row.num_sent = len(host.blocks)
        self._loads.append(self.host.load(host, row.blocks[num_here : row.num_sent], row.state))
        self.host.release(host)
        state, row.state, row.hit, row.host = row.state, None, MISS, MISS
        return Start(host.num_tokens, tuple(row.blocks[: row.num_sent]), None, state)

    def is_on_host(self, key: str) -> bool:
        """The row will start from a copy of what is there."""
        return self._rows[key].host.num_tokens > 0

    def take_loads(self) -> tuple[Transfer, ...]:
        """Copies from host memory that the next plan makes."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def first_blocks(self, key: str, num_tokens: int) -> list[int]:
        """Those that hold the row's first tokens."""
        return self._rows[key].blocks[: num_tokens // self._pool.block_size]

    def take_unsent(self, key: str) -> tuple[int, ...]:
        """Blocks that no plan has carried yet; the next one does."""
        row = self._rows[key]
        num_sent, row.num_sent = row.num_sent, len(row.blocks)
        return tuple(row.blocks[num_sent:])

    def release(self, key: str) -> None:
        """Plans run in order, so these blocks may be given away in the very next plan."""
        row = self._rows.pop(key)
        if row.hit.state is not None:
            self.prefixes.release_state(row.hit.state)
        if row.host.num_tokens and self.host is not None:
            self.host.release(row.host)
        if row.state is not None:
            self.prefixes.give_back(row.state)
        self._pool.release(row.blocks)

    def close(self) -> None:
        if self.host is not None:
            self.host.close()

    def check_integrity(self, keys: Iterable[str]) -> None:
        """Exactly these rows have blocks, and every block is free or in as many tables as the pool counts."""
        assert self._rows.keys() == set(keys)
        held = [block for row in self._rows.values() for block in row.blocks]
        self._pool.check_integrity(held, self.prefixes.check_integrity())
        if self.host is not None:
            self.host.check_integrity(block for row in self._rows.values() for block in row.host.blocks)
