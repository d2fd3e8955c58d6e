"""The engine thread: the only one that touches the runner.

Requests come in through an inbox; events go out through one sink per request, a callable that never blocks. An
exception here reaches every client as an error event. Knows neither HTTP nor asyncio nor array libraries.
"""

from __future__ import annotations

import itertools
import operator
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.cache.disk_store import DiskStore, make_folder
from slipstream.cache.disk_tier import DiskTier
from slipstream.config import EngineConfig
from slipstream.engine.contract import Runner, RunnerInfo, StepCosts
from slipstream.engine.request import DEFAULT_CACHE, FinishReason, PromptCache, Request, TokenEvent, check_request
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.stats import StatsSnapshot, StreamSnapshot
from slipstream.errors import EngineDead, RequestError
from slipstream.sampling.params import SamplingParams
from slipstream.speculate.by_request import make_policy
from slipstream.speculate.cost_model import CostModel

Sink = Callable[[TokenEvent], None]  # called in the engine thread; must neither block nor raise

_SEED_MASK = (1 << 63) - 1  # seeds fit a signed 64-bit array
_PAUSE_SECONDS = 0.001
_IDLE_SECONDS = 1.0  # without a request
_STREAMS_SECONDS = 0.25  # between two snapshots of the streams: people read them, steps must not pay for it


@dataclass(frozen=True, slots=True)
class _Submit:
    requests: tuple[Request, ...]  # for the same prompt
    sinks: tuple[Sink, ...]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Message = _Submit | _Abort | _Close


