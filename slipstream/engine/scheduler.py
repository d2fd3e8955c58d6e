"""Who runs in the next step, with how many tokens and blocks: schedule() -> plan, apply(result) -> events.

One law: a sequence has computed and known tokens (and drafts), and a step lets computed catch up. Owns the waiting
and running sequences, slots and blocks. Knows neither the thread that calls it nor what computes a step.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from slipstream.cache.blocks import BlockPool
from slipstream.config import EngineConfig
from slipstream.engine.bounds import Bounds
from slipstream.engine.contract import EMPTY, RowJoin, RowResult, RunnerInfo, Start, StepPlan, StepResult
from slipstream.engine.parallel_samples import at_rest, bind, first_group, num_shared, unbind
from slipstream.engine.request import (
    FinishReason,
    Request,
    Sequence,
    TokenEvent,
    check_request,
    hard_limit,
    length_limit,
)
from slipstream.engine.stats import EngineCounters, RequestStats, StatsSnapshot, StreamSnapshot
from slipstream.engine.step_builder import ScheduledRow, StepBuilder
from slipstream.speculate.policy import DepthPolicy, Load, SamplingRow, StepTiming

Rows = list[tuple[Sequence, Bounds]]  # running sequences and what they may have become


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result is still to come. Rows are matched by their order: a slot may have a new owner by then."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    has_chunks: bool


class Scheduler:
    """All running sequences are older than all waiting ones, so the youngest is always the last of ``_running``."""

    def __init__(
        self,
        info: RunnerInfo,
        policy: DepthPolicy,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.policy = policy
        self.config = config
        self.counters = EngineCounters()
        self._clock = clock
        self._pool = BlockPool(info.num_blocks, info.block_size)
        self._free_slots = list(range(min(info.num_slots, config.max_streams) - 1, -1, -1))
        self._num_slots = len(self._free_slots)
        self._hard_limit = hard_limit(info)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._live: dict[str, Sequence] = {}
        self._leaves: list[int] = []  # slots the runner still has to empty
        self._in_flight: deque[InFlight] = deque()
        self._next_step = 0
        self._applied_at = clock()  # when the last result came in
        self._last_depth = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._leaves or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def max_depth(self) -> int:
        return min(self.info.max_depth, self.config.max_depth)

    # Requests come and go.

    def add(self, *requests: Request) -> None:
        """Those added together ask for the same prompt: it is computed once, where there is something to share."""
        assert len(requests) <= self._num_slots
        shares = len(requests) > 1 and len(requests[0].prompt_tokens) > 1
        group = object() if shares else None
        for request in requests:
            check_request(request, self.info)
            assert request.id not in self._live
            assert request.prompt_tokens == requests[0].prompt_tokens
            sequence = Sequence(request, length_limit(request, self.info), group)
            self._live[request.id] = sequence
            self._waiting.append(sequence)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> TokenEvent | None:
        """The final event, or None if the request is unknown or already finished."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        sequence.finish_reason = reason
        stats = self._finish(sequence, reason)
        return TokenEvent(request_id, finish_reason=reason, stats=stats, at=self._clock())

    # Planning: one pass.

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be planned before a result comes in."""
        assert len(self._in_flight) <= self.info.lag
        rows = [(sequence, bounds) for sequence in self._running if self._wants(sequence, bounds := sequence.bounds)]
        step = self._new_step(rows)
        parents = at_rest(self._running)
        self._schedule_decoding(step, rows, sum(1 + len(parent.children) for parent in parents))
        self._schedule_children(step, parents)
        self._schedule_prompts(step, rows)
        self._admit(step)
        self._request_drafts(step)
        if not step.rows and (not self._leaves or self._in_flight):
            return None
        return self._launch(step)

    def _new_step(self, rows: Rows) -> StepBuilder:
        """Prompts come in large pieces where nobody decodes; beside streams that do, in a small one for each prompt."""
        budget = max(self.config.max_step_tokens, self.info.prompt_tokens)
        num_decoding = sum(bounds.num_uncomputed == 1 for _, bounds in rows)
        if not num_decoding:
            return StepBuilder(budget, budget)
        num_prompts = len(rows) - num_decoding + min(len(self._waiting), len(self._free_slots))
        return StepBuilder(budget, min(budget, self.config.max_chunk * max(1, num_prompts)))

    def _wants(self, sequence: Sequence, bounds: Bounds) -> bool:
        """False for a row that is sure to be finished by what is in flight, or that could pass the context, or that
        waits for its parent or its children."""
        waits = sequence.parent is not None or (sequence.children and bounds.num_uncomputed == 1)
        return not waits and bounds.min_tokens < sequence.limit and bounds.max_tokens < self._hard_limit

    def _schedule_decoding(self, step: StepBuilder, rows: Rows, num_starting: int) -> None:
        """Rows with one known token to feed, and their drafts: they never wait for someone's prompt."""
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
            children, parent.children = parent.children, []
            for child in children:
                start, shared = child.start_from_parent(self.info.block_size)
                self._pool.share(shared)
                step.joins.append(self._join(child, start))
            for sequence in (parent, *children):
                if step.may_run(sequence):  # or it was the youngest when blocks ran out
                    step.add(sequence, sequence.bounds, 1)

    def _schedule_prompts(self, step: StepBuilder, rows: Rows) -> None:
        """Prompts on their way share what is left, the oldest first. They have had their blocks since they joined."""
        for sequence, bounds in rows:
            if bounds.num_uncomputed > 1 and step.chunk and step.may_run(sequence):
                self._schedule_chunk(step, sequence, bounds)

    def _schedule_chunk(self, step: StepBuilder, sequence: Sequence, bounds: Bounds) -> None:
        """The last token is fed when the children are there to feed theirs."""
        max_feed = bounds.num_uncomputed - bool(sequence.children)
        step.add(sequence, bounds, min(max_feed, step.chunk))

    def _admit(self, step: StepBuilder) -> None:
        while self._waiting and step.chunk and not step.starved:
            group = self._fitting(first_group(self._waiting))
            if not group:
                return
            bind(group[0], group[1:])
            for sequence in group:
                self._running.append(self._waiting.popleft())
                sequence.counters.join(self._clock())
                sequence.slot = self._free_slots.pop()
                self._grow(sequence, self._first_blocks(sequence, sequence.parent is not None))
            self._schedule_chunk(step, group[0], group[0].bounds)

    def _fitting(self, group: list[Sequence]) -> list[Sequence]:
        """All of a group or none; only where nobody is there to make room as many as there is room for."""
        while group:
            count = sum(self._first_blocks(sequence, i > 0) for i, sequence in enumerate(group))
            # Each running row may need a block soon.
            if len(group) <= len(self._free_slots) and count + len(self._running) <= self._pool.num_free:
                break
            group = [] if self._running else group[:-1]
        return group

    def _first_blocks(self, sequence: Sequence, shares: bool) -> int:
        """Blocks with which it comes in: for its known tokens and its first drafts, but for those it will share."""
        count = self._pool.count_for(min(sequence.limit, len(sequence.tokens) + 1 + self.max_depth))
        return count - num_shared(sequence, self.info.block_size) if shares else count

    def _request_drafts(self, step: StepBuilder) -> None:
        """Ask the policy for depths. Drafts take spare blocks only: nobody is preempted for them."""
        sampling = [row for row in step.rows if row.samples]
        rows = [
            SamplingRow(row.sequence.id, self._max_depth(row), row.sequence.request.params.draft) for row in sampling
        ]
        num_other = sum(row.feed for row in step.rows if not row.samples)
        room = max(0, self.config.max_step_tokens - self.config.min_chunk - len(self._running))
        requests = self.policy.decide(rows, Load(len(self._running), num_other, room)) if rows else []
        for row, request in zip(sampling, requests):
            assert 0 <= request.depth <= self._max_depth(row)
            row.sequence.depth = self._cover(row, min(request.depth, room))
            row.draft = replace(request, depth=row.sequence.depth)
            room -= row.draft.depth
        if sampling:
            self._last_depth = Counter(row.draft.depth for row in sampling).most_common(1)[0][0]

    def _max_depth(self, row: ScheduledRow) -> int:
        """No draft passes the length limit, even if everything in flight is accepted."""
        room = row.sequence.limit - row.after.max_tokens - 1
        return max(0, min(self.max_depth, room))

    def _cover(self, row: ScheduledRow, depth: int) -> int:
        """The head writes ahead for drafts 2, 3, ...: the deepest draft that the blocks allow."""
        while depth > 1:
            count = self._pool.count_for(row.bounds.max_computed + row.feed + depth - 1)
            if count - len(row.sequence.blocks) <= self._pool.num_free:
                self._grow(row.sequence, count)
                break
            depth -= 1
        return depth

    def _join(self, sequence: Sequence, start: Start = EMPTY) -> RowJoin:
        return sequence.join(self.policy.may_draft(sequence.request.params.draft), start)

    def _launch(self, step: StepBuilder) -> StepPlan:
        step.joins += [self._join(row.sequence) for row in step.rows if not row.sequence.joined]
        rows = tuple(row.step(row.sequence.take_unsent_blocks()) for row in step.rows)
        plan = StepPlan(self._next_step, tuple(self._leaves), tuple(step.joins), rows)
        for scheduled, row in zip(step.rows, rows):
            scheduled.sequence.in_flight.append(row)
        has_chunks = any(row.bounds.num_uncomputed > 1 for row in step.rows)
        self._in_flight.append(InFlight(plan, tuple(row.sequence for row in step.rows), has_chunks))
        self._leaves.clear()
        self._next_step += 1
        return plan

    # Memory.

    def _secure(self, sequence: Sequence, num_tokens: int, step: StepBuilder) -> bool:
        """Blocks for that many tokens, if need be from the youngest. False: the row skips this step."""
        count = self._pool.count_for(num_tokens)
        while count - len(sequence.blocks) > self._pool.num_free:
            victim = self._running[-1]
            step.starved = True
            if victim.in_flight:
                step.held.add(victim)  # let it come to rest: it can then be preempted in the next pass
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        self._grow(sequence, count)
        return True

    def _grow(self, sequence: Sequence, count: int) -> None:
        sequence.blocks += self._pool.allocate(max(0, count - len(sequence.blocks)))

    def _preempt(self, victim: Sequence) -> None:
        assert not victim.in_flight
        assert not victim.children, "they are younger"
        self._vacate(victim)
        self._waiting.appendleft(victim)
        victim.counters.num_preemptions += 1
        self.counters.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        """Plans run in order, so what is freed here may be given away in the very next plan."""
        if sequence.joined:
            assert sequence.slot is not None
            self._leaves.append(sequence.slot)
        slot, blocks = sequence.leave()
        self._running.remove(sequence)
        self._free_slots.append(slot)
        self._pool.release(blocks)
        successor = unbind(sequence)
        if successor is not None:  # there are blocks: those just released
            self._grow(successor, len(successor.blocks) + num_shared(successor, self.info.block_size))

    # Results.

    def apply(self, result: StepResult) -> list[TokenEvent]:
        step = self._in_flight.popleft()
        assert step.plan.step == result.step
        assert len(step.sequences) == len(result.rows)
        self.counters.num_steps += bool(result.rows)
        now = self._clock()
        if result.rows and not step.has_chunks:
            self.policy.observe_step(_timing(self.info, step.plan, result, now - self._applied_at))
        self._applied_at = now
        events = (self._apply_row(sequence, row, now) for sequence, row in zip(step.sequences, result.rows))
        return [event for event in events if event is not None]

    def _apply_row(self, sequence: Sequence, row: RowResult, now: float) -> TokenEvent | None:
        if sequence.finish_reason is not None:
            return None  # it ended while this step was in flight
        if row.fault:
            return self._fail(sequence, row.fault, now)
        if row.confidences:
            self.policy.observe_proposal(row.confidences)
        commit = sequence.commit(row)
        if commit is None:
            return None
        self.policy.observe_row(sequence.id, commit.num_drafted, commit.num_accepted, commit.confidences)
        self._count(sequence, commit.num_drafted, commit.num_accepted, len(commit.tokens), now)
        return TokenEvent(
            request_id=sequence.id,
            tokens=commit.tokens,
            num_accepted=commit.num_accepted,
            finish_reason=commit.finish_reason,
            stats=self._finish(sequence, commit.finish_reason) if commit.finish_reason else None,
            at=now,
            logprobs=commit.logprobs,
            prompt_logprobs=commit.prompt_logprobs,
        )

    def _fail(self, sequence: Sequence, fault: str, now: float) -> TokenEvent:
        """It cannot go on; the others do not notice."""
        sequence.finish_reason = "error"
        stats = self._finish(sequence, "error")
        return TokenEvent(sequence.id, finish_reason="error", stats=stats, error=fault, at=now)

    def _count(self, sequence: Sequence, num_drafted: int, num_accepted: int, num_tokens: int, now: float) -> None:
        sequence.counters.count(num_drafted, num_accepted)
        self.counters.count(num_drafted, num_accepted)
        self.counters.num_output_tokens += num_tokens
        if sequence.counters.first_token_at is None:
            sequence.counters.first_token_at = now
            self.counters.num_prompt_tokens += len(sequence.request.prompt_tokens)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> RequestStats:
        del self._live[sequence.id]
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._vacate(sequence)
        self.counters.finished[reason] += 1
        why = self.policy.reason_for(sequence.request.params.draft)
        self.policy.forget(sequence.id)
        return self._stats(sequence, why)

    def _stats(self, sequence: Sequence, depth_reason: str) -> RequestStats:
        num_prompt, arrival = len(sequence.request.prompt_tokens), sequence.request.arrival
        return sequence.counters.freeze(num_prompt, sequence.num_output, arrival, self._clock(), depth_reason)

    # Looking in.

    def check_integrity(self) -> None:
        """Every slot is free or has one owner, every block as many as the pool knows. Holds at any time."""
        self._pool.check_integrity(block for sequence in self._running for block in sequence.blocks)
        used = {sequence.slot for sequence in self._running}
        assert len(used) + len(set(self._free_slots)) == self._num_slots
        assert used.isdisjoint(self._free_slots)
        assert len(self._running) + len(self._waiting) == len(self._live)

    def snapshot(self) -> StatsSnapshot:
        return self.counters.freeze(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._pool.num_free,
            num_used_blocks=self._pool.num_used,
            depth_reason=self.policy.reason,
            last_depth=self._last_depth,
        )

    def streams(self) -> tuple[StreamSnapshot, ...]:
        return tuple(map(_stream, self._running))


def _stream(sequence: Sequence) -> StreamSnapshot:
    counters = sequence.counters
    return StreamSnapshot(
        id=sequence.id,
        prompt_tokens=len(sequence.request.prompt_tokens),
        output_tokens=sequence.num_output,
        depth=sequence.depth,
        draft_tokens=counters.num_draft_tokens,
        accepted_tokens=counters.num_accepted_tokens,
        first_token_at=counters.first_token_at,
    )


def _timing(info: RunnerInfo, plan: StepPlan, result: StepResult, since_last: float) -> StepTiming:
    num_tokens = sum(row.num_fed for row in result.rows)
    depths = [row.draft.depth for row in plan.rows]
    if info.stops_early:
        depths = [len(row.confidences) or depth for depth, row in zip(depths, result.rows)]
    pass_rows = tuple(sum(depth > i for depth in depths) for i in range(max(depths)))
    computing = result.verify_seconds + result.draft_seconds
    other = max(0.0, since_last - computing)
    return StepTiming(num_tokens, pass_rows, result.verify_seconds, result.draft_seconds, other, len(result.rows))
