"""What an array library provides to the host-driven step: the target model, the MTP head, their caches and sampling.

Flat arrays hold the rows of a step one after the other: token j of a row lies at ``span.offset + j``. How rows are laid
out for the model (ragged, padded grids) is the library's own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from slipstream.engine.contract import HostBuffers, RowJoin, Transfer
from slipstream.runners.host.rows import CommittedRow, Row, RowSampling
from slipstream.runners.logprobs import Numbers
from slipstream.runners.masks import StepMasks
from slipstream.runners.rows import RowSpan
from slipstream.sampling.params import SamplingParams

A = TypeVar("A")  # the library's array
B = TypeVar("B")  # its layout of a step's rows
B_in = TypeVar("B_in", contravariant=True)


@dataclass(frozen=True)  # with slots, a generic dataclass fails on Python 3.11
class CommittedStep(Generic[A, B]):
    """A step as a drafter learns it."""

    hidden: A  # [tokens, hidden]: of all fed tokens
    batch: B
    rows: Sequence[CommittedRow]


class HostModel(Protocol[A, B]):
    host: HostBuffers | None  # memory that blocks and states are saved to
    reads_are_cheap: bool  # whether the host may look at a value in the middle of a step at no cost

    def stepping(self) -> AbstractContextManager[Any]:
        """Around everything that the engine thread computes."""
        ...

    # Caches, by slot.

    def join(self, join: RowJoin) -> None:
        """Prepare the slot's caches: empty, or as ``join.start`` says."""

    def leave(self, slot: int) -> None: ...

    def grow(self, slot: int, blocks: tuple[int, ...]) -> None:
        """Append KV blocks to the slot's table."""

    def save(self, transfer: Transfer) -> None:
        """Copy to host memory, where there is some."""

    def load(self, transfer: Transfer) -> None:
        """Copy back."""

    # The target model.

    def lay_out(self, spans: Sequence[RowSpan]) -> B: ...

    def forward(self, tokens: Sequence[int], batch: B) -> A:
        """The final hidden states. [tokens, hidden]"""
        ...

    def logits(self, hidden: A) -> A:
        """[positions, vocab]"""
        ...

    # Sampling.

    def processors_for(self, params: SamplingParams) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The request's logits processors, those before and those after the masks."""
        ...

    def process(self, logits: A, rows: Sequence[Row], spans: Sequence[RowSpan], masks: StepMasks | None) -> A:
        """Logits at the rows' sampling positions after processors, masks and truncation. May change its argument."""
        ...

    def mask(self, logits: A, index: Sequence[int], masks: Sequence[bytes]) -> A:
        """Rule out what the masks do not allow at these rows of the logits. May change its argument."""
        ...

    def sample(self, logits: A, sampling: Sequence[RowSampling], positions: Sequence[int]) -> A:
        """One token a row of the logits, greedy or with the noise of (seed, position). [rows]"""
        ...

    def confidence(self, logits: A) -> A:
        """The probability of the likeliest token. [rows]"""
        ...

    def log_softmax(self, logits: A) -> A:
        """float32, a copy. [positions, vocab]"""
        ...

    def token_logprobs(self, logprobs: A, tokens: Sequence[int], num_top: int) -> list[Numbers]:
        """For each position: the log-probability of its token, the ids of the likeliest tokens, theirs."""
        ...

    # Arrays.

    def take(self, values: A, index: Sequence[int]) -> A:
        """Rows of an array, as a copy."""
        ...

    def concatenate(self, parts: Sequence[A]) -> A: ...

    def read(self, values: A) -> list[Any]:
        """Waits for the values."""
        ...

    def wait(self, values: A) -> None:
        """Until they are computed, and what was computed for them."""

    def finish(self) -> None:
        """Wait for everything that was computed, and end the step."""


class HostHead(Protocol[A, B_in]):
    """The MTP head, with the target's embedding and an output matrix for drafts."""

    vocab_size: int  # of that matrix: drafts may come from the first part of the vocabulary only

    def forward(self, hidden: A, tokens: Sequence[int] | A, batch: B_in) -> A:
        """hidden: of each position; tokens: the token after each. [tokens, hidden]"""
        ...

    def logits(self, hidden: A) -> A:
        """[rows, vocab_size]"""
        ...
