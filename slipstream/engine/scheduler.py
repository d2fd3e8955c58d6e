"""The rows of the next step, with how many tokens each: schedule() -> plan, apply(result) -> events.

One law: a sequence has computed and known tokens (and drafts), and a step lets computed catch up. Owns the waiting
and running sequences and the slots; blocks are the cache manager's. Knows neither the calling thread nor the runner.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from slipstream.cache.disk_tier import DiskTier
from slipstream.cache.host_tier import HostTier
from slipstream.cache.manager import CachedRow, CacheManager, RowDemand
from slipstream.cache.prefix_cache import Found
from slipstream.config import EngineConfig
from slipstream.engine.bounds import Bounds
from slipstream.engine.contract import RowJoin, RowResult, RunnerInfo, StepPlan, StepResult
from slipstream.engine.draft_requests import DraftRequests
from slipstream.engine.parallel_samples import at_rest, bind, unbind, unbind_children
from slipstream.engine.prefix_sharing import PrefixSharing
from slipstream.engine.prompt_pieces import PromptPieces, share
from slipstream.engine.request import (
    Commit,
    FinishReason,
    Request,
    Sequence,
    TokenEvent,
    check_request,
    length_limit,
)
from slipstream.engine.stats import EngineCounters, RequestStats, StatsSnapshot, StreamSnapshot
from slipstream.engine.step_builder import InFlight, StepBuilder
from slipstream.engine.waiting import WaitingLine
from slipstream.speculate.cost_model import CostModel
from slipstream.speculate.policy import DepthPolicy

Rows = list[tuple[Sequence, Bounds]]  # running sequences and their bounds


class Scheduler:
    """Preempted sequences come back before others are admitted, so the youngest is always the last of ``_running``."""

    def __init__(
        self,
        info: RunnerInfo,
        policy: DepthPolicy,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        disk: DiskTier | None = None,
        costs: CostModel | None = None,
    ) -> None:
        """``disk``: for what the prefix cache keeps beyond this process. ``costs``: the policy's; None: of its own."""
        self.info = info
        self.policy = policy
        self.config = config
        self.counters = EngineCounters()
        self._clock = clock
        host = None
        if config.prefix_cache and info.num_host_blocks:
            host = HostTier(info.num_host_blocks, info.block_size, info.num_host_states, disk)
        self._cache = CacheManager(info.num_blocks, info.block_size, info.num_slots, info.num_states, host)
        self._sharing = PrefixSharing(info, config, self._cache)
        self._free_slots = list(range(min(info.num_slots, config.max_streams) - 1, -1, -1))
        self._num_slots = len(self._free_slots)
        self._waiting = WaitingLine()
        self._running: list[Sequence] = []
        self._live: dict[str, Sequence] = {}
        self._leaves: list[int] = []  # slots the runner still has to empty
        self._in_flight: deque[InFlight] = deque()
        self._next_step = 0
        self._applied_at = clock()  # when the last result came in
        self._costs = costs or CostModel()
        self._pieces = PromptPieces(info, config, self._costs)
        self._drafts = DraftRequests(policy, config, self._cache, self.max_depth)
        self._step_seconds: tuple[float, float] | None = None  # of the step being applied, and of a plain one

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._leaves or self._in_flight or self._sharing.has_saves)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def max_depth(self) -> int:
        return min(self.info.max_depth, self.config.max_depth)

    def close(self) -> None:
        """Waits until what is to be on disk is there. Nothing is in flight, and no request is left."""
        self._cache.close()

    # Requests come and go.

    def add(self, *requests: Request) -> None:
        """Requests added together have the same prompt: it is computed once, if it has more than one token."""
        assert len(requests) <= self._num_slots
        shares = len(requests) > 1 and len(requests[0].prompt_tokens) > 1
        group = object() if shares else None
        for request in requests:
            check_request(request, self.info)
            assert request.id not in self._live
            assert request.prompt_tokens == requests[0].prompt_tokens
            sequence = Sequence(request, length_limit(request, self.info), group)
            sequence.arrival_step = self._next_step
            self._live[request.id] = sequence
            self._waiting.add(sequence)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> TokenEvent | None:
        """The final event, or None if the request is unknown or already finished."""
        sequence = self._live.get(request_id)
        return None if sequence is None else self._end(sequence, reason, self._clock())

    # Planning.

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be planned before a result comes in."""
        assert len(self._in_flight) <= self.info.lag
        rows = [(sequence, bounds) for sequence in self._running if self._wants(sequence, bounds := sequence.bounds)]
        step = StepBuilder(max(self.config.max_step_tokens, self.info.prompt_tokens))
        parents = at_rest(self._running)
        self._schedule_decoding(step, rows, sum(1 + len(parent.children) for parent in parents))
        self._schedule_children(step, parents)
        self._schedule_prompts(step, rows)
        self._drafts.request(step, len(self._running))
        is_empty = not step.rows and not self._leaves and not self._sharing.has_saves
        if is_empty or (not step.rows and self._in_flight):
            return None
        return self._launch(step)

    def _wants(self, sequence: Sequence, bounds: Bounds) -> bool:
        """False for a row that waits for its parent or its children, that the steps in flight are sure to finish, or
        that they could bring to the end of the context."""
        waits = sequence.parent is not None or (sequence.children and bounds.num_uncomputed == 1)
        return not waits and bounds.min_tokens < sequence.limit and bounds.max_tokens < self.info.max_model_len

    def _schedule_decoding(self, step: StepBuilder, rows: Rows, num_starting: int) -> None:
        """Rows with one known token to feed, and their drafts: they never wait for a prompt."""
        short = [(sequence, bounds) for sequence, bounds in rows if bounds.num_uncomputed == 1]
        has_prompts = len(short) < len(rows) or bool(self._waiting)
        spare = step.budget - len(short) - num_starting - (self.config.min_chunk if has_prompts else 0)
        assert spare >= 0
        for sequence, bounds in short:
            feed = 1 + min(bounds.max_drafts, spare)
            if step.may_run(sequence) and self._secure(sequence, bounds.max_computed + feed, step):
                step.add(sequence, bounds, feed)
                spare -= feed - 1

    def _schedule_children(self, step: StepBuilder, parents: list[Sequence]) -> None:
        """Children continue from their parent's cache; from here on each feeds and samples for itself."""
        for parent in parents:
            children = unbind_children(parent)
            step.joins += [self._join(child, parent) for child in children]
            for sequence in (parent, *children):
                if step.may_run(sequence):  # or it was the youngest when blocks ran out
                    step.add(sequence, sequence.bounds, 1)

    def _schedule_prompts(self, step: StepBuilder, rows: Rows) -> None:
        """Prompts share what the step reads. All have had their blocks since their admission."""
        prompts = [(s, bounds) for s, bounds in rows if bounds.num_uncomputed > 1 and step.may_run(s)]
        self._sharing.poll()
        self._waiting.unpark(self._sharing.still_waits)
        group = self._next_group(step)
        if not prompts and not group:
            return
        before = max((bounds.max_computed for _, bounds in prompts), default=0)
        step.prompt_budget = self._pieces.size(
            step.decoding, step.budget, before, self._num_earlier(step, prompts, group)
        )
        lefts = [bounds.num_uncomputed for _, bounds in prompts]
        lefts += [len(first.tokens) - self._find(first).num_tokens for first in group[:1]]  # what it gets is left over
        for (sequence, bounds), feed in zip(prompts, share(step.chunk, lefts)):
            step.add_chunk(sequence, bounds, feed)
        self._admit(step)

    def _num_earlier(self, step: StepBuilder, prompts: Rows, group: list[Sequence]) -> int:
        """Prompts that came before any decoding row of the step had its first token, as far as there is room for them.
        Not those of preempted streams. ``group``: whose turn it is."""
        first = min((row.sequence.first_token_step for row in step.rows if not row.is_prompt), default=math.inf)
        line = self._waiting.in_line() if any(sequence.came_before(first) for sequence in group) else ()
        waiting = sum(sequence.came_before(first) for sequence in line)
        return min(waiting, len(self._free_slots)) + sum(sequence.came_before(first) for sequence, _ in prompts)

    def _next_group(self, step: StepBuilder) -> list[Sequence]:
        """Whose turn it is, as far as there is room. Those that wait for what another computes step aside, also where
        nothing is left to feed: who reads a prompt must know early what to keep."""
        while self._waiting.has_next and not step.starved:
            group = self._waiting.first_group()
            first = group[0]
            may_draft = self.policy.may_draft(first.draft_setting)
            if not self._sharing.must_wait(first, self._find(first), may_draft, self._running):
                return self._fitting(group)
            self._waiting.park(group)
        return []

    def _admit(self, step: StepBuilder) -> None:
        while (group := self._next_group(step)) and step.chunk:
            first, found = group[0], self._find(group[0])
            self._waiting.take(group)
            bind(first, group[1:])
            for sequence in group:
                self._admit_one(sequence, found)
            step.add_chunk(first, first.bounds, step.chunk)

    def _admit_one(self, sequence: Sequence, found: Found) -> None:
        """``found``: what is cached for its group."""
        num_cached = self._cache.admit(self._demand(sequence, sequence.parent is not None))
        shown = sequence.parent.counters.cached_tokens if sequence.parent else num_cached
        self._sharing.admitted(sequence, found, shown, self.policy.may_draft(sequence.draft_setting))
        if sequence.counters.joined_at is None and sequence.parent is None:
            self.counters.num_cache_queries += len(sequence.request.prompt_tokens)
            self.counters.num_cache_hits += num_cached
        self._running.append(sequence)
        sequence.counters.join(self._clock())
        sequence.slot = self._free_slots.pop()
        sequence.num_computed = num_cached

    def _find(self, sequence: Sequence) -> Found:
        return self._sharing.find(sequence, self.policy.may_draft(sequence.draft_setting))

    def _fitting(self, group: list[Sequence]) -> list[Sequence]:
        """All of a group or none; as many as there is room for only where no running row will make room."""
        while group:
            demands = [self._demand(sequence, i > 0) for i, sequence in enumerate(group)]
            if len(group) <= len(self._free_slots) and self._cache.can_admit(demands, len(self._running)):
                break
            group = [] if self._running else group[:-1]
        return group

    def _demand(self, sequence: Sequence, has_parent: bool) -> RowDemand:
        """Blocks for its known tokens and its first drafts; a child shares all before the prompt's last token."""
        num_tokens = min(sequence.limit, len(sequence.tokens) + 1 + self.max_depth)
        if has_parent:
            return RowDemand(sequence.id, num_tokens, len(sequence.request.prompt_tokens) - 1)
        return RowDemand(sequence.id, num_tokens, found=self._find(sequence))

    def _join(self, sequence: Sequence, parent: Sequence | None = None) -> RowJoin:
        source = None
        if parent is not None:
            assert parent.slot is not None
            assert not parent.in_flight
            source = CachedRow(parent.id, parent.slot, parent.num_computed)
        is_copied = self._cache.is_on_host(sequence.id)
        start = self._cache.start(sequence.id, source)
        self._sharing.started(sequence, start, is_copied)
        return sequence.join(start, self.policy.may_draft(sequence.draft_setting))

    def _launch(self, step: StepBuilder) -> StepPlan:
        step.joins += [self._join(row.sequence) for row in step.rows if not row.sequence.joined]
        for row in step.rows:
            row.keeps = self._sharing.keeps(row.sequence, row.bounds, row.feed)
        rows = tuple(row.step(self._cache.take_unsent(row.sequence.id)) for row in step.rows)
        loads = self._cache.take_loads()
        plan = StepPlan(self._next_step, tuple(self._leaves), tuple(step.joins), rows, self._sharing.saves(), loads)
        self._in_flight.append(step.launch(plan))
        self._leaves.clear()
        self._next_step += 1
        return plan

    # Preemption.

    def _secure(self, sequence: Sequence, num_tokens: int, step: StepBuilder) -> bool:
        """Blocks for that many tokens, if need be from the youngest. False: the row skips this step."""
        while not self._cache.reserve(sequence.id, num_tokens):
            victim = self._running[-1]
            step.starved = True
            if victim.in_flight:
                step.held.add(victim)  # let it come to rest: it can then be preempted in the next step
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        assert not victim.in_flight
        assert not victim.children, "they are younger"
        self._vacate(victim)
        self._waiting.put_back(victim)
        victim.counters.num_preemptions += 1
        self.counters.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        """Give up its slot and blocks."""
        assert sequence.slot is not None
        if sequence.joined:
            self._leaves.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        self._running.remove(sequence)
        sequence.leave()
        self._sharing.left(sequence)
        self._cache.release(sequence.id)
        successor = unbind(sequence)
        if successor is not None:
            self._cache.stop_sharing(successor.id)  # with the blocks just released

    # Results.

    def apply(self, result: StepResult) -> list[TokenEvent]:
        step = self._in_flight.popleft()
        assert step.plan.step == result.step
        assert len(step.sequences) == len(result.rows)
        if result.rows:
            self.counters.count_step(sum(row.num_fed for row in result.rows))
        now = self._clock()
        self._step_seconds = None
        if result.rows and not step.has_prompts:
            timing = step.timing(result, now - self._applied_at, self.info.stops_early)
            self._costs.observe(timing)
            plain_seconds = self._costs.plain_seconds(timing)
            self._step_seconds = None if plain_seconds is None else (timing.seconds, plain_seconds)
        if step.has_prompts:
            self._sharing.observe_reading(sum(row.num_fed for row in result.rows), now - self._applied_at)
        self._applied_at = now
        events = (self._apply_row(sequence, row, now) for sequence, row in zip(step.sequences, result.rows))
        return [event for event in events if event is not None]

    def _apply_row(self, sequence: Sequence, row: RowResult, now: float) -> TokenEvent | None:
        if sequence.finish_reason is not None:
            return None  # it ended while this step was in flight
        if row.fault:
            return self._end(sequence, "error", now, row.fault)
        if row.confidences:
            self.policy.observe_proposal(row.confidences)
        commit = sequence.commit(row)
        self._sharing.committed(sequence)
        if commit is None:
            return None
        if self._step_seconds is not None:
            sequence.counters.gain.count(len(commit.tokens), *self._step_seconds)
        self.policy.observe_row(sequence.id, commit.num_drafted, commit.num_accepted, commit.confidences)
        self._count(sequence, commit, now)
        return TokenEvent(
            request_id=sequence.id,
            tokens=commit.tokens,
            num_accepted=commit.num_accepted,
            finish_reason=commit.finish_reason,
            stats=self._finish(sequence, commit.finish_reason) if commit.finish_reason else None,
            at=now,
            logprobs=commit.logprobs,
            prompt_logprobs=commit.prompt_logprobs,
            cached_tokens=sequence.counters.cached_tokens,
        )

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, error: str = "") -> TokenEvent:
        """Before its output is complete; the others do not notice."""
        sequence.finish_reason = reason
        stats = self._finish(sequence, reason)
        return TokenEvent(sequence.id, finish_reason=reason, stats=stats, error=error, at=now)

    def _count(self, sequence: Sequence, commit: Commit, now: float) -> None:
        sequence.counters.count(commit.num_drafted, commit.num_accepted)
        self.counters.count(commit.num_drafted, commit.num_accepted)
        self.counters.num_output_tokens += len(commit.tokens)
        if commit.why_plain:
            sequence.counters.why_plain[commit.why_plain] += 1
        if sequence.counters.first_token_at is None:
            sequence.counters.first_token_at, sequence.first_token_step = now, self._next_step
            self.counters.num_prompt_tokens += len(sequence.request.prompt_tokens)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> RequestStats:
        del self._live[sequence.id]
        if sequence.slot is None:
            self._waiting.remove(sequence)
            self._sharing.left(sequence)
        else:
            self._vacate(sequence)
        self.counters.finished[reason] += 1
        self.policy.forget(sequence.id)
        return sequence.stats(self._clock(), self.max_depth)

    # State for others.

    def check_integrity(self) -> None:
        """Every slot is free or has one owner, and only running rows have blocks. Holds at any time."""
        self._cache.check_integrity(sequence.id for sequence in self._running)
        used = {sequence.slot for sequence in self._running}
        assert len(used) + len(set(self._free_slots)) == self._num_slots
        assert used.isdisjoint(self._free_slots)
        assert len(self._running) + len(self._waiting) == len(self._live)

    def snapshot(self) -> StatsSnapshot:
        return self.counters.freeze(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._cache.num_free,
            num_used_blocks=self._cache.num_used,
            num_cached_blocks=self._cache.num_cached,
            num_states=self.info.num_states,
            num_used_states=self._cache.prefixes.num_states,
            depth_reason=self.policy.reason,
            last_depth=self._drafts.last_depth,
        )

    def streams(self) -> tuple[StreamSnapshot, ...]:
        return tuple(sequence.snapshot() for sequence in self._running)
