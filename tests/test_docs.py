"""The documents: their links lead somewhere, the README stays short, and its commands are those of the Makefile."""

from __future__ import annotations

import re
import tomllib
from glob import glob
from pathlib import Path

import pytest

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
