"""How deep the rows of a step draft: the policy's wishes, within the budget and the free blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from slipstream.cache.manager import CacheManager
from slipstream.config import EngineConfig
from slipstream.engine.contract import DraftRequest
from slipstream.engine.step_builder import ScheduledRow, StepBuilder
from slipstream.speculate.policy import NO_ROOM, DepthPolicy, Load, SamplingRow


class DraftRequests:
    def __init__(self, policy: DepthPolicy, config: EngineConfig, cache: CacheManager, max_depth: int) -> None:
        self._policy, self._config, self._cache = policy, config, cache
        self._max_depth = max_depth
        self.last_depth = 0  # of most rows in the last step that sampled

    def request(self, step: StepBuilder, num_running: int) -> None:
        """Ask the policy for depths. Drafts take spare blocks only: nobody is preempted for them."""
        sampling = [row for row in step.rows if row.samples]
        if not sampling:
            return
        rows = [self._row(row) for row in sampling]
        room = max(0, self._config.max_step_tokens - self._config.min_chunk - num_running)
        context = sum(row.context for row in rows)
        requests = self._policy.decide(rows, Load(num_running, room=room, context=context))
        for scheduled, row, request in zip(sampling, rows, requests):
            assert 0 <= request.depth <= row.max_depth
            num_tokens = scheduled.bounds.max_computed + scheduled.feed
            depth = self._cache.reserve_drafts(row.key, num_tokens, min(request.depth, room))
            scheduled.draft = replace(request, depth=depth)
            scheduled.sequence.counters.last_depth = depth
            scheduled.why_plain = "" if depth else self._why_plain(row, request)
            room -= depth
        self.last_depth = Counter(row.draft.depth for row in sampling).most_common(1)[0][0]

    def _row(self, row: ScheduledRow) -> SamplingRow:
        return SamplingRow(row.sequence.id, self._room(row), row.sequence.draft_setting, row.context)

    def _why_plain(self, row: SamplingRow, request: DraftRequest) -> str:
        """``request``: what the policy wanted."""
        if self._policy.may_draft(row.setting) and (request.depth or not row.max_depth):
            return NO_ROOM
        return self._policy.why_plain(row.setting)

    def _room(self, row: ScheduledRow) -> int:
        """No draft passes the length limit, even if everything in flight is accepted."""
        room = row.sequence.limit - row.after.max_tokens - 1
        return max(0, min(self._max_depth, room))
