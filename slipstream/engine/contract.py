"""The contract between scheduler and runner: StepPlan down, StepResult up, nothing else crosses.

Each running stream owns a *slot* of the runner until it leaves. For its slot the runner holds

    tokens    every token known so far: prompt, output, and behind them the drafts it proposed last
    cursor    how many of them are computed (their KV and recurrent state are committed)

A step feeds ``min(feed, len(tokens) + len(drafts) - cursor)`` tokens from the cursor on. That one rule is prefill,
chunked prefill, resume after preemption, plain decoding (one token) and verification (one token and the drafts).
A row whose known tokens are all fed *draws*: at every fed position from its last known token on, accepting drafts
while they equal the draw. Then it proposes up to ``propose`` new drafts, and stops before the first one at which the
product of the head's confidences in this row's new drafts would fall under ``floor`` (or its own under ``p_min``), or
behind the first one at which it is under ``onward``: still worth verifying, but not worth drafting on.
A runner whose head tells no confidences ignores the floor and returns none.

A runner may be late (``RunnerInfo.lag`` = 1): the scheduler then plans step n+1 before it has seen the result of
step n. ``feed`` is therefore an upper bound, and ``blocks`` must cover the case that every draft is accepted.
Plans are executed strictly in order, so a slot or a block freed in one plan may be given away in the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a stream's caches come from: another one with the same tokens, which stands there without drafts."""

    slot: int  # the other's
    cursor: int  # tokens that are computed there, and so here
    shared: tuple[int, ...]  # the full KV blocks before the cursor: both read them, nobody writes them again
    copied: tuple[int, int] | None  # where the cursor stands inside a block: that one, and the row's own for a copy

    @property
    def blocks(self) -> tuple[int, ...]:
        """With which the row's table begins."""
        return self.shared if self.copied is None else (*self.shared, self.copied[1])


@dataclass(frozen=True, slots=True)
class RowJoin:
    """A stream enters a slot, with an empty cache (cursor 0) or with that of another stream."""

    slot: int
    tokens: tuple[int, ...]  # all known tokens: the prompt and, after a preemption, the output so far
    num_prompt: int  # how many of them the client sent
    params: SamplingParams
    seed: int  # resolved: never None
    p_min: float  # resolved
    may_draft: bool = True  # False: it never will, so the head need not learn of it
    end_tokens: tuple[int, ...] = ()  # what ends the stream: not drawn before min_tokens
    fork: Fork | None = None


@dataclass(frozen=True, slots=True)
class RowStep:
    """What one row does in this step."""

    slot: int
    feed: int  # at most this many tokens are fed, >= 1
    propose: int  # at most this many drafts are proposed afterwards, if the row draws
    blocks: tuple[int, ...] = ()  # KV blocks appended to the row's table before it runs
    floor: float = 0.0  # drafts end before the chain's confidence falls under this
    onward: float = 0.0  # a further draft is tried only while it is at least this; counts only with a floor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Applied in this order: leaves, joins, rows. A join may fork from any row that is there before the joins."""

    step: int
    leaves: tuple[int, ...]
    joins: tuple[RowJoin, ...]
    rows: tuple[RowStep, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model itself thought of a token, before penalties, bias, masks and temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and theirs, best first; as many as were asked for


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row of the plan did. Same order as ``StepPlan.rows``."""

    slot: int
    num_fed: int
    tokens: tuple[int, ...]  # committed by this step: accepted drafts, then the row's own draw; () if it did not draw
    drafts: tuple[int, ...]  # the proposals the row holds now
    # The head's probability of each draft and, where it ended them early, of the one left out; () without a floor.
    confidences: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # of ``tokens``, where the row asked for them
    # Of the prompt's tokens that follow those fed in this step, where the row asked for them and joined without output.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    fault: str = (
        ""  # why the row cannot go on (a constraint that cannot be followed); it then has neither tokens nor drafts
    )


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    rows: tuple[RowResult, ...]
    verify_seconds: float = 0.0  # forward, draw, commit, and whatever drafting costs a step that does not draft
    draft_seconds: float = 0.0  # the draft passes behind it


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds measured on this machine, as (x, seconds) points with rising x. Empty: unknown."""

    verify: tuple[tuple[int, float], ...] = ()  # by tokens in the step
    draft: tuple[tuple[int, float], ...] = ()  # one draft pass, by rows
    per_row: float = 0.0  # of verification, beside its tokens: reading and writing a row's recurrent state


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a loaded runner can hold and do."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_context: int  # tokens a stream may have in all
    vocab_size: int
    max_depth: int  # 0: this model does not draft
    why_no_draft: str = ""  # one sentence, when max_depth is 0
    lag: int = 0  # steps that may be in flight when the next one is planned
    prompt_tokens: int = 0  # a step may read as many, if more than the engine allows, where no stream decodes
    stops_early: bool = False  # a row that ended its drafts takes no part in the step's later draft passes
    note: str = ""  # what computes where, one line for people


class Runner(Protocol):
    """One array library behind one interface. All calls come from one thread."""

    @property
    def info(self) -> RunnerInfo: ...

    def submit(self, plan: StepPlan) -> None:
        """Start a step. At most ``info.lag + 1`` steps may be uncollected."""

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected step."""
        ...

    def calibrate(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
        """Time verification by tokens and draft passes by rows. Only while no slot is in use."""
        ...

    def close(self) -> None: ...
