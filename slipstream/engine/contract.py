"""The contract between scheduler and runner: StepPlan down, StepResult up, nothing else crosses.

Each running stream owns a *slot* of the runner until it leaves. For its slot the runner holds

    tokens    every token known so far: prompt and output; after them the drafts it proposed last
    cursor    how many of them are computed (their KV and recurrent state are committed)

A step feeds ``min(feed, len(tokens) + len(drafts) - cursor)`` tokens from the cursor on. That one rule is prefill,
chunked prefill, resume after preemption, plain decoding (one token) and verification (one token and the drafts).
A row whose known tokens are all fed *samples*: at every fed position from its last known token on, accepting drafts
while they equal the sampled token. Then it proposes the drafts that ``draft`` asks for.
A runner whose drafter has no confidences ignores thresholds and reports none.

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
class Start:
    """The part of a joining row that is computed already: the KV blocks that hold it, the recurrent state it continues.

    The default is an empty cache. A start with computed tokens continues another row, which has the same tokens up to
    there, is at rest (nothing in flight), holds no drafts, and has not decoded yet (its last step read a piece of its
    prompt, which stores the state in every runner); or it continues from what a row kept (`Keep`).
    """

    num_computed: int = 0  # the row's cursor when it joins
    blocks: tuple[
        int, ...
    ] = ()  # its block table begins with these; full ones may be shared and are never written again
    copied: tuple[int, int] | None = None  # a partly filled block, and the row's own copy of it (the last of blocks)
    state_of: int | None = None  # the slot or state slot whose recurrent state, as of num_computed, is copied


EMPTY = Start()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The drafts that a row proposes after this step, if it samples.

    The confidence of a chain of drafts is the product of the drafter's probabilities of them. Rows also have ``p_min``,
    a bound for each single draft.
    """

    depth: int = 0  # at most this many drafts
    threshold: float = 0.0  # drafts end before the first one at which the chain's confidence falls below this
    continue_threshold: float = 0.0  # no further draft is made once the chain's confidence is below this
    report_confidence: bool = False  # put the confidences into the result; a threshold implies it

    @property
    def measures(self) -> bool:
        """Whether the drafter's confidence is needed at all."""
        return self.report_confidence or self.threshold > 0.0 or self.continue_threshold > 0.0


NO_DRAFTS = DraftRequest()


@dataclass(frozen=True, slots=True)
class Keep:
    """Make what a row computed up to ``position`` fit for other rows to start from.

    Its KV lies in its blocks anyway. The MTP head must have been fed every token before ``position`` by the end of the
    step, and where layers are recurrent, their state after exactly so many tokens is copied into the state slot. It
    happens in the step in which the row's committed state passes the position: known tokens and drafts accepted in an
    earlier step, never the drafts of this one. In a step that does not pass it, nothing happens.
    """

    position: int  # tokens; a multiple of RunnerInfo.keep_grid
    state: int | None = None  # a state slot, numbered from num_slots on; None: no layer is recurrent


MAX_KEEPS = 4  # of one row in one step


@dataclass(frozen=True, slots=True)
class RowJoin:
    """A stream enters a slot."""

    slot: int
    tokens: tuple[int, ...]  # all known tokens: the prompt and, after a preemption, the output so far
    num_prompt: int  # how many of them the client sent
    params: SamplingParams
    seed: int  # resolved: never None
    p_min: float  # resolved
    may_draft: bool = True  # False: it never will, so the head need not be fed
    end_tokens: tuple[int, ...] = ()  # they end the stream; not sampled before min_tokens
    start: Start = EMPTY


