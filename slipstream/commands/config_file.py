"""slipstream.toml: flags by name, for all commands or in a section for one."""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from slipstream.commands.parsers import Path, arguments, commands, names, subcommands
from slipstream.errors import ConfigError

DEFAULT = "slipstream.toml"


@dataclass(frozen=True, slots=True)
class Entry:
    name: str  # with hyphens
    value: Any
    where: str  # for messages


@dataclass(frozen=True, slots=True)
class ConfigFile:
    name: str
    text: str
    table: dict[str, Any]

    def entries(self, path: Path) -> Iterator[Entry]:
        """What it says for a command: first what is for all of them, then its own sections."""
        table = self.table
        for depth in range(len(path) + 1):
            for key, value in table.items():
                if not isinstance(value, dict):
                    yield Entry(key.replace("_", "-"), value, self._where(path[:depth], key))
            section = table.get(path[depth]) if depth < len(path) else None
            table = section if isinstance(section, dict) else {}

    def check_names(self, parser: argparse.ArgumentParser) -> None:
        """Raises ConfigError for a key that no flag has, and for a section that is no command."""
        self._check(parser, self.table, ())

    def _check(self, parser: argparse.ArgumentParser, table: dict[str, Any], path: Path) -> None:
        below = subcommands(parser)
        known = {name for _, each in commands(parser) for action in arguments(each) for name in names(action)}
        known -= {"config", "print-config"}
        for key, value in table.items():
            if key in below and isinstance(value, dict):
                self._check(below[key], value, (*path, key))
            elif isinstance(value, dict):
                raise ConfigError(f"{self._where(path, key, section=True)} is no command{meant(key, below)}")
            elif key.replace("_", "-") not in known:
                of = f" of {' '.join(path)}" if path else ""
                raise ConfigError(f"{self._where(path, key)} is no setting{of}{meant(key.replace('_', '-'), known)}")

    def _where(self, path: Path, key: str, *, section: bool = False) -> str:
        """The file, the line if it is found, and the key."""
        wanted = ".".join((*path, key)) if section else ".".join(path)
        current = ""
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*\[\s*([^\]]+?)\s*\]", line):
                current = re.sub(r"[\s\"']", "", header[1])
                if section and current == wanted:
                    return f"{self.name}, line {number}: [{wanted}]"
            elif not section and current == wanted and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
                return f"{self.name}, line {number}: {key}"
        return f"{self.name}: {key}"


def open_config(chosen: str | None) -> ConfigFile | None:
    """``chosen``: None: the file of the working folder, if there is one; "": none."""
    if chosen == "" or (chosen is None and not FilePath(DEFAULT).is_file()):
        return None
    path = FilePath(chosen or DEFAULT).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        return ConfigFile(path.name, text, tomllib.loads(text))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the settings in {path} cannot be read: {why}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path.name} is not TOML: {error}") from error


def meant(word: str, known: Iterable[str]) -> str:
    """For the end of a message: the known word that is most like it."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; is {close[0]} meant?" if close else ""
