"""Hostile bodies: never a 5xx, `/health` answers, memory comes back. As a command, with numbers: fuzz.py."""

from __future__ import annotations

import asyncio

import pytest
from fake_server import FakeServer
from fuzz import FuzzReport, fuzz, fuzzed_server, send_all, watching_health
from fuzz_bodies import fuzzed, large_bodies

PATIENCE = 60.0  # seconds for one answer of /health on the slowest machine


def test_no_body_is_a_server_error(fake: FakeServer) -> None:
    report = FuzzReport()
    with watching_health(fake.port, report):
        asyncio.run(send_all(fake.port, fuzzed(400, seed=7, num_large=8), report))
    assert report.failures == []
    assert report.statuses["200"] > 0
    assert report.statuses["400"] > 0
    assert max(report.health) < PATIENCE


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"])
def test_no_parts_are_an_empty_message(fake: FakeServer, path: str) -> None:
    for content in ([], ""):
        response = fake.post(path, messages=[{"role": "user", "content": content}], max_tokens=2)
        assert response.status_code == 200, response.text


@pytest.mark.exhaustive
def test_ten_thousand_bodies_leave_nothing_behind() -> None:
    with fuzzed_server() as server:
        report = fuzz(server, 10_000)
    assert report.failures == []
    assert sum(report.statuses.values()) == 10_000
    assert max(report.health) < PATIENCE
    assert report.grown < 0.1


def test_the_same_seed_gives_the_same_bodies() -> None:
    assert list(fuzzed(50, 3, 0)) == list(fuzzed(50, 3, 0)) != list(fuzzed(50, 4, 0))
    assert len({each.path for each in large_bodies()}) >= 5
