"""Clients share: a client with many requests does not keep the others out, nor do grammars under trial."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import httpx
import pytest
from fake_server import ENGINE, FakeServer, events, raw_post, until
from test_behaviour_under_load import ANSWER, CHAT, HELLO, LONG, inside
from test_engine import GatedRunner

from slipstream.grammar import GrammarCompiler
from slipstream.server.errors import ApiError
from slipstream.server.service.admission import FairThreads, Places
from slipstream.server.service.settings import ServerConfig

QUEUE = 8
PLACES = ENGINE.max_streams + QUEUE


@pytest.fixture
def gated() -> Iterator[FakeServer]:
    config = ServerConfig(port=0, queue_limit=QUEUE, keep_alive_seconds=0.05)
    with FakeServer(GatedRunner(num_blocks=256), config) as server:
        yield server


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def ask(server: FakeServer, address: str, key: str = "", **body: object) -> httpx.Response:
    """As a client of that address: all of 127.0.0.0/8 is this machine."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=300) as client:
        return client.post(server.url + CHAT, json=LONG | body, headers={"x-api-key": key} if key else {})


def text_of(response: httpx.Response) -> str:
    found = events(iter(response.text.splitlines()))
    return "".join(choice["delta"].get("content", "") for each in found for choice in each.get("choices", []))


@pytest.mark.parametrize("stream", [True, False])
def test_a_hostile_client_does_not_keep_others_out(
    gated: FakeServer, threads: ThreadPoolExecutor, stream: bool
) -> None:
    """One client fills every place; three requests of others get in, at the cost of its newest, and are served."""
    hostile = [threads.submit(ask, gated, "127.0.0.2", stream=stream) for _ in range(PLACES + 10)]
    until(lambda: sum(each.done() for each in hostile) == 10 and inside(gated) == PLACES)
    assert {each.result().status_code for each in hostile if each.done()} == {429}
    others = [threads.submit(ask, gated, address) for address in ("127.0.0.1", "127.0.0.3", "127.0.0.1")]
    until(lambda: inside(gated) == PLACES + 3)
    gated.runner.fuel.put(1)
    until(lambda: sum(each.done() for each in hostile) == 13)
    gated.runner.fuel.put(None)
    assert [text_of(each.result()) for each in others] == [ANSWER] * 3
    answers = [each.result() for each in hostile]
    served = [each for each in answers if each.status_code == 200 and "queue_full" not in each.text]
    assert len(served) == PLACES - 3
    assert all("queue_full" in each.text for each in answers if each not in served)


def test_others_wait_for_a_turn_not_for_the_whole_queue(gated: FakeServer, threads: ThreadPoolExecutor) -> None:
    hostile = [threads.submit(ask, gated, "127.0.0.2") for _ in range(PLACES - 1)]
    until(lambda: inside(gated) == PLACES - 1)
    honest = threads.submit(ask, gated, "127.0.0.1", messages=[{"role": "user", "content": "honest"}])
    until(lambda: inside(gated) == PLACES)
    gated.runner.fuel.put(None)
    for each in (*hostile, honest):
        assert each.result().status_code == 200
    prompt = tuple(gated.tokenizer.encode("u:honest\n"))
    joined = [join.tokens[: join.num_prompt] for plan in gated.runner.plans for join in plan.joins]
    assert joined.index(prompt) <= ENGINE.max_streams + 1, "it had the first or second turn, not the last"


def test_keys_tell_clients_apart(threads: ThreadPoolExecutor) -> None:
    """At one address."""
    config = ServerConfig(port=0, queue_limit=QUEUE, api_keys=("hostile", "honest"))
    with FakeServer(GatedRunner(num_blocks=256), config) as server:
        hostile = [threads.submit(ask, server, "127.0.0.1", "hostile") for _ in range(PLACES)]
        until(lambda: inside(server) == PLACES)
        assert ask(server, "127.0.0.1", "neither").status_code == 401
        honest = threads.submit(ask, server, "127.0.0.1", "honest")
        until(lambda: inside(server) == PLACES + 1)
        server.runner.fuel.put(1)
        until(lambda: any(each.done() for each in hostile))
        server.runner.fuel.put(None)
        assert text_of(honest.result()) == ANSWER
        assert [each.result().status_code for each in hostile].count(429) == 1


