"""A hundred clients beside one with 300 requests and twenty that never read. See bad_neighbours.py."""

from __future__ import annotations

import asyncio
import sys

import pytest
from bad_neighbours import ARGUMENTS, NUM_CLIENTS, NUM_HOSTILE, neighbourhood
from real_server import RealServer


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="needs several loopback addresses")
def test_the_others_get_their_texts_before_the_hostile_client_has_all_of_its() -> None:
    with RealServer(*ARGUMENTS) as server:
        seen = asyncio.run(neighbourhood(server))
    assert seen.wrong == []
    assert seen.refused == 0
    assert seen.right + seen.left == NUM_CLIENTS
    assert seen.hostile_done_first < NUM_HOSTILE / 2
    assert set(seen.hostile) <= {"200", "429"}
    assert seen.used_blocks == 0
