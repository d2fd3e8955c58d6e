"""Parallel samples (n > 1): the parent computes the prompt of a sample group but for its last token.

Until then its children have a slot and blocks of their own and wait; then they start from its cache. A child that was
preempted before that is admitted again like any request, together with the waiting ones of its group. Owns no memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import takewhile

from slipstream.engine.request import Sequence


def first_group(waiting: deque[Sequence]) -> list[Sequence]:
    """The first waiting sequence and those right after it that need the same prompt computed."""
    first = waiting[0]
    if first.group is None or first.num_output:
        return [first]
    return list(takewhile(lambda other: other.group is first.group and not other.num_output, waiting))


def bind(parent: Sequence, children: list[Sequence]) -> None:
    parent.parent, parent.children = None, children
    for child in children:
        child.parent = parent


def at_rest(running: Iterable[Sequence]) -> list[Sequence]:
    """Parents that stand before the prompt's last token, with nothing in flight: their children may start."""
    return [parent for parent in running if parent.children and parent.num_uncomputed == 1 and not parent.in_flight]


def unbind(sequence: Sequence) -> Sequence | None:
    """It waits for nobody any more. Its first child, if it has one, is its successor: the parent of the others."""
    if sequence.parent is not None:
        sequence.parent.children.remove(sequence)
        sequence.parent = None
    if not sequence.children:
        return None
    successor, *others = sequence.children
    sequence.children = []
    bind(successor, others)
    return successor


def unbind_children(parent: Sequence) -> list[Sequence]:
    """They wait no longer and have the log-probabilities of the parent's prompt."""
    children, parent.children = parent.children, []
    for child in children:
        child.parent, child.prompt_logprobs = None, parent.prompt_logprobs
    return children
