"""The engine thread: start, deliver, abort, close, die. Waits on events, never on time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeRunner, continuation, make_info

from slipstream.config import EngineConfig
from slipstream.engine import engine as engine_module
from slipstream.engine.contract import Runner, StepPlan, StepResult
from slipstream.engine.engine import Engine, grid
from slipstream.engine.request import TokenEvent
from slipstream.engine.scheduler import Scheduler
from slipstream.errors import ConfigError, EngineDead, RequestError
from slipstream.sampling.params import SamplingParams

WAIT = 300.0
CONFIG = EngineConfig(max_streams=4, max_step_tokens=32, min_chunk=4)


class Client:
    """A sink that remembers, and that can be waited for."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.first = threading.Event()
        self.done = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        self.first.set()
        if event.finish_reason:
            self.done.set()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for event in self.events for token in event.tokens)

    def wait(self) -> TokenEvent:
        assert self.done.wait(WAIT)
        assert sum(event.finish_reason is not None for event in self.events) == 1
        assert self.events[-1].finish_reason
        return self.events[-1]


class GatedRunner(FakeRunner):
    """Runs a step only on demand: ``fuel.put(None)`` lets it run freely, an exception is raised in collect()."""

    def __init__(self, **info: object) -> None:
        super().__init__(make_info(**info))
        self.fuel: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self.free = False

    def collect(self) -> StepResult:
        if not self.free:
            token = self.fuel.get(timeout=WAIT)
            if isinstance(token, BaseException):
                raise token
            self.free = token is None
        return super().collect()


def make_engine(runner: Runner | None = None, **options: object) -> Engine:
    runner = runner or FakeRunner(make_info(), hit=0.7)
    return Engine(lambda: runner, CONFIG, **options)  # type: ignore[arg-type]


def test_a_folder_for_the_cache_that_cannot_be_one_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache_dir: .*file cannot be used as a folder"):
        Engine(FakeRunner, EngineConfig(cache_dir=str(tmp_path / "file")))  # type: ignore[arg-type]


@pytest.mark.parametrize("lag", [0, 1])
def test_streams_get_their_own_tokens(lag: int) -> None:
    runner = FakeRunner(make_info(lag=lag), hit=0.7)
    engine = make_engine(runner)
    engine.start()
    clients = [Client() for _ in range(9)]
    for seed, client in enumerate(clients):
        engine.submit([1, 2, seed], SamplingParams(seed=seed, max_tokens=20), client)
    for seed, client in enumerate(clients):
        assert client.wait().finish_reason == "length"
        assert client.tokens == continuation([1, 2, seed], seed, 97, 20)
    deadline = time.monotonic() + 30.0
    while runner.rows and time.monotonic() < deadline:
        time.sleep(0.01)  # the last stream leaves with the next plan
    engine.close()
    assert runner.closed
    assert not runner.rows
    snapshot = engine.snapshot()
    assert (snapshot.num_used_blocks, snapshot.num_output_tokens) == (0, 180)
    assert snapshot.finished == {"length": 9}


@pytest.mark.parametrize("seed", [0, 7, -2, (1 << 64) - 2])
def test_answers_to_one_prompt_are_those_of_the_seeds_after_each_other(seed: int) -> None:
    runner = FakeRunner(make_info(), hit=0.7)
    engine = make_engine(runner)
    engine.start()
    together, apart = [Client() for _ in range(4)], [Client() for _ in range(4)]
    ids = engine.submit_many([1, 2, 3], SamplingParams(seed=seed, max_tokens=9), together)
    assert len(set(ids)) == 4
    for i, client in enumerate(apart):
        engine.submit([1, 2, 3], SamplingParams(seed=(seed + i) % (1 << 64), max_tokens=9), client)
    for client in (*together, *apart):
        client.wait()
    assert [client.tokens for client in together] == [client.tokens for client in apart]
    assert len({client.tokens for client in together}) == 4
    assert any(join.start.num_computed for plan in runner.plans for join in plan.joins)
    engine.close()


def test_more_answers_than_streams_are_refused() -> None:
    engine = make_engine()
    engine.start()
    for count in (0, 5):
        with pytest.raises(RequestError, match="at most 4 streams"):
            engine.submit_many([1, 2], SamplingParams(), [Client() for _ in range(count)])
    engine.close()


