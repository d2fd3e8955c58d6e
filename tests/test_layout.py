"""The layout of the code, read from the source: who imports whom, how long files and functions are, what the map names.

Each rule lists all its violations at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "slipstream"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")  # the door names everything

# Who may import whom, besides itself. `contract` is engine/contract.py: part of the vocabulary that every room speaks.
VOCABULARY = {"errors", "sampling", "config", "contract", "host"}
ROOMS = {
    "errors": set(),
    "host": set(),
    "sampling": {"errors"},
    "config": {"errors", "sampling"},
    "contract": {"sampling"},
    "cache": VOCABULARY,
    "speculate": VOCABULARY,
    "workers": set(),
    "template": {"workers"},
    "load": {"errors", "sampling", "workers"},
    "grammar": {"errors", "sampling", "load", "host", "workers"},
    "runners": VOCABULARY | {"load"},
    "engine": VOCABULARY | {"cache", "speculate"},
    "assemble": VOCABULARY | {"engine", "runners", "load"},
    "llm": VOCABULARY | {"engine", "runners", "load", "grammar", "assemble"},
    "server": VOCABULARY | {"engine", "load", "grammar"},
    "commands": VOCABULARY | {"engine", "runners", "load", "grammar", "assemble", "llm", "server"},
    "bench": VOCABULARY
    | {"engine", "speculate", "runners", "load", "grammar", "assemble", "llm", "server", "commands", "ray"},
    "cli": VOCABULARY | {"commands", "bench", "server"},
    "ray": VOCABULARY | {"cli", "commands", "engine", "server"},
}
# Inside runners: "" are the modules that all of them share. PyTorch's backend and loader put cpu and cuda together.
RUNNERS = {
    "": {""},
    "host": {"", "host"},
    "torch": {"", "host", "torch"},
    "cpu": {"", "torch", "cpu"},
    "cuda": {"", "torch", "cuda"},
    "mlx": {"", "host", "mlx"},
}
ASSEMBLY = {"runners/torch/backend.py", "runners/torch/loading.py"}
LIBRARIES = {"torch": {"torch", "triton"}, "cpu": {"torch"}, "cuda": {"torch", "triton"}, "mlx": {"mlx", "mlx_lm"}}
SERVER = ("http", "protocols", "service", "text", "errors")  # each may import itself and those after it
LOAD = {
    "": {"", "hf", "gguf", "tokenizer", "shared"},
    "random": {"random", "", "tokenizer", "shared"},
    "hf": {"hf", "tokenizer", "shared"},
    "gguf": {"gguf", "tokenizer", "shared"},
    "tokenizer": {"tokenizer", "shared"},
    "shared": {"shared"},
}
LOAD_SHARED = {
    "dequantize",
    "fields",
    "gguf_names",
    "json_file",
    "mapped_file",
    "quantized",
    "shapes",
    "spec",
    "tensor",
}

MAX_FILE, MAX_FUNCTION, MAX_PEERS = 400, 60, 16
# Kernels are one function each, whatever their length; those over the ceiling are named.
LONG_KERNELS = {"_attend_kernel", "skinny_prefetch", "_conv", "_recur", "_across", "_border_kernel"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules, those for type checkers only and those imported inside functions included."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module or "" for name in whole}
    return frozenset(found)


MODULES = {module_of(path) for path in FILES}


def ours(path: Path, start: str = "slipstream.") -> list[list[str]]:
    """The parts of the imported modules' names after ``start``."""
    return [name.removeprefix(start).split(".") for name in imports(path) if name.startswith(start)]


def room(parts: list[str]) -> str:
    return "contract" if parts[:2] == ["engine", "contract"] else parts[0]


def inside(parts: list[str], rooms: object) -> str:
    """The room of a module inside a room that has some; "": the modules next to them."""
    assert isinstance(rooms, dict)
    return parts[0] if parts[0] in rooms else ""


def test_rooms() -> None:
    wrong = []
    for path in FILES:
        own = room(module_of(path).split(".")[1:])
        wrong += [f"{name_of(path)} -> {to}" for to in {room(parts) for parts in ours(path)} - ROOMS[own] - {own}]
    assert not wrong


