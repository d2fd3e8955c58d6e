"""Rounds of two hundred clients on the default model. Ten of them, for memory: `python tests/server/load.py`."""

from __future__ import annotations

import asyncio

import pytest
from load import ARGUMENTS, NUM_CLIENTS, rounds
from real_server import RealServer


@pytest.mark.parametrize("num_rounds", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_two_hundred_clients_with_a_third_that_disconnect(num_rounds: int) -> None:
    with RealServer(*ARGUMENTS) as server:
        seen = asyncio.run(rounds(server, num_rounds))
        status = server.status()
    assert seen.stayed + seen.left == num_rounds * NUM_CLIENTS
    assert seen.left_in_body > 0
    assert seen.wrong == []
    assert seen.used_blocks == [0] * num_rounds
    assert status["load"]["requests"]["abort"] > 0, "somebody left while the engine had their request"
    assert status["load"]["requests"]["error"] == 0
    assert status["speculation"]["drafts"] > 0
    assert status["speculation"]["plain_row_steps"] > 0
    assert status["streams"] == []
