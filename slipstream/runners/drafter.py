"""The interface of every drafter, host-driven or on the device: what a step committed goes in, drafts come out."""

from __future__ import annotations

from typing import Protocol, TypeVar

Committed = TypeVar("Committed", contravariant=True)  # a step, as its runner hands it over
Asked = TypeVar("Asked", contravariant=True)  # rows and their DraftRequests
Drafts = TypeVar("Drafts", covariant=True)


class Drafter(Protocol[Committed, Asked, Drafts]):
    """After each step ``committed``, then ``propose``. Which drafts are accepted is not a drafter's decision."""

    def committed(self, step: Committed) -> None:
        """Learn what the step computed. Rejected drafts among it are overwritten by the next step."""

    def propose(self, rows: Asked) -> Drafts: ...