def test_rooms_inside_runners() -> None:
    wrong = []
    for path in sorted((PACKAGE / "runners").rglob("*.py")):
        own = inside(list(path.relative_to(PACKAGE / "runners").parts), RUNNERS)
        allowed = RUNNERS[own] | ({"cpu", "cuda"} if name_of(path) in ASSEMBLY else set())
        if name_of(path) == "runners/choose.py":
            allowed = {"", "torch", "mlx"}
        used = {inside(parts, RUNNERS) for parts in ours(path, "slipstream.runners.")}
        wrong += [f"{name_of(path)} -> {to}" for to in used - allowed]
    assert not wrong


def test_runners_are_reached_by_their_backend_only() -> None:
    wrong = []
    for path in FILES:
        if not name_of(path).startswith("runners/"):
            wrong += [
                name_of(path) for parts in ours(path, "slipstream.runners.") if parts[0] not in ("backend", "choose")
            ]
    assert not wrong


def test_array_libraries_stay_in_their_runners() -> None:
    named = {"torch", "triton", "mlx", "mlx_lm", "transformers", "pickle"}
    wrong = []
    for path in FILES:
        parts = path.relative_to(PACKAGE).parts
        allowed = LIBRARIES.get(parts[1], set()) if parts[0] == "runners" else set()
        used = {name.split(".")[0] for name in imports(path)} & named
        wrong += [f"{name_of(path)} -> {library}" for library in used - allowed]
    assert not wrong


def test_rooms_inside_the_server() -> None:
    wrong = []
    for path in sorted((PACKAGE / "server").rglob("*.py")):
        own = path.relative_to(PACKAGE / "server").with_suffix("").parts[0]
        allowed = SERVER[SERVER.index(own) :] if own in SERVER else ()
        used = {parts[0] for parts in ours(path, "slipstream.server.")} - set(allowed)
        wrong += [f"{name_of(path)} -> {to}" for to in used]
    assert not wrong


def test_rooms_inside_load() -> None:
    def place(parts: list[str]) -> str:
        return "shared" if parts[0] in LOAD_SHARED else inside(parts, LOAD)

    wrong = []
    for path in sorted((PACKAGE / "load").rglob("*.py")):
        own = place(list(path.relative_to(PACKAGE / "load").with_suffix("").parts))
        used = {place(parts) for parts in ours(path, "slipstream.load.")} - LOAD[own]
        wrong += [f"{name_of(path)} -> {to}" for to in used]
        wrong += [f"{name_of(path)} -> its own door" for name in imports(path) if name == "slipstream.load"]
    assert not wrong


def test_no_module_imports_itself_through_others() -> None:
    graph = {module_of(path): (imports(path) & MODULES) - {module_of(path)} for path in FILES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_ceilings() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    files = [f"{path}: {count}" for path in [*FILES, *tests] if (count := path.read_text().count("\n")) > MAX_FILE]
    assert not files
    long = {
        f"{name_of(path)}: {node.name}" for path in FILES for node in functions(path) if length(node) > MAX_FUNCTION
    }
    kernels = {entry for entry in long if "/kernels/" in entry}
    assert {entry.split(": ")[1] for entry in kernels} == LONG_KERNELS, "a kernel that is shorter now leaves the list"
    assert long == kernels
    folders = {path.parent for path in FILES}
    assert not [
        folder for folder in folders if len([p for p in folder.glob("*.py") if p.stem != "__init__"]) > MAX_PEERS
    ]


def test_every_module_is_on_the_map() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    [map_] = re.findall(r"## Map\n+```\n(.*?)```", text, re.DOTALL)
    words = set(re.findall(r"\w+", map_))
    assert not [name_of(path) for path in FILES if path.stem not in words and path.stem != "__init__"]


def test_every_public_name_exists() -> None:
    import slipstream

    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    with pytest.raises(AttributeError):
        slipstream.no_such_name  # noqa: B018
