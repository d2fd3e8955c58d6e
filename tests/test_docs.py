"""The documents: their links lead somewhere, the README stays short, and its commands are those of the Makefile."""

from __future__ import annotations

import math
import re
import tomllib
from glob import glob
from itertools import cycle
from pathlib import Path

import pytest

from slipstream.config import RunnerConfig
from slipstream.load.quantized.gguf_blocks import BLOCK_TYPES
from slipstream.load.random.model import open_random
from slipstream.runners.cpu.bindings import load
from slipstream.runners.torch.backend import TorchBackend

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("slipstream/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
MAX_README_LINES = 120
SERVE_VARIABLES = {"MODEL", "DRAFT", "PORT", "ARGS"}
README = (ROOT / "README.md").read_text()


def headings(text: str) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    for link in LINK.findall(CODE.sub("", path.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in headings(target.read_text()), f"{link}: no such heading"


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= MAX_README_LINES


def test_readme_calls_make_with_variables_that_it_passes_on() -> None:
    used = set(re.findall(r"\b([A-Z]+)=", "\n".join(re.findall(r"^make serve.*$", README, re.MULTILINE))))
    assert used <= SERVE_VARIABLES


def test_make_serve_passes_each_variable_on() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "slipstream serve $(SERVE)" in makefile
    passed_on = re.search(r"^SERVE := (.*)$", makefile, re.MULTILINE)
    assert passed_on is not None
    for name in SERVE_VARIABLES:
        assert f"$({name})" in passed_on[1], f"make serve {name}=... has no effect"


def test_every_log_entry_has_a_number_of_its_own() -> None:
    """In its section's table and in the text below it, from 1 on without gaps."""
    text = (ROOT / "docs" / "LOG.md").read_text()
    in_tables = sorted(int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE))
    in_text = sorted(int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE))
    assert in_tables == in_text == list(range(1, len(in_text) + 1))


def test_every_file_of_the_package_is_installed() -> None:
    """Page, kernels, head: what is not Python is named by a pattern in pyproject.toml."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["slipstream"]
    package = ROOT / "slipstream"
    installed = {package / path for pattern in patterns for path in glob(pattern, root_dir=package, recursive=True)}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert not files - installed
    assert {".c", ".h", ".js", ".html", ".safetensors"} <= {path.suffix for path in files}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@pytest.mark.parametrize("where", ["file", "CPU with AVX2 or AVX-512", "CUDA"])
def test_bits_of_a_weight_in_memory(where: str) -> None:
    """The table of docs/models.md, against blocks in files and what plans count for a large matrix."""
    pytest.importorskip("triton")
    if where.startswith("CPU") and not getattr(load(), "isa", "").startswith("avx"):
        pytest.skip("kernels for AVX2 or AVX-512")
    shape, spec = (4096, 4096), open_random("tiny").spec
    form = TorchBackend(RunnerConfig(device="cuda" if where == "CUDA" else "cpu"), present=False).platform(spec).form
    text = (ROOT / "docs" / "models.md").read_text()
    names, _, *rows = (cells(line) for line in re.findall(r"^  (\|.*)$", text, re.MULTILINE))
    [found] = [row[1:] for row in rows if row[0] == where]
    for types, bits in zip(names[1:], found, strict=True):
        for name, given in zip(types.split(", "), cycle(bits.split(", "))):
            block = BLOCK_TYPES[name]
            in_file = block.num_bytes * math.prod(shape) // block.columns
            num_bytes = in_file if where == "file" else form.stored_bytes(name, shape)
            rounded = 0.1 if where.startswith("CPU") else 0.006
            assert float(given) == pytest.approx(8 * num_bytes / math.prod(shape), abs=rounded), name
