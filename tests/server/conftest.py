"""A server in this process over the engine's fake runner, and a real one in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import FakeServer
from real_server import RealServer


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    """Answers at once, with nonsense that depends on prompt and seed alone."""
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="session")
def real() -> Iterator[RealServer]:
    """The default model, drafting two deep."""
    with RealServer("--draft", "2", "--max-context", "1024", "--max-streams", "8") as server:
        yield server
