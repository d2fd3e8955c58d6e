"""A runner in pure Python that keeps engine/contract.py to the letter and asserts that the scheduler does too.

Its model: the next token is a hash of the seed and the whole history. Its drafter can be right, wrong, or both. What it
writes into blocks is a hash of the history alone, so that streams with other seeds can share them. Its MTP head is fed
as late as the contract allows: when the row drafts, and in steps that keep something.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fake_model import continuation as continuation  # for those who use the fakes
from fake_model import extend, next_token, opinion
from fake_model import opinions as opinions

from slipstream.engine.contract import (
    MAX_KEEPS,
    RowJoin,
    RowResult,
    RowStep,
    RunnerInfo,
    Start,
    StepCosts,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Transfer,
)
from slipstream.engine.request import Request, TokenEvent
from slipstream.engine.scheduler import Scheduler
from slipstream.sampling.params import SamplingParams


@dataclass
class Row:
    """The runner's state of one slot."""

    tokens: list[int]
    digests: list[int]  # [len(tokens)] of the history up to and with each token
    seed: int
    params: SamplingParams
    num_prompt: int
    num_reported: int  # of its prompt's tokens, if their log-probabilities are asked for
    may_draft: bool = True
    cursor: int = 0
    num_in_state: int = 0  # tokens in its recurrent state: without the drafts accepted last
    num_fed_head: int = 0  # positions that the head has been fed
    drafts: tuple[int, ...] = ()
    table: list[int] = field(default_factory=list)

    def push(self, token: int) -> None:
        self.digests.append(extend(self.digests[-1], token))
        self.tokens.append(token)


