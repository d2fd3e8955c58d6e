"""What `make test` takes of a product of parameters (tests/conftest.py)."""

from __future__ import annotations

from itertools import combinations, product

import pytest


@pytest.mark.parametrize(("size", "most"), [(1, 4), (2, 14)])
def test_few_cases_show_each_value_or_each_pair(request: pytest.FixtureRequest, size: int, most: int) -> None:
    """Of 4 x 3 x 2 cases; 4 and 12 are the fewest that can."""
    plugins = request.config.pluginmanager.get_plugins()
    left_over = next(plugin.left_over for plugin in plugins if hasattr(plugin, "left_over"))
    shown = {case: set(combinations(enumerate(case), size)) for case in product(range(4), range(3), range(2))}
    taken = shown.keys() - set(left_over(shown))
    assert set().union(*(shown[case] for case in taken)) == set().union(*shown.values())
    assert len(taken) <= most


def test_what_is_slow_to_set_up_comes_first(request: pytest.FixtureRequest) -> None:
    """Before what stands above it in its file, too."""
    items = request.session.items
    marked = [index for index, item in enumerate(items) if item.get_closest_marker("first")]
    assert marked == list(range(len(marked)))


@pytest.mark.first
def test_marked_first() -> None:
    """For the test above."""
