"""Random conversations over one runner: next turns, edits, forks, aborts, several answers, grammars, drafts or none.

With the prefix cache a request gets the same tokens and log-probabilities, bit for bit, as alone and without it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest.mock import patch

from constrained import END, constraint

from slipstream.cache import host_tier
from slipstream.config import EngineConfig
from slipstream.engine import prefix_sharing
from slipstream.engine.contract import Runner, TokenLogprobs
from slipstream.engine.request import PromptCache, Request, TokenEvent
from slipstream.engine.scheduler import Scheduler
from slipstream.sampling import SamplingParams
from slipstream.speculate.by_request import make_policy
from slipstream.speculate.cost_model import CostModel

VOCAB = 95
# As in a prompt of some thousand tokens, for prompts of a hundred.
SMALL = {"READ_INTERVAL": 32, "OUTPUT_INTERVAL": 8, "MIN_SHARED": 8, "MIN_GAP": 8, "MIN_RESTORED": 8}


@dataclass
class Asked:
    """A request and what it got."""

    request: Request
    at: int  # step before which it comes
    abort_at: int | None
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    final: TokenEvent | None = None


@dataclass
class Played:
    asked: list[Asked]
    num_cached: int  # tokens
    num_preemptions: int
    num_dropped: int  # blocks that the cache had and gave back
    num_loaded: int  # blocks that were copied back from host memory


def play(runner: Runner, seed: int, num_requests: int = 12, **config: object) -> Played:
    with patch.multiple(prefix_sharing, **SMALL), patch.object(host_tier, "MIN_SAVED", 8):
        return _Play(runner, seed, num_requests, config).run()


class _Play:
    def __init__(self, runner: Runner, seed: int, num_requests: int, config: dict[str, object]) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.num_requests = num_requests
        settings: dict[str, object] = {"max_streams": runner.info.num_slots, "max_step_tokens": 48, "min_chunk": 8}
        self.config = EngineConfig(**(settings | config))  # type: ignore[arg-type]
        policy = make_policy(self.config.draft, runner.info, self.config.max_depth, CostModel())
        self.scheduler = Scheduler(runner.info, policy, self.config)
        self.asked: dict[str, Asked] = {}
        self.told: list[tuple[int, ...]] = [self._words(60)]
        self.max_prompt = runner.info.max_model_len - 24

    def run(self) -> Played:
        step, most, loaded = 0, 0, 0
        while len(self.asked) < self.num_requests or self.scheduler.has_work:
            if len(self.asked) < self.num_requests and self.random.random() < 0.25:
                self._ask(step)
            for key, asked in self.asked.items():
                if asked.abort_at == step:
                    self._take(self.scheduler.abort(key))
            plan = self.scheduler.schedule()
            if plan is not None:
                self.runner.submit(plan)
                loaded += sum(len(transfer.blocks) for transfer in plan.loads)
            if self.scheduler.num_in_flight > (self.runner.info.lag if plan else 0):
                for event in self.scheduler.apply(self.runner.collect()):
                    self._take(event)
            self.scheduler.check_integrity()
            most = max(most, self.scheduler.snapshot().num_cached_blocks)
            step += 1
            assert step < 5000, "the traffic never ends"
        while (plan := self.scheduler.schedule()) is not None:
            self.runner.submit(plan)
            self.scheduler.apply(self.runner.collect())
        end = self.scheduler.snapshot()
        assert end.num_free_blocks == self.runner.info.num_blocks
        done = [asked for asked in self.asked.values() if asked.final is not None]
        cached = sum(asked.final.stats.cached_tokens for asked in done if asked.final and asked.final.stats)
        return Played(done, cached, end.num_preemptions, most - end.num_cached_blocks, loaded)

    def _ask(self, step: int) -> None:
        """A next turn, the same again, another end, or a new beginning."""
        choose = self.random
        told = choose.choice([choose.choice(self.told), self.told[-1]])
        keep = 0 if choose.random() < 0.1 else choose.choice([len(told), len(told), choose.randint(1, len(told))])
        prompt = (*told[:keep], *self._words(choose.choice([1, 3, 20, 60])))[: self.max_prompt]
        name = choose.choice([None, None, None, "regex", "schema", "thinking"])
        params = SamplingParams(
            temperature=choose.choice([0.0, 1.0, 2.0]),
            max_tokens=choose.choice([1, 4, 12, 20]),
            draft=choose.choice([None, None, "off", 3]),
            logprobs=choose.choice([None, 0, 2]),
            prompt_logprobs=choose.choice([None] * 15 + [1]),
            repetition_penalty=choose.choice([1.0, 1.0, 1.3]),
            constraint=constraint(name),
        )
        kinds = ("system", "user", "prompt")
        ends = sorted(choose.randint(0, len(prompt)) for _ in kinds)
        cache = PromptCache(choose.random() < 0.9, choose.choice([""] * 5 + ["another"]), tuple(zip(ends, kinds)))
        count = min(self.runner.info.num_slots, choose.choice([1, 1, 1, 2]))
        stops = frozenset() if name is None else frozenset({END})
        requests = [
            Request(f"r{len(self.asked)}.{i}", prompt, params, 1000 * len(self.asked) + i, 0.0, stops, 0.0, "", cache)
            for i in range(count)
        ]
        for request in requests:
            abort_at = step + choose.randint(1, 25) if choose.random() < 0.2 else None
            self.asked[request.id] = Asked(request, step, abort_at, [], [])
        self.scheduler.add(*requests)

    def _words(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(VOCAB) for _ in range(count))

    def _take(self, event: TokenEvent | None) -> None:
        if event is None:
            return
        asked = self.asked[event.request_id]
        asked.tokens += event.tokens
        asked.logprobs += event.prompt_logprobs + event.logprobs
        if event.finish_reason is not None:
            asked.final = event
            self.told.append((*asked.request.prompt_tokens, *asked.tokens))


def differences(runner: Runner, played: Played) -> Iterator[str]:
    """Requests whose tokens or log-probabilities are not those that they get alone, cold and without drafts."""
    for asked in played.asked:
        assert asked.final is not None
        if asked.final.finish_reason == "error":
            continue  # a grammar that came to a dead end
        tokens, logprobs = cold(runner, asked.request)
        if asked.final.finish_reason == "abort":
            tokens, logprobs = tokens[: len(asked.tokens)], logprobs[: len(asked.logprobs)]
        if asked.tokens != tokens or (asked.logprobs and asked.logprobs != logprobs):
            yield f"{asked.request.id}: cached {asked.final.stats and asked.final.stats.cached_tokens}"


def cold(runner: Runner, request: Request) -> tuple[list[int], list[TokenLogprobs]]:
    config = EngineConfig(max_streams=runner.info.num_slots, prefix_cache=False)
    policy = make_policy("off", runner.info, 8, CostModel())
    scheduler = Scheduler(runner.info, policy, config)
    scheduler.add(replace(request, params=replace(request.params, draft="off")))
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is not None:
            runner.submit(plan)
        for event in scheduler.apply(runner.collect()):
            tokens += event.tokens
            logprobs += event.prompt_logprobs + event.logprobs
    return tokens, logprobs