class FakeRunner:
    """``hit``: probability that a draft is right. ``shy``: it may propose fewer drafts than asked.
    ``reports``: it is right as often as it is confident, keeps to the threshold and reports how confident it was."""

    def __init__(
        self,
        info: RunnerInfo,
        *,
        hit: float = 1.0,
        shy: bool = False,
        reports: bool = False,
        max_tokens: int | None = None,
        verify: Callable[[int], float] = lambda tokens: 0.0,
        draft: Callable[[int], float] = lambda rows: 0.0,
    ) -> None:
        self._info = info
        self._hit = hit
        self._shy = shy
        self._reports = reports
        self._max_tokens = max_tokens
        self._verify = verify
        self._draft = draft
        self._random = random.Random(7)
        self._uncollected: deque[StepResult] = deque()
        self._held: Counter[int] = Counter()  # how many rows have each block in their table
        self._memory: dict[int, list[int | None]] = {}  # block -> digests written there
        self._head_memory: dict[int, list[int | None]] = {}  # the same of the head: with the token after
        self._states: dict[int, int] = {}  # state slot -> digest of the tokens before
        self._host_blocks: dict[int, tuple[list[int | None], ...]] = {}
        self._host_states: dict[int, int] = {}
        self.num_loaded = 0  # blocks from host memory
        self.num_kept = 0
        self.rows: dict[int, Row] = {}
        self.plans: list[StepPlan] = []
        self.num_prompt_computed = 0  # tokens of prompts, each time one is computed
        self.closed = False

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def submit(self, plan: StepPlan) -> None:
        assert len(self._uncollected) <= self._info.lag
        assert plan.step == len(self.plans)
        self.plans.append(plan)
        for slot in plan.leaves:
            del self.rows[slot]
        for transfer in plan.saves:
            self._save(transfer)
        for transfer in plan.loads:
            self._load(transfer)
        for join in plan.joins:
            self._join(join)
        self._check_plan(plan)
        results = tuple(self._run(row) for row in plan.rows)
        depths = [row.draft.depth for row in plan.rows]
        passes = [sum(depth > i for depth in depths) for i in range(max(depths, default=0))]
        seconds = self._verify(sum(row.num_fed for row in results)), sum(self._draft(rows) for rows in passes)
        self._uncollected.append(StepResult(plan.step, results, *seconds))

    def collect(self) -> StepResult:
        return self._uncollected.popleft()

    def calibrate(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
        assert not self.rows
        verify = tuple((n, self._verify(n)) for n in num_tokens)
        read = tuple((n, self._verify(n)) for n in sorted({(1 << i) + j for i in range(10) for j in (0, 1)}))
        return StepCosts(verify, tuple((n, self._draft(n)) for n in num_rows), read=read)

    def close(self) -> None:
        self.closed = True

    def _join(self, join: RowJoin) -> None:
        assert 0 <= join.slot < self._info.num_slots
        assert join.slot not in self.rows
        assert 1 <= join.num_prompt <= len(join.tokens) < self._info.max_context
        fresh = join.params.prompt_logprobs is not None and join.num_prompt == len(join.tokens)
        num_reported = join.num_prompt if fresh else 0
        row = Row([], [0], join.seed, join.params, join.num_prompt, num_reported, join.may_draft)
        for token in join.tokens:
            row.push(token)
        del row.digests[0]
        source = join.start.state_of
        if source is not None and source < self._info.num_slots:
            self._start(row, join.start, source)
        elif join.start.num_computed:
            self._start_from_cache(row, join.start)
        row.num_in_state = row.num_fed_head = row.cursor
        self.rows[join.slot] = row

    def _save(self, transfer: Transfer) -> None:
        for block, host in zip(transfer.blocks, transfer.host_blocks, strict=True):
            assert 0 <= host < self._info.num_host_blocks
            head = self._head_memory.get(block, [None] * self._info.block_size)
            self._host_blocks[host] = list(self._memory[block]), list(head)
        if transfer.host_state is not None:
            assert 0 <= transfer.host_state < self._info.num_host_states
            self._host_states[transfer.host_state] = self._states[transfer.state or 0]

    def _load(self, transfer: Transfer) -> None:
        for block, host in zip(transfer.blocks, transfer.host_blocks, strict=True):
            memory, head = self._host_blocks[host]
            self._memory[block], self._head_memory[block] = list(memory), list(head)
            self.num_loaded += 1
        if transfer.state is not None:
            self._states[transfer.state] = self._host_states[transfer.host_state or 0]

    def _start_from_cache(self, row: Row, start: Start) -> None:
        size = self._info.block_size
        assert 0 < start.num_computed < len(row.tokens)
        assert start.num_computed % self._info.keep_grid == 0
        assert start.copied is None
        assert len(start.blocks) * size == start.num_computed
        assert (start.state_of is not None) == (self._info.num_states > 0)
        if start.state_of is not None:
            assert self._states[start.state_of] == row.digests[start.num_computed - 1], "another state"
        row.cursor, row.table = start.num_computed, list(start.blocks)

    def _start(self, row: Row, start: Start, parent: int) -> None:
        source = self.rows[parent]
        self._feed_head(source, source.cursor)
        assert source.cursor == start.num_computed == len(row.tokens) - 1
        assert not source.drafts
        assert source.tokens == row.tokens
        size = self._info.block_size
        assert list(start.blocks[: start.num_computed // size]) == source.table[: start.num_computed // size]
        assert (start.copied is None) == (start.num_computed % size == 0)
        row.cursor, row.table = start.num_computed, list(start.blocks[: start.num_computed // size])
        if start.copied is not None:
            block, own = start.copied
            assert block == source.table[start.num_computed // size]
            self._memory[own] = list(self._memory[block])
            self._head_memory[own] = list(self._head_memory.get(block, [None] * size))
            row.table.append(own)

    def _check_plan(self, plan: StepPlan) -> None:
        for step in plan.rows:
            self.rows[step.slot].table.extend(step.blocks)
        self._held = Counter(block for row in self.rows.values() for block in row.table)
        assert all(0 <= block < self._info.num_blocks for block in self._held)
        assert len({step.slot for step in plan.rows}) == len(plan.rows)
        if self._max_tokens is not None:
            assert sum(step.feed for step in plan.rows) <= self._max_tokens

    def _run(self, step: RowStep) -> RowResult:
        row = self.rows[step.slot]
        assert step.feed >= 1
        assert 0 <= step.draft.depth <= self._info.max_depth
        assert 0.0 <= step.draft.threshold <= 1.0
        self._check_memory(row)
        known = len(row.tokens)
        fed = min(step.feed, known + len(row.drafts) - row.cursor)
        assert fed >= 1
        drafts, row.drafts = row.drafts[: max(0, row.cursor + fed - known)], ()
        self._write(row, row.cursor, fed, drafts)
        prompt = _opinions(row, row.cursor, min(row.cursor + fed, row.num_reported - 1), row.params.prompt_logprobs)
        self.num_prompt_computed += max(0, min(row.cursor + fed, row.num_prompt) - row.cursor)
        if row.cursor + fed < known:
            assert step.draft.depth == 0
            row.cursor += fed
            self._keep(row, step, row.cursor)
            return RowResult(step.slot, fed, (), (), prompt_logprobs=prompt)
        committed = self._sample(row, drafts)
        row.cursor = len(row.tokens) - 1
        self._keep(row, step, known)
        if step.draft.depth:
            self._feed_head(row, row.cursor)
            self._check_head(row)
        row.drafts, confidences = self._propose(row, step)
        logprobs = _opinions(row, known - 1, len(row.tokens) - 1, row.params.logprobs)
        return RowResult(step.slot, fed, committed, row.drafts, confidences, logprobs, prompt)

    def _keep(self, row: Row, step: RowStep, num_in_state: int) -> None:
        """The row's committed state moves on."""
        assert len(step.keeps) <= MAX_KEEPS
        assert [keep.position for keep in step.keeps] == sorted({keep.position for keep in step.keeps})
        for keep in step.keeps:
            assert keep.position % self._info.keep_grid == 0
            assert (keep.state is not None) == (self._info.num_states > 0)
            if row.num_in_state < keep.position <= num_in_state:
                self.num_kept += 1
                self._feed_head(row, row.cursor)
                if keep.state is not None:
                    assert 0 <= keep.state - self._info.num_slots < self._info.num_states
                    self._states[keep.state] = row.digests[keep.position - 1]
        row.num_in_state = num_in_state

    def _feed_head(self, row: Row, end: int) -> None:
        if not row.may_draft:
            return
        for position in range(row.num_fed_head, end):
            block = row.table[position // self._info.block_size]
            cell = self._head_memory.setdefault(block, [None] * self._info.block_size)
            cell[position % self._info.block_size] = row.digests[position + 1]
        row.num_fed_head = end

    def _check_head(self, row: Row) -> None:
        """What the head was fed is there, whoever fed it, with the tokens that follow in this row."""
        size = self._info.block_size
        for position in range(row.cursor):
            found = self._head_memory[row.table[position // size]][position % size]
            assert found == row.digests[position + 1], f"the head's entry at {position} is another's"

    def _sample(self, row: Row, drafts: tuple[int, ...]) -> tuple[int, ...]:
        committed: list[int] = []
        for draft in (*drafts, None):
            token = next_token(row.digests[-1], row.seed, self._info.vocab_size)
            committed.append(token)
            row.push(token)
            if token != draft:
                break
        assert len(row.tokens) <= self._info.max_context
        return tuple(committed)

    def _propose(self, row: Row, step: RowStep) -> tuple[tuple[int, ...], tuple[float, ...]]:
        count, threshold, measures = step.draft.depth, step.draft.threshold, step.draft.measures
        self._cover(row, row.cursor + max(0, count - 1))
        if self._shy:
            count = self._random.randint(0, count)
        digest, chain = row.digests[-1], 1.0
        drafts: list[int] = []
        confidences: list[float] = []
        for _ in range(count):
            token = next_token(digest, row.seed, self._info.vocab_size)
            hit = self._random.random() if self._reports else self._hit
            if self._reports and measures:
                confidences.append(hit)
            chain *= hit
            if self._reports and chain < threshold:
                break
            if self._random.random() >= hit:
                token = (token + 1) % self._info.vocab_size
            drafts.append(token)
            digest = extend(digest, token)
            if self._reports and chain < step.draft.continue_threshold:
                break
        return tuple(drafts), tuple(confidences)

    def _cover(self, row: Row, num_positions: int) -> None:
        assert num_positions <= len(row.table) * self._info.block_size, "written past the row's blocks"

    def _write(self, row: Row, start: int, count: int, drafts: tuple[int, ...]) -> None:
        self._cover(row, start + count)
        written = row.table[start // self._info.block_size : -(-(start + count) // self._info.block_size)]
        assert all(self._held[block] == 1 for block in written), "written into a block that others hold"
        for position in range(start, start + count):
            digest = row.digests[position] if position < len(row.tokens) else -1 - drafts[position - len(row.tokens)]
            self._cell(row, position)[position % self._info.block_size] = digest

    def _check_memory(self, row: Row) -> None:
        """Nobody else wrote into what this row has committed."""
        for position in range(row.cursor):
            found = self._cell(row, position)[position % self._info.block_size]
            token = row.tokens[position]
            assert found in (row.digests[position], -1 - token), f"position {position} was overwritten"

    def _cell(self, row: Row, position: int) -> list[int | None]:
        block = row.table[position // self._info.block_size]
        return self._memory.setdefault(block, [None] * self._info.block_size)


def _opinions(row: Row, first: int, end: int, num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Of the tokens after these positions."""
    if num_top is None:
        return ()
    return tuple(opinion(row.digests[i], row.tokens[i + 1], num_top) for i in range(first, end))


def make_info(**changes: object) -> RunnerInfo:
    values: dict[str, object] = {
        "num_slots": 4,
        "num_blocks": 64,
        "block_size": 4,
        "max_context": 128,
        "vocab_size": 97,
        "max_depth": 3,
        "lag": 0,
    }
    return RunnerInfo(**(values | changes))  # type: ignore[arg-type]


def make_request(
    key: str, prompt: Iterable[int] = (1, 2, 3), *, seed: int = 1, ends: Iterable[int] = (), **params: object
) -> Request:
    client = str(params.pop("client", ""))
    params.setdefault("max_tokens", 16)
    chosen = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(key, tuple(prompt), chosen, seed, 0.0, frozenset(ends), 0.0, client)


class Harness:
    """Scheduler and runner, stepped by hand; gathers the events of each request."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}  # of the output, and of the prompt
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.finals: dict[str, TokenEvent] = {}
        self.events: list[TokenEvent] = []

    def add(self, *requests: Request) -> None:
        self.scheduler.add(*requests)
        for request in requests:
            self.tokens[request.id] = []
            self.logprobs[request.id], self.prompt_logprobs[request.id] = [], []

    def abort(self, key: str) -> None:
        self._take(self.scheduler.abort(key))

    def step(self) -> StepPlan | None:
        """One iteration of the engine's loop."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.runner.submit(plan)
        if self.scheduler.num_in_flight > (self.runner.info.lag if plan else 0):
            self.collect()
        self.scheduler.check_integrity()
        return plan

    def collect(self) -> None:
        for event in self.scheduler.apply(self.runner.collect()):
            self._take(event)

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def _take(self, event: TokenEvent | None) -> None:
        if event is None:
            return
        assert event.request_id not in self.finals, "an event after the final one"
        self.events.append(event)
        self.tokens[event.request_id] += event.tokens
        self.logprobs[event.request_id] += event.logprobs
        self.prompt_logprobs[event.request_id] += event.prompt_logprobs
        if event.finish_reason:
            self.finals[event.request_id] = event
