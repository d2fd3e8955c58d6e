"""The import arrows of docs/ARCHITECTURE.md, read from the source: a wrong one fails here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "slipstream"

# Who may import whom. `contract` is engine/contract.py: part of the vocabulary that every room speaks.
VOCABULARY = {"errors", "sampling", "config", "contract", "host"}
ALLOWED = {
    "errors": set(),
    "host": set(),
    "sampling": {"errors"},
    "config": {"errors", "sampling"},
    "contract": {"sampling"},
    "cache": VOCABULARY,
    "speculate": VOCABULARY,
    "load": {"errors"},
    "grammar": {"errors", "sampling", "load", "host"},
    "runners": VOCABULARY | {"load"},
    "engine": VOCABULARY | {"cache", "speculate"},
    "assemble": VOCABULARY | {"engine", "runners", "load"},
    "llm": VOCABULARY | {"assemble", "engine", "runners", "load", "grammar"},
    "server": VOCABULARY | {"engine", "load", "grammar"},
    "commands": VOCABULARY | {"assemble", "engine", "runners", "load", "grammar", "llm", "server"},
    "bench": VOCABULARY
    | {"assemble", "engine", "speculate", "runners", "load", "grammar", "llm", "server", "commands"},
    "cli": VOCABULARY | {"commands", "bench", "server"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    parts = module.split(".")
    return "contract" if parts[1:3] == ["engine", "contract"] else parts[1]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_one_way(path: Path) -> None:
    if path.parent == PACKAGE and path.stem == "__init__":
        return  # the front door names what it offers
    own = room(module_of(path))
    used = {room(name) for name in imports(path) if name.startswith("slipstream.")} - {own}
    assert used <= ALLOWED[own], f"{own} may not import {used - ALLOWED[own]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_array_libraries_stay_in_the_runners(path: Path) -> None:
    named = {"torch", "triton", "mlx", "mlx_lm", "transformers", "pickle"}
    libraries = {name.split(".")[0] for name in imports(path)} & named
    runner = path.relative_to(PACKAGE).parts[1] if room_or_door(path) == "runners" else ""
    own = {"torch": {"torch", "triton"}, "cpu": {"torch"}, "cuda": {"torch", "triton"}, "mlx": {"mlx", "mlx_lm"}}
    assert libraries <= own.get(runner, set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_runners_do_not_know_each_other(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    if parts[0] == "runners" and len(parts) > 2:
        others = {name.split(".")[2] for name in imports(path) if name.startswith("slipstream.runners.")}
        assert "mlx" not in others or parts[1] == "mlx"
        assert not others & {"torch", "cpu", "cuda"} or parts[1] != "mlx"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_runners_are_reached_by_their_backend_only(path: Path) -> None:
    if room_or_door(path) != "runners":
        used = {name for name in imports(path) if name.startswith("slipstream.runners")}
        assert used <= {"slipstream.runners.backend"}


def room_or_door(path: Path) -> str:
    return "door" if path.parent == PACKAGE and path.stem == "__init__" else room(module_of(path))


def test_every_public_name_exists() -> None:
    import slipstream

    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    with pytest.raises(AttributeError):
        slipstream.no_such_name  # noqa: B018
