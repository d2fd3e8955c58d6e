"""The engine for asyncio: iteration, cancellation, slow consumers, one wake-up a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fakes import FakeRunner, continuation, make_info
from test_engine import CONFIG, GatedRunner

from slipstream.engine import async_engine
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.engine import Engine
from slipstream.errors import RequestError
from slipstream.sampling.params import SamplingParams


@pytest_asyncio.fixture
async def gated() -> AsyncIterator[tuple[AsyncEngine, GatedRunner]]:
    runner = GatedRunner()
    engine = AsyncEngine(Engine(lambda: runner, CONFIG))
    await engine.start()
    yield engine, runner
    runner.fuel.put(None)
    await engine.close()
    assert engine.engine.failed is None
    assert engine.snapshot().num_used_blocks == 0


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(Engine(lambda: FakeRunner(make_info(), hit=0.6), CONFIG))
    await engine.start()
    yield engine
    await engine.close()


async def tokens_of(engine: AsyncEngine, seed: int, count: int) -> tuple[int, ...]:
    stream = engine.submit([seed], SamplingParams(seed=seed, max_tokens=count))
    return tuple([token async for event in stream for token in event.tokens])


async def test_streams_side_by_side(engine: AsyncEngine) -> None:
    outputs = await asyncio.gather(*(tokens_of(engine, seed, 15) for seed in range(10)))
    assert outputs == [continuation([seed], seed, 97, 15) for seed in range(10)]


async def test_leaving_one_answer_leaves_the_others(engine: AsyncEngine) -> None:
    first, *others = engine.submit_many([1, 2, 3], SamplingParams(seed=5, max_tokens=15), 3)
    await first.aclose()
    for i, stream in enumerate(others, start=1):
        tokens = [token async for event in stream for token in event.tokens]
        assert tuple(tokens) == continuation([1, 2, 3], 5 + i, 97, 15)


async def test_bad_requests_raise_at_once(engine: AsyncEngine) -> None:
    with pytest.raises(RequestError):
        engine.submit([], SamplingParams())


async def test_the_last_event_ends_the_iterator(engine: AsyncEngine) -> None:
    stream = engine.submit([1], SamplingParams(max_tokens=3))
    events = [event async for event in stream]
    assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert stream.finished
    await stream.aclose()


async def test_cancelling_a_consumer_aborts_its_request(gated: tuple[AsyncEngine, GatedRunner]) -> None:
    engine, runner = gated
    task = asyncio.create_task(tokens_of(engine, 1, 50))
    other = asyncio.create_task(tokens_of(engine, 2, 10))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    runner.fuel.put(None)
    assert await other == continuation([2], 2, 97, 10)
    assert await tokens_of(engine, 3, 5) == continuation([3], 3, 97, 5)
    assert engine.snapshot().finished["abort"] == 1


@pytest.mark.parametrize("leave", ["aclose", "with"])
async def test_leaving_early_aborts(gated: tuple[AsyncEngine, GatedRunner], leave: str) -> None:
    engine, runner = gated
    runner.fuel.put(1)
    stream = engine.submit([1], SamplingParams(max_tokens=50))
    if leave == "with":
        async with stream:
            await anext(stream)
    else:
        await anext(stream)
        await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    runner.fuel.put(None)
    await tokens_of(engine, 2, 5)
    assert engine.snapshot().finished["abort"] == 1


async def test_abort_by_id_ends_the_stream_with_a_final_event(gated: tuple[AsyncEngine, GatedRunner]) -> None:
    engine, runner = gated
    stream = engine.submit([1], SamplingParams(max_tokens=50))
    engine.abort(stream.id)
    runner.fuel.put(None)
    assert [event.finish_reason async for event in stream][-1] == "abort"


async def test_a_consumer_that_never_reads_slows_nobody(engine: AsyncEngine) -> None:
    silent = engine.submit([9], SamplingParams(seed=9, max_tokens=40))
    assert await tokens_of(engine, 1, 60) == continuation([1], 1, 97, 60)
    assert [token async for event in silent for token in event.tokens] == list(continuation([9], 9, 97, 40))


async def test_the_loop_is_woken_at_most_once_a_step(engine: AsyncEngine) -> None:
    num_wakes = 0
    wake = engine.engine.on_delivered

    def count() -> None:
        nonlocal num_wakes
        num_wakes += 1
        wake()

    engine.engine.on_delivered = count
    await asyncio.gather(*(tokens_of(engine, seed, 20) for seed in range(4)))
    assert 0 < num_wakes <= engine.snapshot().num_steps + 1  # the snapshot may be one step old


async def test_fast_steps_wake_the_loop_once_for_several(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that rests finds the events of all steps meanwhile; the last one comes without a further step."""
    monkeypatch.setattr(async_engine, "REST_SECONDS", 0.2)
    await tokens_of(engine, 1, 5)
    stream = engine.submit([2], SamplingParams(seed=2, max_tokens=60))
    tokens: list[int] = []
    num_takes = 0
    while not stream.finished:
        await stream.ready()
        tokens += [token for event in stream.take() for token in event.tokens]
        num_takes += 1
    assert tuple(tokens) == continuation([2], 2, 97, 60)
    assert num_takes < engine.snapshot().num_steps / 2


async def test_the_first_and_the_last_event_wait_for_nothing(
    gated: tuple[AsyncEngine, GatedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those between them do, here for ever."""
    engine, runner = gated
    monkeypatch.setattr(async_engine, "REST_SECONDS", 1e6)
    for seed in (1, 2):
        stream = engine.submit([seed], SamplingParams(seed=seed, max_tokens=4))
        runner.fuel.put(1)
        await stream.ready()
        assert [len(event.tokens) for event in stream.take()] == [1]
        for _ in range(3):
            runner.fuel.put(1)
        await stream.ready()
        assert [event.finish_reason for event in stream.take()][-1] == "length"
        while not runner.fuel.empty():  # accepted drafts leave some over
            runner.fuel.get_nowait()


async def test_a_dying_engine_ends_every_stream(gated: tuple[AsyncEngine, GatedRunner]) -> None:
    runner = GatedRunner()
    engine = AsyncEngine(Engine(lambda: runner, CONFIG))
    await engine.start()
    streams = [engine.submit([1], SamplingParams()) for _ in range(3)]
    runner.fuel.put(ValueError("boom"))
    for stream in streams:
        assert [event.finish_reason async for event in stream] == ["error"]
    await engine.close()
