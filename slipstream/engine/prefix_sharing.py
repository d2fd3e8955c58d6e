"""Which part of a prompt need not be computed, and what a row leaves for later prompts.

A row starts where the prefix cache ends. While it is computed it keeps some positions, and each becomes an entry of the
cache as soon as a result says that the row has passed it. A request that shares much with a prompt that is being read
waits until that one has come so far. Owns no memory: the cache manager does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from slipstream.cache.manager import CacheManager
from slipstream.cache.prefix_cache import (
    INTERVAL,
    JUNCTION,
    NOTHING_FOUND,
    OUTPUT,
    PROMPT,
    SYSTEM,
    USER,
    Found,
)
from slipstream.cache.prefix_tree import KeptState, common_length
from slipstream.config import EngineConfig
from slipstream.engine.bounds import Bounds
from slipstream.engine.contract import MAX_KEEPS, Keep, RunnerInfo, Start, Transfer
from slipstream.engine.request import Sequence

READ_INTERVAL = 8192  # tokens between two positions kept while a long prompt is read: some survive if it is cancelled
OUTPUT_INTERVAL = 64  # tokens between two positions that a generating row keeps; only the newest stays
MIN_SHARED = 256  # tokens that a request must save to wait for another that reads them
MIN_GAP = 64  # tokens that a further state must save
MIN_RESTORED = 256  # tokens that a copy from host memory must save

Key = tuple[str, bool]  # the salt, and whether the head is fed
OFF = "the prefix cache is switched off"
NOT_ASKED = "the request asked for no cache"
LOGPROBS = "log-probabilities of the prompt need every token read"
NOTHING = "no cached prompt begins like this one"


@dataclass(slots=True)
class RowKeeps:
    """What one row is to keep."""

    key: Key
    wanted: dict[int, str] = field(default_factory=dict)  # positions, and why
    taken: dict[int, int | None] = field(default_factory=dict)  # of those, in plans that went out: their state slots
    reach: int = 0  # its state may have come so far when all steps in flight are done
    output: KeptState | None = None  # the newest state that was kept while generating
    intervals: list[KeptState] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _LookUp:
    versions: tuple[int, int]  # of the tiers
    found: Found


class PrefixSharing:
    def __init__(self, info: RunnerInfo, config: EngineConfig, cache: CacheManager) -> None:
        self._cache, self._prefixes, self._host = cache, cache.prefixes, cache.host
        self._enabled = config.prefix_cache and info.keep_grid > 0
        self._grid = max(1, info.keep_grid)
        self._recurrent = info.num_states > 0
        self._output_interval = -(-OUTPUT_INTERVAL // self._grid) * self._grid
        self._rows: dict[str, RowKeeps] = {}
        self._found: dict[str, _LookUp] = {}  # of requests that wait
        self._follow: dict[str, tuple[str, int]] = {}  # requests that wait: for whom, up to which position
        self._promised: dict[str, KeptState] = {}  # to requests that waited for it and have not started yet
        self._token_seconds: float | None = None  # to compute a token of a prompt, as measured

    # Starting.

    def find(self, sequence: Sequence, may_draft: bool) -> Found:
        """What is cached of its known tokens. It is looked up again only when the cache has changed."""
        if self._why_not(sequence):
            return NOTHING_FOUND
        known = self._found.get(sequence.id)
        versions = (self._prefixes.version, self._host.prefixes.version if self._host else 0)
        if known is None or known.versions != versions:
            known = self._found[sequence.id] = _LookUp(versions, self._look_up(sequence, may_draft))
        return known.found

    def _look_up(self, sequence: Sequence, may_draft: bool) -> Found:
        # Of several answers to one prompt the parent must have something to compute before its last token.
        tokens = sequence.tokens if sequence.group is None else sequence.tokens[:-1]
        keys = self._keys(sequence, may_draft)
        hit = self._prefixes.find(keys, tokens)
        if self._host is None:
            return Found(hit)
        host = self._host.prefixes.find(keys, tokens)
        return Found(hit, host) if host.num_tokens - hit.num_tokens >= MIN_RESTORED else Found(hit)

    def _keys(self, sequence: Sequence, may_draft: bool) -> list[Key]:
        """A row that never drafts may start from what one that does has left, but not the other way round: its head
        was never fed."""
        salt = sequence.request.cache.salt
        return [(salt, may_draft)] if may_draft else [(salt, False), (salt, True)]

    def _why_not(self, sequence: Sequence) -> str:
        if not self._enabled:
            return OFF
        if not sequence.request.cache.enabled:
            return NOT_ASKED
        return LOGPROBS if sequence.request.params.prompt_logprobs is not None and not sequence.num_output else ""

    def admitted(self, sequence: Sequence, found: Found, num_cached: int, may_draft: bool) -> None:
        """``num_cached``: it starts after so many tokens."""
        self._waited(sequence)
        if sequence.counters.joined_at is None:
            sequence.counters.cached_tokens = num_cached
            sequence.counters.cache_note = self._why_not(sequence) or _note(sequence, found, num_cached, self._grid)
        if not self._enabled or not sequence.request.cache.enabled:
            return
        keeps = self._rows[sequence.id] = RowKeeps((sequence.request.cache.salt, may_draft))
        keeps.wanted |= dict(self._positions(sequence, found))
        self._want_output(sequence, keeps)

    def _waited(self, sequence: Sequence) -> None:
        """It waits no longer."""
        self._found.pop(sequence.id, None)
        self._follow.pop(sequence.id, None)
        promised = self._promised.pop(sequence.id, None)
        if promised is not None:
            self._prefixes.release_state(promised)

    def started(self, sequence: Sequence, start: Start, is_copied: bool) -> None:
        """The row joins there; what lies before it is not its own work. ``is_copied``: from host memory."""
        row = self._rows.get(sequence.id)
        if row is None:
            return
        row.wanted = {position: kind for position, kind in row.wanted.items() if position > start.num_computed}
        row.reach = start.num_computed
        if is_copied:
            self._prefixes.insert(row.key, sequence.tokens, start.blocks, start.state_of, PROMPT)

    def _positions(self, sequence: Sequence, found: Found) -> Iterable[tuple[int, str]]:
        """Of a prompt, the least important first. Each is at least one token before the prompt's end."""
        num_prompt = len(sequence.request.prompt_tokens)
        last = self._floor(num_prompt - 1)
        first, end = -(-(found.num_tokens + 1) // READ_INTERVAL) * READ_INTERVAL, last - READ_INTERVAL // 2
        for position in range(first, end, READ_INTERVAL):
            yield self._floor(position), INTERVAL
        junction = self._floor(found.num_same - 1)
        if self._recurrent and junction - found.num_tokens >= MIN_GAP:
            yield junction, JUNCTION
        ends = sequence.request.cache.boundaries
        boundaries: dict[str, int] = {kind: min(last, self._floor(at)) for at, kind in ends}
        yield boundaries.get(PROMPT, last), PROMPT
        yield boundaries.get(USER, 0), USER
        yield boundaries.get(SYSTEM, 0), SYSTEM

    def _floor(self, position: int) -> int:
        return max(0, position) // self._grid * self._grid

    def _want_output(self, sequence: Sequence, keeps: RowKeeps) -> None:
        """The first position after all known tokens that a generating row keeps."""
        keeps.wanted[(len(sequence.tokens) // self._output_interval + 1) * self._output_interval] = OUTPUT

    # Waiting for another.

    def must_wait(self, sequence: Sequence, found: Found, may_draft: bool, running: Iterable[Sequence]) -> bool:
        """Somebody else is about to have what this one would compute. ``sequence.waits`` then says how long."""
        if self._why_not(sequence):
            return False
        keys = self._keys(sequence, may_draft)
        return self._follows(sequence, found, keys, running) or self._fetches(sequence, found, keys)

    def _follows(self, sequence: Sequence, found: Found, keys: list[Key], running: Iterable[Sequence]) -> bool:
        """A running one reads the same tokens. It will keep them."""
        last = found.num_tokens + MIN_SHARED - 1  # a token that both must have
        if last >= len(sequence.tokens):
            return False
        for other in running:
            if other.num_uncomputed < 2 or last >= len(other.tokens) or other.tokens[last] != sequence.tokens[last]:
                continue
            keeps = self._rows.get(other.id)
            if keeps is None or keeps.key not in keys or other.parent is not None:
                continue
            position = self._floor(common_length(sequence.tokens, 0, other.tokens) - 1)
            passed = position <= other.bounds.max_computed and position not in keeps.taken
            if position - found.num_tokens >= MIN_SHARED and not passed:
                if keeps.wanted.get(position, INTERVAL) == INTERVAL:  # those are dropped once the prompt is read
                    keeps.wanted[position] = JUNCTION
                self._follow[sequence.id] = other.id, position
                sequence.waits = partial(self._is_computed_later, other.id, position)
                return True
        return False

    def _is_computed_later(self, leader: str, position: int) -> bool:
        keeps = self._rows.get(leader)
        return keeps is not None and (position in keeps.wanted or position in keeps.taken)

    def _fetches(self, sequence: Sequence, found: Found, keys: list[Key]) -> bool:
        """The disk has them, and reading is faster than computing."""
        if self._host is None or self._host.disk is None:
            return False
        disk = self._host.disk
        key, hit = max(((key, disk.find(key, sequence.tokens)) for key in keys), key=lambda each: each[1].num_tokens)
        num_saved = hit.num_tokens - found.num_tokens
        if num_saved < MIN_RESTORED or sequence.num_output:
            return False
        num_bytes = sum(entry.num_bytes for entry in hit.entries if entry.end > found.num_tokens)
        if self._token_seconds and num_bytes / disk.bytes_per_second > num_saved * self._token_seconds:
            return False
        event = threading.Event()
        if not self._host.fetch(key, sequence.tokens, hit, event.set):
            return False
        sequence.waits = lambda: not event.is_set()
        return True

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """A step that read prompts took so long."""
        before = self._token_seconds
        self._token_seconds = seconds / num_tokens if before is None else 0.8 * before + 0.2 * seconds / num_tokens

    def still_waits(self, sequence: Sequence) -> bool:
        return sequence.waits()

    # Keeping.

    def keeps(self, sequence: Sequence, bounds: Bounds, feed: int) -> tuple[Keep, ...]:
        """Those that the row may pass in a step."""
        row = self._rows.get(sequence.id)
        if row is None:
            return ()
        passed, before, row.reach = sequence.num_in_state, row.reach, min(bounds.max_computed + feed, bounds.max_tokens)
        for position in sorted(position for position in row.wanted if before < position <= row.reach):
            if len(row.taken) < MAX_KEEPS:
                slot = self._prefixes.take_state() if self._recurrent else None
                if slot is not None or not self._recurrent:
                    row.taken[position] = slot
        # A step in flight may have passed some of them: they are named until that is known.
        return tuple(Keep(position, slot) for position, slot in sorted(row.taken.items()) if position > passed)

    def committed(self, sequence: Sequence) -> None:
        """A result came in: what it says was kept is cached."""
        row = self._rows.get(sequence.id)
        if row is None:
            return
        for position in sorted(position for position in row.wanted if position <= sequence.num_in_state):
            kind = row.wanted.pop(position)
            if position in row.taken:
                self._insert(sequence, row, position, kind)
            if kind == OUTPUT:
                self._want_output(sequence, row)
        if sequence.num_output and row.intervals:
            for state in row.intervals:
                self._prefixes.drop(state, INTERVAL)
            row.intervals.clear()

    def _insert(self, sequence: Sequence, row: RowKeeps, position: int, kind: str) -> None:
        slot, blocks = row.taken.pop(position), self._cache.first_blocks(sequence.id, position)
        state = self._prefixes.insert(row.key, sequence.tokens, blocks, slot, kind)
        if state is None:
            return
        for follower, awaited in self._follow.items():
            if awaited == (sequence.id, position) and follower not in self._promised:
                self._promised[follower] = state
                state.num_pins += 1
        if kind == INTERVAL:
            row.intervals.append(state)
        if kind == OUTPUT:
            if row.output is not None and row.output is not state:
                self._prefixes.drop(row.output, OUTPUT)
            row.output = state

    # Copies in host memory.

    @property
    def has_saves(self) -> bool:
        return self._host is not None and self._host.has_work

    def saves(self) -> tuple[Transfer, ...]:
        """Those that the next plan makes."""
        return () if self._host is None else tuple(self._host.saves(self._prefixes))

    def poll(self) -> None:
        """Sees what was written to disk, and read."""
        if self._host is not None and self._host.disk is not None:
            self._host.disk.poll()

    def left(self, sequence: Sequence) -> None:
        """It has no row any more; nothing else will be kept."""
        self._waited(sequence)
        row = self._rows.pop(sequence.id, None)
        if row is not None:
            if self._host is not None:
                self._host.want(row.key, sequence.tokens, self._prefixes.positions(row.key, sequence.tokens))
            for slot in row.taken.values():
                if slot is not None:
                    self._prefixes.give_back(slot)


def _note(sequence: Sequence, found: Found, num_cached: int, grid: int) -> str:
    """Why no more of a prompt was cached: one line for people. Empty if all but its last tokens were."""
    num_prompt, num_same = len(sequence.request.prompt_tokens), found.num_same
    if num_cached >= (num_prompt - 1) // grid * grid:
        return ""
    if not num_same:
        return NOTHING
    if num_same - num_cached > max(MIN_GAP, grid):
        nearest = f"the nearest kept state is at {num_cached}" if num_cached else "no state was kept before"
        return f"{num_same} tokens are as before, but {nearest}"
    if not found.differs:
        return f"what follows token {num_same} is new"
    return f"differs from the cached prompt at token {num_same}, {_place(sequence, num_same)}"


def _place(sequence: Sequence, position: int) -> str:
    boundaries: dict[str, int] = {kind: at for at, kind in sequence.request.cache.boundaries}
    if position < boundaries.get(SYSTEM, 0):
        return "in the system message or the tools"
    if position < boundaries.get(USER, 0):
        return "in the messages up to the last one of the user"
    return f"of {len(sequence.request.prompt_tokens)}"
