"""The import arrows between the server's rooms, read from the source; and no import cycle, hidden ones included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "slipstream"
SERVER = PACKAGE / "server"
ROOMS = ("http", "protocols", "service", "text")  # each may import itself and those after it
MAX_PEERS = 16  # files of one folder
FILES = sorted(SERVER.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


def imported(path: Path) -> set[str]:
    """The server's modules that a file imports, those for type checkers only included."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} & MODULES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SERVER)))
def test_arrows_between_rooms_point_one_way(path: Path) -> None:
    own = path.relative_to(SERVER).parts[0]
    allowed = ROOMS[ROOMS.index(own) :] if own in ROOMS else ()
    used = {name.split(".")[2] for name in imported(path)} - {"errors"}
    assert used <= set(allowed), f"{own} may not import {used - set(allowed)}"


def test_no_module_imports_itself_through_others() -> None:
    graph = {module_of(path): imported(path) - {module_of(path)} for path in FILES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


@pytest.mark.parametrize("folder", ROOMS)
def test_no_room_has_too_many_files(folder: str) -> None:
    assert len(list((SERVER / folder).glob("*.py"))) <= MAX_PEERS
