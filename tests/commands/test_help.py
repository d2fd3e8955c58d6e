"""The help texts, and that the documents name every flag and every environment variable."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from slipstream.cli import build_parser
from slipstream.commands.configuration import PREFIX, settable, variable
from slipstream.commands.parsers import arguments, commands, is_switch

ROOT = Path(__file__).parents[2]
COMMANDS = dict(commands(build_parser()))
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
SERVER = (ROOT / "docs" / "server.md").read_text()


@pytest.mark.parametrize("parser", COMMANDS.values(), ids=[" ".join(path) for path in COMMANDS])
def test_every_flag_has_a_text_and_shows_its_default(parser: argparse.ArgumentParser) -> None:
    for action in arguments(parser):
        assert action.help, action.option_strings
        if action.option_strings:
            said = re.search(r"\(default:\s(.+)\)$", action.help)
            assert said, f"{action.option_strings}: its default is not said"
            if isinstance(action.default, (int, float, str)) and not is_switch(action) and action.dest != "max_body":
                assert said[1] == str(action.default)


@pytest.mark.parametrize("parser", COMMANDS.values(), ids=[" ".join(path) for path in COMMANDS])
def test_help_fits_80_columns(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, parser.format_help().splitlines())) <= 80
    assert "\xa0" not in parser.format_help()


def test_the_flags_of_serve_are_in_groups() -> None:
    titles = [line[:-1] for line in COMMANDS[("serve",)].format_help().splitlines() if re.fullmatch(r"[a-z ]+:", line)]
    assert titles[:4] == ["options", "model", "memory and batch", "drafting"]
    assert {"server", "access", "settings"} <= set(titles)


def rows(text: str, heading: str) -> str:
    """The table below a heading."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_table_of_flags_in_server_md_is_that_of_the_parser() -> None:
    """Of the server's own groups; those of the model are in configuration.md."""
    parser = COMMANDS[("serve",)]
    model = {"model", "memory and batch", "drafting", "settings", "options", "positional arguments"}
    groups = [group for group in parser._action_groups if group.title not in model]
    expected = {flag for group in groups for action in group._group_actions for flag in action.option_strings}
    described = set(re.findall(r"`(--[a-z-]+)", rows(SERVER, "Flags")))
    assert described == expected


def test_configuration_md_has_every_flag_with_its_variable() -> None:
    for path, parser in COMMANDS.items():
        if path[0] not in ("bench", "completion"):
            for action in settable(parser):
                name = action.option_strings[0] if action.option_strings else "MODEL"
                assert re.search(rf"^\| `{name}[ `].*`{variable(action)}`", CONFIGURATION, re.MULTILINE), name


def test_configuration_md_names_no_flag_that_is_not_there() -> None:
    flags = {flag for parser in COMMANDS.values() for action in arguments(parser) for flag in action.option_strings}
    assert set(re.findall(r"^\| `(--[a-z0-9-]+)", CONFIGURATION, re.MULTILINE)) <= flags


def test_every_variable_that_the_code_reads_is_documented() -> None:
    """Also those of others, such as XDG_CACHE_HOME."""
    reads = re.compile(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"|VARIABLE = \"([A-Z_]+)\"")
    read = set()
    for path in (ROOT / "slipstream").rglob("*.py"):
        read |= {first or second for first, second in reads.findall(path.read_text())}
    assert {"SLIPSTREAM_CACHE", "SLIPSTREAM_CPU_ISA", "XDG_CACHE_HOME"} <= read
    for name in {*read, f"{PREFIX}CONFIG"}:
        assert f"| `{name}` |" in CONFIGURATION, name
