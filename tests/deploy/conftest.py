"""The routers of routers.py as fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from routers import KINDS, Routed


@pytest.fixture(scope="module", params=KINDS)
def routed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    """For tests that leave both servers alive."""
    found = Routed(request.param, tmp_path_factory.mktemp(request.param))
    yield found
    found.close()


@pytest.fixture(params=KINDS)
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Routed]:
    """For tests that end servers."""
    found = Routed(request.param, tmp_path, "--drain", "600")
    yield found
    found.close()