def test_grammars_under_trial_take_no_place(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are places: plain requests are served all the same."""
    free, begun = threading.Event(), list[object]()
    compile_ = GrammarCompiler.compile

    def stuck(compiler: GrammarCompiler, *arguments: object) -> object:
        begun.append(arguments)
        assert free.wait(300)
        return compile_(compiler, *arguments)

    monkeypatch.setattr(GrammarCompiler, "compile", stuck)
    with FakeServer(config=ServerConfig(port=0, queue_limit=1)) as server:
        tried: list[Future[httpx.Response]] = []
        line = server.server._service._grammar_threads._line
        limit = ENGINE.max_streams + 1
        for i in range(1, 22):  # one after the other: at once, they would fill the line for templates as well
            tried.append(threads.submit(server.post, CHAT, messages=HELLO, guided_regex=f"a{{{i}}}"))
            until(lambda: len(begun) + len(line) + sum(each.done() for each in tried) == len(tried))
        until(lambda: sum(each.done() for each in tried) == len(tried) - limit - 2)
        assert {each.result().status_code for each in tried if each.done()} == {429}
        assert server.post(CHAT, messages=HELLO, max_tokens=5).status_code == 200
        free.set()
        assert [each.result().status_code for each in tried].count(200) == limit + 2


def test_a_prompt_that_is_far_too_long_is_not_tokenised_whole(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = type(fake.tokenizer).encode

    def noted(tokenizer: object, text: str, **options: bool) -> list[int]:
        sizes.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(type(fake.tokenizer), "encode", noted)
    text = "abc " * 900_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
    ):
        refused = fake.post(path, **body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert sum(sizes) < 100_000


# ---- the parts ----


def full() -> ApiError:
    return ApiError(429, "full")


class Waiting:
    """A generation that has not started."""

    def __init__(self, started: bool = False) -> None:
        self.started, self.aborted = started, False

    def has_started(self, running: object) -> bool:
        return self.started

    def abort(self, error: ApiError) -> None:
        self.aborted = True


class Room:
    def __init__(self, limit: int) -> None:
        self.places = Places(limit, full, list)
        self.held = ExitStack()

    def enter(self, client: str, num: int = 1, started: bool = False) -> Waiting:
        place = self.held.enter_context(self.places.taken(client, num))
        place.generation = generation = Waiting(started)  # type: ignore[assignment]
        return generation


def test_the_newest_waiting_request_of_the_greediest_client_leaves() -> None:
    room = Room(6)
    hostile = [room.enter("a", started=i < 2) for i in range(5)]
    room.enter("b")
    room.enter("c")
    assert [each.aborted for each in hostile] == [False, False, False, False, True]
    room.enter("c")
    assert [each.aborted for each in hostile] == [False, False, False, True, True]
    with pytest.raises(ApiError):
        room.enter("a")


def test_nobody_who_runs_or_has_no_more_than_the_newcomer_leaves() -> None:
    room = Room(4)
    running, others = [room.enter("a", started=True) for _ in range(2)], [room.enter("b"), room.enter("c")]
    with pytest.raises(ApiError):
        room.enter("d")
    assert not any(each.aborted for each in (*running, *others))


def test_a_newcomer_that_cannot_have_all_its_places_takes_none() -> None:
    room = Room(4)
    hostile = [room.enter("a", started=i < 2) for i in range(4)]
    with pytest.raises(ApiError):
        room.enter("b", num=3)
    assert not any(each.aborted for each in hostile)
    room.enter("b", num=2)
    assert [each.aborted for each in hostile] == [False, False, True, True]


def test_threads_are_taken_in_turn_and_the_line_is_bounded() -> None:
    async def main() -> list[object]:
        pool = FairThreads(1, "test", 4, full)
        gate, order = threading.Event(), []

        def work(name: str) -> None:
            assert gate.wait(300)
            order.append(name)

        tasks = []
        for name in ("a0", "a1", "a2", "a3", "a4", "b0"):
            tasks.append(asyncio.ensure_future(pool.run(name[0], partial(work, name))))
            await asyncio.sleep(0)
        tasks[2].cancel()
        tasks[0].cancel()  # it has begun: its thread is not free yet
        await asyncio.sleep(0)
        gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in found] == [
            asyncio.CancelledError, type(None), asyncio.CancelledError, type(None), ApiError, type(None),
        ]  # fmt: skip
        await pool.run("a", partial(work, "last"))
        pool.close()
        return order

    assert asyncio.run(main()) == ["a0", "a1", "b0", "a3", "last"]


def test_leaving_while_a_grammar_is_tried(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever left keeps its thread until the work is done, so that no line grows behind it unseen."""
    free, began = threading.Event(), threading.Semaphore(0)
    compile_ = GrammarCompiler.compile

    def stuck(compiler: GrammarCompiler, *arguments: object) -> object:
        began.release()
        assert free.wait(300)
        return compile_(compiler, *arguments)

    monkeypatch.setattr(GrammarCompiler, "compile", stuck)
    with FakeServer() as server:
        for i in range(2):
            with raw_post(server.port, CHAT, LONG | {"guided_regex": f"a{{{i + 1}}}"}):
                assert began.acquire(timeout=300)
        until(lambda: server.server._service._num_admitted == 0)
        waiting: Future[httpx.Response] = threads.submit(server.post, CHAT, messages=HELLO, guided_regex="b")
        until(lambda: len(server.server._service._grammar_threads._line) == 1)
        free.set()
        assert waiting.result().status_code == 200