@dataclass(frozen=True, slots=True)
class RowStep:
    """The work of one row in this step."""

    slot: int
    feed: int  # at most this many tokens are fed, >= 1
    draft: DraftRequest = NO_DRAFTS
    blocks: tuple[int, ...] = ()  # KV blocks appended to the row's table before it runs
    keeps: tuple[Keep, ...] = ()  # with rising positions, at most MAX_KEEPS


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks, and a recurrent state, copied between the device and the runner's host memory, pairwise."""

    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    state: int | None = None  # a state slot
    host_state: int | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Applied in this order: leaves, saves, loads, joins, rows. A join may start from any row that is there before the
    joins. Steps need not wait for saves; but what a save reads may be overwritten by the same plan."""

    step: int
    leaves: tuple[int, ...]
    joins: tuple[RowJoin, ...]
    rows: tuple[RowStep, ...]
    saves: tuple[Transfer, ...] = ()  # to host memory
    loads: tuple[Transfer, ...] = ()  # from there


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The model's own log-probabilities at one token, before penalties, bias, masks and temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and theirs, best first; as many as requested


@dataclass(frozen=True, slots=True)
class RowResult:
    """The outcome of one row of the plan. Same order as ``StepPlan.rows``."""

    slot: int
    num_fed: int
    tokens: tuple[
        int, ...
    ]  # committed by this step: accepted drafts, then the row's own sample; () if it did not sample
    drafts: tuple[int, ...]  # the proposals the row holds now
    # The drafter's probability of each draft and, where it ended them early, of the one left out; () if not measured.
    confidences: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # of ``tokens``, where requested
    # Of the prompt's tokens that follow those fed in this step, where requested and the row joined without output.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # The reason why the row cannot continue (a constraint without a legal token); it then has no tokens and no drafts.
    fault: str = ""


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    rows: tuple[RowResult, ...]
    verify_seconds: float = 0.0  # forward, sample, commit, and the part of drafting that a step without drafts pays too
    draft_seconds: float = 0.0  # the draft passes after it
    late_seconds: float = 0.0  # feeding the drafter tokens of earlier steps: not what this step's depths cost


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds measured on this machine, as (x, seconds) points with rising x. Empty: unknown."""

    verify: tuple[tuple[int, float], ...] = ()  # by tokens in the step
    draft: tuple[tuple[int, float], ...] = ()  # one draft pass, by rows
    per_row: float = 0.0  # of verification, besides its tokens: reading and writing a row's recurrent state
    context: float = 0.0  # of verification, for each KV token that a row attends to
    context_share: float = 0.0  # of that, for each further token that the row feeds: 0 where they share what is read
    read: tuple[tuple[int, float], ...] = ()  # a step that reads a prompt and nothing else, by tokens
    read_context: tuple[float, float] = (0.0, 0.0)  # of it, for each KV token before: a piece, and each token of one


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """The capacity and abilities of a loaded runner."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_context: int  # tokens a stream may have in all, where the blocks suffice
    vocab_size: int
    max_depth: int  # 0: this model does not draft
    why_no_draft: str = ""  # one sentence, when max_depth is 0
    lag: int = 0  # steps that may be in flight when the next one is planned
    step_sizes: tuple[int, ...] = ()  # steps are padded to one of these numbers of tokens; (): they are not
    prompts_apart: bool = False  # beside decoding rows, prompts are read in a forward of their own
    prompt_tokens: int = 0  # prefill budget of a step in which no stream decodes, if above the engine's
    keep_grid: int = 0  # rows start from kept positions that are multiples of this, as of block_size; 0: they cannot
    num_states: int = 0  # state slots for what rows keep; 0: no layer is recurrent
    num_host_blocks: int = 0  # blocks and states in host memory, to which the cache can be copied; 0: there is none
    num_host_states: int = 0
    stops_early: bool = False  # a row whose drafts have ended costs nothing in the step's later draft passes
    note: str = ""  # device and precision, one line for people

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt included, that one request can have: the context, or all blocks where they hold less."""
        return min(self.max_context, self.num_blocks * self.block_size)


class HostBuffers(Protocol):
    """Host memory of a runner: a contiguous piece for each block and each state."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def state_bytes(self) -> int: ...

    def block(self, index: int) -> memoryview: ...

    def state(self, index: int) -> memoryview: ...

    def wait(self) -> None:
        """For all saves of submitted plans. Any thread may call it."""


class Runner(Protocol):
    """A model on one array library. All calls come from one thread."""

    @property
    def info(self) -> RunnerInfo: ...

    def submit(self, plan: StepPlan) -> None:
        """Start a step. At most ``info.lag + 1`` steps may be uncollected."""

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected step."""
        ...

    def calibrate(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
        """Time verification by tokens, draft passes by rows and reading. Only while no slot is in use.

        ``num_rows``: none where depths are not chosen by cost. A runner may then return no costs at all.
        """
        ...

    @property
    def host_memory(self) -> HostBuffers | None:
        """Where plans save to and load from; None: ``info`` has no host blocks."""
        ...

    def close(self) -> None: ...
