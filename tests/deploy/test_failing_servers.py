"""deploy/nginx and deploy/haproxy: a server that is killed, one that drains and comes back, and none at all."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_ports import free_port
from real_server import WAIT
from routers import KINDS, Routed, Router, chat, routing, until


class Stream(threading.Thread):
    """Reads a stream to its end: its events' texts, and the error that ended it, if one did."""

    def __init__(self, routed: Routed, headers: dict[str, str], num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.stamps = 0
        self.done = False
        self.error: httpx.HTTPError | None = None
        self._leaves = False
        self._url, self._headers = f"{routed.router.url}/v1/chat/completions", headers
        self._body = {"messages": chat("Hi"), "stream": True, "max_tokens": num_tokens}
        self.start()
        until(lambda: self.stamps > 0)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, headers=self._headers, timeout=WAIT) as answer:
                for line in answer.iter_lines():
                    self.stamps += line.count("<")
                    self.done |= line == "data: [DONE]"
                    if self._leaves:
                        return
        except httpx.HTTPError as error:
            self.error = error

    def leave(self) -> None:
        self._leaves = True
        self.ended()

    def ended(self) -> None:
        self.join(WAIT)
        assert not self.is_alive()


def test_a_killed_server(fresh: Routed) -> None:
    """Its streams end, others go on; its conversations move over."""
    on_one, on_two = fresh.session_on("one"), fresh.session_on("two")
    cut, other = Stream(fresh, on_one, 30_000), Stream(fresh, on_two, 150)
    fresh.servers["one"].signal(signal.SIGKILL)
    cut.ended()
    assert not cut.done
    assert [fresh.ask(on_one) for _ in range(4)] == ["two"] * 4
    assert [fresh.ask(on_two) for _ in range(4)] == ["two"] * 4
    other.ended()
    assert (other.stamps, other.done, other.error) == (150, True, None)


def test_a_server_killed_before_it_answered(fresh: Routed) -> None:
    """Nothing has reached the client, so the other server is asked."""
    on_one = fresh.session_on("one")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(fresh.ask, on_one, max_tokens=400)
        until(lambda: fresh.running("one") == 1)
        fresh.servers["one"].signal(signal.SIGKILL)
        assert answer.result(WAIT) == "two"


def test_a_server_that_drains_and_comes_back(fresh: Routed) -> None:
    """Its streams end as they should; new requests are answered by the other, which is soon asked first."""
    on_one = fresh.session_on("one")
    short, long = Stream(fresh, on_one, 150), Stream(fresh, on_one, 30_000)
    fresh.servers["one"].signal(signal.SIGTERM)
    until(lambda: not ready(fresh, "one"))
    assert [fresh.ask(on_one) for _ in range(8)] == ["two"] * 8  # no error in between
    until(lambda: not asks_first(fresh, on_one))
    short.ended()
    assert (short.stamps, short.done, short.error) == (150, True, None)
    long.leave()
    assert fresh.servers["one"].wait() == 0
    fresh.start("one")
    until(lambda: fresh.ask(on_one) == "one")
    assert fresh.ask(on_one) == "one"


def asks_first(routed: Routed, headers: dict[str, str]) -> bool:
    """Whether the router still asks the draining server, to be refused, before it asks the other one."""
    before = num_refused(routed)
    assert routed.ask(headers) == "two"
    return num_refused(routed) != before


def num_refused(routed: Routed) -> str:
    metrics = httpx.get(f"{routed.servers['one'].url}/metrics", timeout=WAIT).text
    return next((line for line in metrics.splitlines() if 'completions",status="503"' in line), "")


def ready(routed: Routed, name: str) -> bool:
    try:
        return httpx.get(f"{routed.servers[name].url}/ready", timeout=WAIT).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_no_server_at_all(kind: str, tmp_path: Path) -> None:
    with routing(kind, tmp_path, [free_port(), free_port()]) as router:
        answers = [_ask(router) for _ in range(4)]
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_server"
        assert answer.headers["retry-after"] == "5"


def _ask(router: Router) -> Any:
    return httpx.post(f"{router.url}/v1/chat/completions", json={"messages": chat("Hi")}, timeout=WAIT)
