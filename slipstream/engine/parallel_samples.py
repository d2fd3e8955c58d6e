"""Sequences that were asked for together: the first of them, the leader, computes their prompt but for its last token.

Until then its siblings have a slot and blocks of their own and wait; then they fork from it. A sibling that lost its
place before that comes in again as anyone does, with those of its family that wait beside it. Owns no memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import takewhile

from slipstream.engine.request import Sequence


def first_group(waiting: deque[Sequence]) -> list[Sequence]:
    """The first that waits, and those right behind it that want the same prompt computed."""
    first = waiting[0]
    if first.family is None or first.num_output:
        return [first]
    return list(takewhile(lambda other: other.family is first.family and not other.num_output, waiting))


def bind(leader: Sequence, siblings: list[Sequence]) -> None:
    leader.leader, leader.siblings = None, siblings
    for sibling in siblings:
        sibling.leader = leader


def at_rest(running: Iterable[Sequence]) -> list[Sequence]:
    """Leaders that stand before the prompt's last token, with nothing in flight: their siblings may fork."""
    return [leader for leader in running if leader.siblings and leader.gap == 1 and not leader.in_flight]


def part(sequence: Sequence) -> Sequence | None:
    """It waits for nobody any more. If others waited for it, the first of them is their leader now: that one."""
    if sequence.leader is not None:
        sequence.leader.siblings.remove(sequence)
        sequence.leader = None
    if not sequence.siblings:
        return None
    heir, *others = sequence.siblings
    sequence.siblings = []
    bind(heir, others)
    return heir


def num_shared(sequence: Sequence, block_size: int) -> int:
    """Blocks that are full before the prompt's last token."""
    return (len(sequence.request.prompt_tokens) - 1) // block_size