def test_end_tokens_come_from_the_model_and_the_request() -> None:
    engine = make_engine(FakeRunner(make_info(vocab_size=9973)), end_token_ids=[continuation([5], 1, 9973, 7)[6]])
    engine.start()
    plain = continuation([5], 1, 9973, 12)
    cases: list[tuple[dict[str, object], int]] = [
        ({}, 7),
        ({"ignore_eos": True}, 12),
        ({"stop_token_ids": (plain[3],)}, 4),
        ({"stop_token_ids": (plain[8],), "ignore_eos": True}, 9),
    ]
    for params, count in cases:
        client = Client()
        engine.submit([5], SamplingParams(seed=1, max_tokens=12, **params), client)  # type: ignore[arg-type]
        client.wait()
        assert client.tokens == plain[:count]
    engine.close()


def test_bad_requests_are_refused_in_the_callers_thread() -> None:
    engine = make_engine()
    engine.start()
    for prompt in ([], [97], [-1], range(200), ["x"], [1.5]):
        with pytest.raises(RequestError):
            engine.submit(prompt, SamplingParams(), Client())  # type: ignore[arg-type]
    engine.close()


def test_a_runner_that_does_not_load_fails_start() -> None:
    def make_runner() -> Runner:
        raise OSError("no such model")

    deaths: list[Exception] = []
    engine = Engine(make_runner, CONFIG, on_death=deaths.append)
    with pytest.raises(OSError, match="no such model"):
        engine.start()
    with pytest.raises(EngineDead, match="no such model"):
        engine.submit([1], SamplingParams(), Client())
    assert not deaths
    engine.close()


def test_the_runner_lives_in_one_thread() -> None:
    seen: set[int] = set()

    class Watched(FakeRunner):
        def submit(self, plan: StepPlan) -> None:
            seen.add(threading.get_ident())
            super().submit(plan)

        def close(self) -> None:
            seen.add(threading.get_ident())

    def make_runner() -> Runner:
        seen.add(threading.get_ident())
        return Watched(make_info())

    engine = Engine(make_runner, CONFIG)
    engine.start()
    client = Client()
    engine.submit([1], SamplingParams(max_tokens=3), client)
    client.wait()
    engine.close()
    assert len(seen) == 1
    assert threading.get_ident() not in seen


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize(("cause", "reported"), [(ValueError, ValueError), (Panic, EngineDead)])
def test_death_reaches_everybody(cause: type[BaseException], reported: type[Exception]) -> None:
    deaths: list[Exception] = []
    runner = GatedRunner(num_slots=1)
    engine = make_engine(runner, on_death=deaths.append)
    engine.start()
    clients = [Client() for _ in range(3)]  # one runs, the others wait
    for client in clients:
        engine.submit([1], SamplingParams(), client)
    runner.fuel.put(cause("the device is gone"))
    for client in clients:
        final = client.wait()
        assert final.finish_reason == "error"
        assert "the device is gone" in final.error
    engine.close()
    assert isinstance(engine.failed, reported)
    assert deaths == [engine.failed]
    assert runner.closed
    assert not engine.alive
    with pytest.raises(EngineDead, match="the device is gone"):
        engine.submit([1], SamplingParams(), Client())


@pytest.mark.parametrize("lag", [0, 1])
def test_abort_from_another_thread(lag: int) -> None:
    runner = GatedRunner(lag=lag)
    engine = make_engine(runner)
    engine.start()
    client, other = Client(), Client()
    key = engine.submit([1], SamplingParams(max_tokens=50), client)
    engine.submit([2], SamplingParams(max_tokens=20, seed=4), other)
    runner.fuel.put(1)
    assert client.first.wait(WAIT)
    for name in (key, key, "nobody"):
        engine.abort(name)
    runner.fuel.put(None)
    final = client.wait()
    assert final.finish_reason == "abort"
    assert final.stats is not None
    other.wait()
    engine.abort(key)
    engine.close()
    assert other.tokens == continuation([2], 4, 97, 20)
    assert engine.snapshot().num_used_blocks == 0
    client.wait()


