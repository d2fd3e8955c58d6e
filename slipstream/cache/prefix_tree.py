"""A radix tree over the tokens of KV blocks: which blocks hold a prompt's first tokens.

A block is the same for two prompts if its tokens and the one after them are equal: the MTP head's entry at a position
depends on the next token. A node is a run of blocks; a kept recurrent state belongs to the end of a node. Owns no
memory and chooses nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

MAX_RUN = 512  # blocks that joining two nodes may make of them: lists are copied


@dataclass(eq=False, slots=True)
class KeptState:
    """The recurrent state after the tokens of a node and those before it."""

    slot: int
    node: Node
    kinds: set[str]  # why it was kept
    used: int  # when it was last started from, or made
    num_pins: int = 0  # rows that will start from it in a plan that has not gone out, or were promised it


@dataclass(eq=False, slots=True)
class Node:
    parent: Node | None
    start: int  # tokens before its own
    end: int  # and with them
    tokens: list[int]  # of its blocks, and the one after
    blocks: list[int]
    used: int = 0  # when it was last matched or made
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)  # by the first block's tokens and the next
    state: KeptState | None = None

    def above(self) -> Iterator[Node]:
        """Itself and the nodes before it, but for the root."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Path:
    """How far the tree knows some tokens."""

    nodes: tuple[Node, ...]  # all their blocks match, but for the last one, of which ``num_last`` do
    num_last: int
    num_same: int  # tokens that are equal to those of some prompt: the next one differs, or nothing is known of it
    differs: bool  # it differs

    @property
    def num_tokens(self) -> int:
        """In blocks that match."""
        if not self.nodes:
            return 0
        last = self.nodes[-1]
        return last.start + (last.end - last.start) // len(last.blocks) * self.num_last


class PrefixTree:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[Hashable, Node] = {}
        self.nodes: set[Node] = set()

    def find(self, key: Hashable, tokens: Sequence[int]) -> Path:
        """``key``: prompts with another one share nothing. ``tokens``: a list, for speed."""
        node, position = self._roots.get(key), 0
        found: list[Node] = []
        while node is not None:
            child = node.children.get(tuple(tokens[position : position + self.block_size + 1]))
            if child is None:
                same = max((common_length(tokens, position, each.tokens) for each in node.children.values()), default=0)
                # At the end of a node its last token is known already: the one after its blocks.
                same = max(same, 1 if found else 0)
                known_next = bool(node.children)
                return Path(
                    tuple(found), _num_blocks(found), position + same, known_next and position + same < len(tokens)
                )
            found.append(child)
            num_equal = common_length(tokens, position, child.tokens)
            if num_equal < len(child.tokens):
                num_last = (num_equal - 1) // self.block_size
                return Path(tuple(found), num_last, position + num_equal, position + num_equal < len(tokens))
            position, node = child.end, child
        return Path((), 0, 0, differs=False)

    def insert(self, key: Hashable, tokens: Sequence[int], blocks: Sequence[int]) -> tuple[Node, list[int]]:
        """The node that ends where these blocks do, and those of them that are new to the tree.

        ``tokens``: those of the blocks, and at least one more.
        """
        size = self.block_size
        end = len(blocks) * size
        assert 0 < end < len(tokens)
        root = self._roots.setdefault(key, Node(None, 0, 0, [], []))
        path = self.find(key, tokens[: end + 1])
        node = self.split(path.nodes[-1], path.num_last) if path.nodes else root
        if node.end == end:
            return node, []
        new = list(blocks[node.end // size :])
        leaf = Node(node, node.end, end, list(tokens[node.end : end + 1]), new)
        node.children[tuple(leaf.tokens[: size + 1])] = leaf
        self.nodes.add(leaf)
        return leaf, new

    def split(self, node: Node, num_blocks: int) -> Node:
        """The node that ends after the first blocks of a node. That one keeps its end and its children."""
        size = self.block_size
        if num_blocks == len(node.blocks):
            return node
        parent = node.parent
        assert parent is not None
        assert 0 < num_blocks < len(node.blocks)
        cut = num_blocks * size
        first = Node(parent, node.start, node.start + cut, node.tokens[: cut + 1], node.blocks[:num_blocks], node.used)
        parent.children[tuple(node.tokens[: size + 1])] = first
        node.parent, node.start = first, first.end
        node.tokens, node.blocks = node.tokens[cut:], node.blocks[num_blocks:]
        first.children[tuple(node.tokens[: size + 1])] = node
        self.nodes.add(first)
        return first

    def join(self, node: Node) -> None:
        """A node without a state that has one child becomes a part of it."""
        parent = node.parent
        if parent is None or node not in self.nodes or node.state is not None or len(node.children) != 1:
            return
        [child] = node.children.values()
        if len(node.blocks) + len(child.blocks) > MAX_RUN:
            return
        child.tokens = node.tokens[:-1] + child.tokens
        child.blocks = node.blocks + child.blocks
        child.parent, child.start = parent, node.start
        parent.children[tuple(child.tokens[: self.block_size + 1])] = child
        self.nodes.discard(node)

    def remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        assert leaf.state is None
        del parent.children[tuple(leaf.tokens[: self.block_size + 1])]
        self.nodes.discard(leaf)
        self.join(parent)


def _num_blocks(nodes: Sequence[Node]) -> int:
    return len(nodes[-1].blocks) if nodes else 0


def common_length(tokens: Sequence[int], position: int, run: Sequence[int]) -> int:
    """How many of a run's tokens are found at a position. Both lists, for speed."""
    piece = tokens[position : position + len(run)]
    if piece == run:
        return len(run)
    return next((i for i, (ours, theirs) in enumerate(zip(piece, run)) if ours != theirs), len(piece))
