"""A proxy that is late: Ray ends it, `serve.start` fails, and the controller starts another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slipstream.ray import proxy
from slipstream.ray.proxy import start_proxy


class Ended(Exception):
    pass


class FakeServe:
    """``fault``: of the first start. A proxy is healthy once its status was asked for more than ``num_late`` times."""

    def __init__(self, fault: Exception | None, num_late: int) -> None:
        self._faults, self._num_late = [fault] if fault else [], num_late
        self.num_starts = self.num_asked = 0

    def start(self, http_options: dict[str, object]) -> None:
        self.num_starts += 1
        if self._faults:
            raise self._faults.pop()

    def status(self) -> SimpleNamespace:
        self.num_asked += 1
        return SimpleNamespace(proxies={"node": "HEALTHY" if self.num_asked > self._num_late else "STARTING"})


def test_a_proxy_in_time_is_not_asked_for() -> None:
    fake = FakeServe(None, 0)
    start_proxy(fake, (Ended,), {})
    assert (fake.num_starts, fake.num_asked) == (1, 0)


def test_a_later_proxy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.time, "sleep", lambda seconds: None)
    fake = FakeServe(Ended(), 3)
    start_proxy(fake, (Ended, TimeoutError), {})
    assert (fake.num_starts, fake.num_asked) == (2, 4)


def test_a_proxy_that_never_starts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "PROXY_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="did not start within"):
        start_proxy(FakeServe(Ended(), 1 << 30), (Ended,), {})


def test_other_errors_are_not_late_proxies() -> None:
    with pytest.raises(ValueError, match="a port"):
        start_proxy(FakeServe(ValueError("a port"), 0), (Ended,), {})