def test_many_threads_submit_and_abort() -> None:
    engine = make_engine(FakeRunner(make_info(num_blocks=24, lag=1), hit=0.5))
    engine.start()
    clients = [Client() for _ in range(40)]

    def use(index: int) -> None:
        key = engine.submit([index], SamplingParams(seed=index, max_tokens=30), clients[index])
        if index % 3 == 0:
            engine.abort(key)
        if index % 3 == 1:
            clients[index].first.wait(WAIT)
            engine.abort(key)

    threads = [threading.Thread(target=use, args=(index,)) for index in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, client in enumerate(clients):
        reason = client.wait().finish_reason
        plain = continuation([index], index, 97, 30)
        assert client.tokens == plain[: len(client.tokens)]
        assert reason == "abort" or (reason == "length" and client.tokens == plain)
    engine.close()
    assert engine.failed is None
    assert engine.snapshot().num_used_blocks == 0


def test_close_gives_everybody_a_final_event() -> None:
    runner = GatedRunner(num_slots=1)
    engine = make_engine(runner)
    engine.start()
    clients = [Client() for _ in range(3)]
    for client in clients:
        engine.submit([1], SamplingParams(), client)
    closer = threading.Thread(target=engine.close)
    closer.start()
    runner.fuel.put(None)
    closer.join()
    assert {client.wait().finish_reason for client in clients} <= {"abort", "length"}
    assert runner.closed
    with pytest.raises(EngineDead):
        engine.submit([1], SamplingParams(), Client())
    engine.close()


def test_close_before_start_does_nothing() -> None:
    make_engine().close()


def test_an_idle_engine_sleeps_and_wakes() -> None:
    engine = make_engine()
    engine.start()
    for seed in range(3):
        client = Client()
        engine.submit([1], SamplingParams(seed=seed, max_tokens=4), client)
        client.wait()
    engine.close()
    assert engine.snapshot().num_steps < 13  # it did not spin


def test_the_caches_are_checked_where_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that follow each other do not pay for it; an idle engine and one that closes do."""
    monkeypatch.setattr(engine_module, "_IDLE_SECONDS", WAIT)
    checks = Checks(monkeypatch)
    engine = make_engine()
    engine.start()
    for seed in range(3):
        client = Client()
        engine.submit([1], SamplingParams(seed=seed, max_tokens=3), client)
        client.wait()
    assert checks.count == 0
    engine.close()
    assert checks.count == 1
    monkeypatch.setattr(engine_module, "_IDLE_SECONDS", 0.0)
    engine = make_engine()
    engine.start()
    assert checks.idle.wait(WAIT)
    engine.close()


class Checks:
    """Counts how often the scheduler is checked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.idle = threading.Event()
        check = Scheduler.check_integrity
        monkeypatch.setattr(Scheduler, "check_integrity", lambda scheduler: self._called(check(scheduler)))

    def _called(self, _: None) -> None:
        self.count += 1
        if self.count > 1:
            self.idle.set()


def test_seeds_and_p_min_are_resolved() -> None:
    runner = FakeRunner(make_info())
    engine = Engine(lambda: runner, EngineConfig(p_min=0.25))
    engine.start()
    for params in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, seed=-1, p_min=0.5)):
        client = Client()
        engine.submit([1], params, client)
        client.wait()
    engine.close()
    joins = [join for plan in runner.plans for join in plan.joins]
    assert [join.p_min for join in joins] == [0.25, 0.5]
    assert all(0 <= join.seed < 1 << 63 for join in joins)


@pytest.mark.parametrize(("draft", "by_cost"), [("adaptive", True), ("solo", True), ("off", False), (2, False)])
def test_draft_passes_are_timed_only_where_their_costs_are_wanted(draft: str, by_cost: bool) -> None:
    calls: list[tuple[object, object]] = []
    runner = FakeRunner(make_info())
    calibrate: Callable[..., object] = runner.calibrate
    runner.calibrate = lambda *grids: (calls.append(grids), calibrate(*grids))[1]  # type: ignore[method-assign,assignment,misc]
    engine = Engine(lambda: runner, EngineConfig(draft=draft))  # type: ignore[arg-type]
    engine.start()
    engine.close()
    [(num_tokens, num_rows)] = calls
    assert num_tokens
    assert bool(num_rows) == by_cost


def test_grid() -> None:
    assert grid(1) == [1]
    assert grid(20) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20]
