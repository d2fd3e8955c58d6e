"""What rows leave for others to start from: blocks in a radix tree, and recurrent states at some places in it.

Models without recurrent layers start after any block that matches; the others only where a state was kept. Blocks that
no row holds count as free: they are given back when somebody needs them, the least useful first. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from slipstream.cache.blocks import BlockPool
from slipstream.cache.prefix_tree import KeptState, Node, PrefixTree

MAX_STATES = 3  # on a path, besides forks and the newest of a row that generates
KEPT_LAST = 2  # of those: a prompt whose last message was changed starts from the one before
SYSTEM, USER, PROMPT = "system", "user", "prompt"  # ends of messages: see PromptCache
JUNCTION = "junction"  # prompts part here
INTERVAL = "interval"  # while a long prompt is read
OUTPUT = "output"  # the newest of a row that generates
MIN_EVICTED = 1 / 64  # of all blocks, given back at once: looking for them takes time


@dataclass(frozen=True, slots=True)
class Hit:
    """The part of a prompt that is cached."""

    num_tokens: int = 0  # a row may start here
    blocks: tuple[int, ...] = ()
    state: KeptState | None = None
    node: Node | None = None  # it ends there
    num_same: int = 0  # tokens in common with some cached prompt
    differs: bool = False  # the next one is another; else nothing is known after them


MISS = Hit()


@dataclass(frozen=True, slots=True)
class Found:
    """What the tiers have of a prompt."""

    hit: Hit = MISS  # on the device
    host: Hit = MISS  # in host memory, if that is worth a copy

    @property
    def num_tokens(self) -> int:
        """A row may start here."""
        return max(self.hit.num_tokens, self.host.num_tokens)

    @property
    def num_same(self) -> int:
        return max(self.hit.num_same, self.host.num_same)

    @property
    def differs(self) -> bool:
        return self.hit.differs if self.hit.num_same >= self.host.num_same else self.host.differs


NOTHING_FOUND = Found()


class PrefixCache:
    def __init__(self, pool: BlockPool, first_state: int = 0, num_states: int = 0) -> None:
        """``num_states``: state slots, numbered from ``first_state`` on; 0: no layer is recurrent."""
        self._pool = pool
        self._tree = PrefixTree(pool.block_size)
        self._recurrent = num_states > 0
        self._free_states = list(range(first_state + num_states - 1, first_state - 1, -1))
        self._states: dict[int, KeptState] = {}  # by slot
        self._now = 0  # counts starts and entries: the clock of recency
        self.version = 0  # a hit is true as long as this does not change

    @property
    def num_states(self) -> int:
        return len(self._states)

    # Starting from the cache.

    def find(self, keys: Iterable[Hashable], tokens: list[int]) -> Hit:
        """The longest of several."""
        return max((self._find(key, tokens) for key in keys), key=lambda hit: (hit.num_tokens, hit.num_same))

    def _find(self, key: Hashable, tokens: list[int]) -> Hit:
        path = self._tree.find(key, tokens)
        nodes, num_last = list(path.nodes), path.num_last
        if self._recurrent:
            if nodes and num_last < len(nodes[-1].blocks):
                nodes.pop()
            while nodes and nodes[-1].state is None:
                nodes.pop()
            num_last = len(nodes[-1].blocks) if nodes else 0
        if not nodes:
            return Hit(num_same=path.num_same, differs=path.differs)
        blocks = [block for node in nodes[:-1] for block in node.blocks] + nodes[-1].blocks[:num_last]
        num_tokens = len(blocks) * self._pool.block_size
        return Hit(num_tokens, tuple(blocks), nodes[-1].state, nodes[-1], path.num_same, path.differs)

    def at(self, key: Hashable, tokens: list[int], position: int) -> Hit:
        """The blocks up to a position and the state there, or a miss."""
        path = self._tree.find(key, tokens[: position + 1])
        if path.num_tokens < position or (self._recurrent and path.nodes[-1].end != position):
            return MISS
        hit = self._find(key, tokens[: position + 1])
        return hit if hit.num_tokens == position else MISS

    def positions(self, key: Hashable, tokens: list[int]) -> list[int]:
        """Where a prompt that begins with these tokens could start."""
        if not self._recurrent:
            num_tokens = self._tree.find(key, tokens).num_tokens
            return [num_tokens] if num_tokens else []
        hit = self._find(key, tokens)
        return [] if hit.node is None else sorted(node.end for node in hit.node.above() if node.state is not None)

    def known_blocks(self, key: Hashable, tokens: list[int]) -> list[int]:
        """The blocks of these tokens, whether or not a row can start after them."""
        path = self._tree.find(key, tokens)
        blocks = [block for node in path.nodes for block in node.blocks]
        return blocks[: path.num_tokens // self._pool.block_size]

    def hold(self, hit: Hit) -> None:
        """A row begins with these blocks: until `release` of the pool, and of the state. A miss counts as well."""
        self._now += 1
        if hit.node is None:
            return
        self.version += 1
        self._pool.share(hit.blocks)
        node = hit.node
        if not self._recurrent:  # a node is held as a whole, or not at all
            node = self._tree.split(node, (hit.num_tokens - node.start) // self._pool.block_size)
        for each in node.above():
            each.used = self._now
        if hit.state is not None:
            hit.state.used = self._now  # not those before it: nobody started from them
            hit.state.num_pins += 1

    def release_state(self, state: KeptState) -> None:
        """The plan that starts from it has gone out, or never will."""
        state.num_pins -= 1
        if state.node.state is not state and not state.num_pins:
            self._free_states.append(state.slot)  # it was dropped meanwhile

    # Leaving something there.

    def take_state(self) -> int | None:
        """A state slot to keep a state in. None: all are about to be used."""
        if not self._free_states:
            victims = [state for state in self._states.values() if not state.num_pins]
            if not victims:
                return None
            self._drop(min(victims, key=self._worth))
        return self._free_states.pop()

    def give_back(self, slot: int) -> None:
        """Nothing was kept in it."""
        self._free_states.append(slot)

    def insert(
        self, key: Hashable, tokens: Sequence[int], blocks: Sequence[int], slot: int | None, kind: str
    ) -> KeptState | None:
        """A row's first blocks and, in a state slot, its state after them. ``tokens``: one more than they hold.

        The state that is there now: this one, or an equal one that was there before. None without recurrent layers.
        """
        self._now += 1
        self.version += 1
        node, new = self._tree.insert(key, tokens, blocks)
        self._pool.cache(new)
        for each in node.above():
            each.used = self._now
        if slot is None:
            return None
        if node.state is not None:
            self._free_states.append(slot)
        else:
            node.state = self._states[slot] = KeptState(slot, node, set(), self._now)
        node.state.kinds.add(kind)
        node.state.used = self._now
        self._thin(node)
        return node.state

    def drop(self, state: KeptState, kind: str) -> None:
        """It need not be kept for this reason any more."""
        if state.node.state is state:
            state.kinds.discard(kind)
            if not state.kinds and len(state.node.children) < 2:
                self._drop(state)

    def _thin(self, node: Node) -> None:
        """At most MAX_STATES on the path to a node. The last two stay, as do the ends of the system message and of the
        last user message, and places where prompts part; of the others that goes first whose tokens are read again the
        fastest.

        Those of a row that generates do not count: prompts that leave out or change its answer start before them.
        """
        states = [each.state for each in node.above() if each.state is not None][::-1]
        while states and states[-1].kinds == {OUTPUT}:
            states.pop()
        users = [state for state in states if USER in state.kinds]
        for state in users[:-1]:
            state.kinds.discard(USER)
        while len(states) > MAX_STATES:
            costs = {
                i: state.node.end - (states[i - 1].node.end if i else 0)
                for i, state in enumerate(states[:-KEPT_LAST])
                if not (state.kinds & {SYSTEM, USER, JUNCTION}) and len(state.node.children) < 2
            }
            if not costs:
                return
            self._drop(states.pop(min(costs, key=costs.__getitem__)))

    # Making room.

    def evict(self, count: int) -> None:
        """Give back at least so many blocks: there are as many idle ones."""
        assert count <= self._pool.num_idle
        wanted = self._pool.num_free + min(self._pool.num_idle, max(count, int(self._pool.num_blocks * MIN_EVICTED)))
        while self._pool.num_free < wanted:
            leaves = [node for node in self._tree.nodes if not node.children and self._pool.is_idle(node.blocks[-1])]
            if leaves:
                self._evict_leaf(min(leaves, key=self._leaf_worth), wanted - self._pool.num_free)
            else:  # what follows is held by rows that have their own blocks for this part
                idle = (node for node in self._tree.nodes if self._pool.count_idle(node.blocks))
                self._evict_all(min(idle, key=lambda node: node.used))

    def _evict_leaf(self, leaf: Node, count: int) -> None:
        if leaf.state is not None:
            self._drop(leaf.state)  # and with it what is worth nothing without it
            return
        keep = 0 if self._recurrent else max(0, len(leaf.blocks) - count)
        if keep:  # the tail is as good as the whole
            self._tree.split(leaf, keep)
        self._remove(leaf)

    def _evict_all(self, node: Node) -> None:
        """A node and all after it."""
        for child in list(node.children.values()):
            self._evict_all(child)
        if node in self._tree.nodes:
            if node.state is not None:
                self._drop(node.state)
            else:
                self._remove(node)

    def _remove(self, leaf: Node) -> None:
        self.version += 1
        self._tree.remove(leaf)
        self._pool.uncache(leaf.blocks)

    def _drop(self, state: KeptState) -> None:
        self.version += 1
        node = state.node
        node.state = None
        del self._states[state.slot]
        if not state.num_pins:
            self._free_states.append(state.slot)
        while node.parent is not None and not node.children and node.state is None:
            parent = node.parent
            self._remove(node)
            node = parent
        self._tree.join(node)

    def _worth(self, state: KeptState) -> float:
        """Tokens that would be read again without it, and how likely that is: by how long ago it was used."""
        before = next((each.end for each in state.node.above() if each.state not in (None, state)), 0)
        return (state.node.end - before) / (1 + self._now - state.used)

    def _leaf_worth(self, leaf: Node) -> float:
        if leaf.state is not None:
            return self._worth(leaf.state) / len(leaf.blocks)
        if self._recurrent:
            return 0.0  # nobody can start after it
        return self._pool.block_size / (1 + self._now - leaf.used)

    def check_integrity(self) -> list[int]:
        """Its blocks, each as often as it is in the tree."""
        for node in self._tree.nodes:
            assert len(node.tokens) == len(node.blocks) * self._pool.block_size + 1 == node.end - node.start + 1
            assert node.parent is not None
            assert node.parent.end == node.start
            assert node.parent.children[tuple(node.tokens[: self._pool.block_size + 1])] is node
            assert node.state is None or self._states[node.state.slot] is node.state
            assert not self._recurrent or node.children or node.state is not None
        assert all(state.node.state is state for state in self._states.values())
        assert not set(self._states) & set(self._free_states)
        assert len(set(self._free_states)) == len(self._free_states)
        return [block for node in self._tree.nodes for block in node.blocks]
