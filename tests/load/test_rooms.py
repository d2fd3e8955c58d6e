"""The import arrows inside load: the door and its helpers -> hf, gguf -> tokenizer -> modules that all share."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import slipstream.load

ROOT = Path(slipstream.load.__file__).parent
SHARED = {"dequantize", "fields", "json_file", "mapped_file", "shapes", "spec", "tensor"}
ALLOWED = {
    "shared": {"shared"},
    "tokenizer": {"shared", "tokenizer"},
    "hf": {"shared", "tokenizer", "hf"},
    "gguf": {"shared", "tokenizer", "gguf"},
    "top": {"shared", "tokenizer", "hf", "gguf", "top"},
}


def room(name: str) -> str:
    return "shared" if name in SHARED else name if name in ALLOWED else "top"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_one_way(path: Path) -> None:
    own = room(path.relative_to(ROOT).with_suffix("").parts[0])
    modules = {node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
    assert "slipstream.load" not in modules, "no module of load imports its door"
    used = {room(name.split(".")[2]) for name in modules if name.startswith("slipstream.load.")}
    assert used <= ALLOWED[own]
