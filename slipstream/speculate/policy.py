"""How many tokens each row drafts: the interface and the simple policies.

A policy gets the rows that will sample in the step being planned and answers with a DraftRequest for each. It learns
from proposed and accepted drafts; what steps cost it asks the cost model. It knows neither sequences nor blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.contract import NO_DRAFTS, DraftRequest
from slipstream.sampling.params import DraftSetting

# Reasons for steps without drafts, after "off where".
NO_ROOM = "there was no room for a draft"
UNSURE = "the head was not sure enough"
PREEMPTED = "it had given up its memory and read its text again"


def ahead(low: int, high: int | None = None) -> str:
    """A depth, or a range of depths, in words."""
    if high is None or high == low:
        return f"{low} token{'' if low == 1 else 's'} ahead"
    return f"{low} to {high} tokens ahead"


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A row that will sample in this step."""

    key: str
    max_depth: int  # its deepest legal draft: head, length limit
    setting: DraftSetting | None = None  # of its request; None: the engine's policy
    context: int = 0  # KV tokens that it attends to


@dataclass(frozen=True, slots=True)
class Load:
    """The rest of the step."""

    num_running: int  # streams
    num_other_tokens: int = 0  # tokens of the step that no decision changes, of rows with a fixed depth
    num_plain: int = 0  # further rows that sample one token each and never draft
    room: int = 1 << 30  # drafts all rows may have together
    context: float = 0.0  # KV tokens that the step's decoding rows attend to, together


class DepthPolicy(ABC):
    @property
    @abstractmethod
    def reason(self) -> str:
        """The last decision and why, for people to read."""

    @abstractmethod
    def why_plain(self, setting: DraftSetting | None) -> str:
        """Why the last decision gave no drafts to rows with this setting; after "off where", for people to read."""

    @abstractmethod
    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        """For each row, no depth above its ``max_depth``."""

    def may_draft(self, setting: DraftSetting | None) -> bool:
        """Whether a request with this setting can ever be given a depth above 0."""
        return True

    def observe_row(  # noqa: B027
        self, key: str, num_drafted: int, num_accepted: int, confidences: Sequence[float] = ()
    ) -> None:
        """A row sampled and verified ``num_drafted`` drafts, with these confidences where the runner reports them."""

    def observe_proposal(self, confidences: Sequence[float]) -> None:  # noqa: B027
        """The confidences of a row's new drafts, also of the one left out for being below the threshold."""

    def forget(self, key: str) -> None:  # noqa: B027
        """The row's request is finished."""


class Off(DepthPolicy):
    def __init__(self, why: str) -> None:
        self._why = why

    @property
    def reason(self) -> str:
        return f"not drafting: {self._why}"

    def why_plain(self, setting: DraftSetting | None) -> str:
        return self._why

    def may_draft(self, setting: DraftSetting | None) -> bool:
        return False

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        return [NO_DRAFTS] * len(rows)


class Fixed(DepthPolicy):
    def __init__(self, depth: int) -> None:
        self._depth = depth

    @property
    def reason(self) -> str:
        return f"drafting {ahead(self._depth)}, as set"

    def why_plain(self, setting: DraftSetting | None) -> str:
        return NO_ROOM

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        return [DraftRequest(min(self._depth, row.max_depth)) for row in rows]


class Solo(DepthPolicy):
    """Drafts only while one stream runs, as some servers do; here for comparison."""

    def __init__(self, alone: DepthPolicy) -> None:
        self._alone = alone
        self._num_running = 0

    @property
    def reason(self) -> str:
        if self._num_running > 1:
            return f"not drafting now: {self._num_running} streams are running, and drafts are set for one alone"
        return self._alone.reason

    def why_plain(self, setting: DraftSetting | None) -> str:
        return "other streams were running" if self._num_running > 1 else self._alone.why_plain(setting)

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        self._num_running = load.num_running
        return self._alone.decide(rows, load) if load.num_running == 1 else [NO_DRAFTS] * len(rows)