class Engine:
    def __init__(
        self,
        make_runner: Callable[[], Runner],
        config: EngineConfig,
        end_token_ids: Iterable[int] = (),
        on_death: Callable[[Exception], None] | None = None,
        fingerprint: str = "",
    ) -> None:
        """``fingerprint``: of the model and all that caches depend on, for those that are kept on disk.

        ConfigError: their folder cannot be used, which is said before a model is loaded.
        """
        if config.cache_dir is not None and config.prefix_cache:
            make_folder(Path(config.cache_dir))
        self._fingerprint = fingerprint
        self.config = config
        self.failed: Exception | None = None
        self.on_delivered: Callable[[], None] = _nothing  # after all events of a step have gone to their sinks
        self._on_death = on_death
        self._end_token_ids = frozenset(end_token_ids)
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._gate = threading.Lock()  # a request that passes it before the thread ends gets a final event
        self._open = False
        self._ready = threading.Event()
        self._ids = itertools.count(1)
        self._sinks: dict[str, Sink] = {}  # engine thread only
        self._snapshot = StatsSnapshot()
        self._streams: tuple[StreamSnapshot, ...] = ()
        self._streams_at = 0.0
        self._info: RunnerInfo | None = None
        # The thread forgets its arguments at its end: nothing then holds the model.
        self._thread = threading.Thread(target=self._main, args=(make_runner,), name="slipstream-engine", daemon=True)

    # Any thread.

    @property
    def info(self) -> RunnerInfo:
        assert self._info is not None, "the engine was not started"
        return self._info

    @property
    def alive(self) -> bool:
        return self._open

    def start(self) -> None:
        """Returns when the runner is loaded; raises the error that stopped it from loading."""
        self._thread.start()
        self._ready.wait()
        if not self._open:
            self._thread.join()
            raise self.failed or EngineDead("the engine thread ended before the runner was ready")

    def submit(self, prompt_tokens: Iterable[int], params: SamplingParams, sink: Sink) -> str:
        """The request's id. Raises RequestError for a request that can never run, EngineDead after the engine's end."""
        return self.submit_many(prompt_tokens, params, [sink])[0]

    def submit_many(
        self,
        prompt_tokens: Iterable[int],
        params: SamplingParams,
        sinks: Sequence[Sink],
        client: str = "",
        cache: PromptCache = DEFAULT_CACHE,
    ) -> list[str]:
        """As many answers to one prompt as there are sinks, the prompt computed once; their ids.

        Answer i is that of a single request with seed + i. Waiting requests are taken in turn by ``client``.
        """
        self._check_alive()
        self._check_count(len(sinks))
        requests = self._requests(prompt_tokens, params, len(sinks), client, cache)
        check_request(requests[0], self.info)
        self._send(_Submit(requests, tuple(sinks)))
        return [request.id for request in requests]

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Idempotent; an id that is unknown or finished is ignored. ``reason`` is that of the final event."""
        self._inbox.put(_Abort(request_id, reason))

    def snapshot(self) -> StatsSnapshot:
        return self._snapshot

    def streams(self) -> tuple[StreamSnapshot, ...]:
        """The running streams, as they were a moment ago."""
        return self._streams

    def close(self) -> None:
        """Abort all requests and end the thread. Idempotent."""
        self._inbox.put(_Close())
        if self._thread.ident is not None:
            self._thread.join()

    def _check_alive(self) -> None:
        if not self._open:
            raise EngineDead(f"the engine has ended: {self.failed}" if self.failed else "the engine is not running")

    def _send(self, message: _Submit) -> None:
        with self._gate:
            self._check_alive()
            self._inbox.put(message)

    def _check_count(self, count: int) -> None:
        max_count = min(self.info.num_slots, self.config.max_streams)
        if not 1 <= count <= max_count:
            raise RequestError(
                f"{count} answers to one prompt: at most {max_count} streams run at once, at least one must"
            )

    def _requests(
        self, prompt_tokens: Iterable[int], params: SamplingParams, count: int, client: str, cache: PromptCache
    ) -> tuple[Request, ...]:
        try:
            prompt = tuple(map(operator.index, prompt_tokens))
        except TypeError as error:
            raise RequestError(f"the prompt must be token ids: {error}") from error
        seed = secrets.randbits(63) if params.seed is None else params.seed
        p_min = self.config.p_min if params.p_min is None else params.p_min
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_token_ids)
        now = time.monotonic()
        return tuple(
            Request(f"r{next(self._ids)}", prompt, params, (seed + i) & _SEED_MASK, p_min, ends, now, client, cache)
            for i in range(count)
        )

    # The engine thread.

    def _main(self, make_runner: Callable[[], Runner]) -> None:
        try:
            runner = make_runner()
            try:
                self._serve(runner)
            finally:
                runner.close()
        except Exception as error:
            self._die(error)
        except BaseException as error:  # a library's panic
            self._die(EngineDead(f"{type(error).__name__}: {error}"))
        finally:
            self._ready.set()

    def _serve(self, runner: Runner) -> None:
        info, config, costs = runner.info, self.config, CostModel(self._calibrated(runner))
        policy = make_policy(config.draft, info, config.max_depth, costs)
        scheduler = Scheduler(info, policy, config, disk=self._disk_tier(runner), costs=costs)
        self._info = runner.info
        self._publish(scheduler)
        self._open = True
        self._ready.set()
        while self._take_messages(scheduler):
            if scheduler.has_work:
                self._step(scheduler, runner)
            self._publish(scheduler)
        self._shut()
        self._deliver([scheduler.abort(key) or TokenEvent(key, finish_reason="abort") for key in self._sinks])
        while scheduler.has_work:
            self._step(scheduler, runner)
        scheduler.check_integrity()
        scheduler.close()
        self._publish(scheduler)

    def _disk_tier(self, runner: Runner) -> DiskTier | None:
        config, info = self.config, runner.info
        memory = runner.host_memory if info.num_host_blocks else None
        if config.cache_dir is None or not config.prefix_cache or memory is None:
            return None
        sizes = {"block_bytes": memory.block_bytes, "state_bytes": memory.state_bytes, "max_bytes": config.cache_disk}
        store = DiskStore(Path(config.cache_dir), self._fingerprint, block_size=info.block_size, **sizes)
        return DiskTier(store, memory, info.block_size, info.num_host_states > 0)

    def _publish(self, scheduler: Scheduler) -> None:
        self._snapshot = scheduler.snapshot()
        now = time.monotonic()
        if not self._snapshot.num_running or now - self._streams_at > _STREAMS_SECONDS:
            self._streams, self._streams_at = scheduler.streams(), now

    def _calibrated(self, runner: Runner) -> StepCosts:
        info, config = runner.info, self.config
        depth = min(info.max_depth, config.max_depth)
        by_cost = depth > 0 and config.draft in ("adaptive", "solo")
        num_rows = min(info.num_slots, config.max_streams)
        num_tokens = min(config.max_step_tokens, num_rows * (1 + depth * by_cost))
        return runner.calibrate(grid(num_tokens), grid(num_rows) if by_cost else ())

    def _take_messages(self, scheduler: Scheduler) -> bool:
        """Sleeps while there is nothing to do. False: it is time to close."""
        if not scheduler.has_work and not self._take(scheduler, self._next_message(scheduler)):
            return False
        while not self._inbox.empty():
            if not self._take(scheduler, self._inbox.get()):
                return False
        return True

    def _next_message(self, scheduler: Scheduler) -> _Message:
        """Looks at every block and slot, which takes milliseconds, where nobody waits for the next step."""
        with suppress(queue.Empty):
            return self._inbox.get(timeout=_IDLE_SECONDS)
        scheduler.check_integrity()
        return self._inbox.get()

    def _take(self, scheduler: Scheduler, message: _Message) -> bool:
        match message:
            case _Submit(requests):
                self._listen(message)
                scheduler.add(*requests)
            case _Abort(request_id, reason):
                self._deliver([scheduler.abort(request_id, reason)])
            case _Close():
                return False
        return True

    def _listen(self, message: _Submit) -> None:
        for request, sink in zip(message.requests, message.sinks):
            self._sinks[request.id] = sink

    def _step(self, scheduler: Scheduler, runner: Runner) -> None:
        plan = scheduler.schedule()
        if plan is not None:
            runner.submit(plan)
        if plan is None and not scheduler.num_in_flight:
            time.sleep(_PAUSE_SECONDS)  # all wait for the disk
        elif plan is None or scheduler.num_in_flight > runner.info.lag:
            self._deliver(scheduler.apply(runner.collect()))

    def _deliver(self, events: Iterable[TokenEvent | None]) -> None:
        num_sent = 0
        for event in events:
            if event is not None:
                sink = self._sinks.pop(event.request_id) if event.finish_reason else self._sinks[event.request_id]
                sink(event)
                num_sent += 1
        if num_sent:
            self.on_delivered()

    def _shut(self) -> None:
        """No request gets in any more; those still in the inbox get a final event."""
        with self._gate:
            self._open = False
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Submit):
                self._listen(message)

    def _die(self, error: Exception) -> None:
        was_open = self._open
        self.failed = error
        self._shut()
        text = f"{type(error).__name__}: {error}"
        self._deliver([TokenEvent(request_id, finish_reason="error", error=text) for request_id in self._sinks])
        if was_open and self._on_death is not None:
            self._on_death(error)


def grid(max_size: int) -> list[int]:
    """The sizes to time up to ``max_size``: each one where steps are small, then both sides of every edge.

    Kernels work in tiles, so a step that needs one more tile costs a stair, not a slope: 8 and 9, 16 and 17, ...
    """
    points = {n for n in (*range(1, 10), 12) if n <= max_size} | {max_size}
    edge = 16
    while edge <= max_size:
        points |= {edge, min(max_size, edge + 1), min(max_size, edge * 3 // 2), min(max_size, edge * 3 // 2 + 1)}
        edge *= 2
    return sorted(points)


def _nothing() -> None:
    pass
