"""A command's settings from four places: the command line, the environment, slipstream.toml, the defaults.

In this order: the first that has one counts. docs/configuration.md describes them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.commands.config_file import ConfigFile, meant, open_config
from slipstream.commands.parsers import Path, arguments, commands, is_list, is_switch, names
from slipstream.errors import ConfigError

PREFIX = "SLIPSTREAM_"
ABOUT_SETTINGS = ("config", "print_config")  # not settings themselves
SECRETS = ("api_key",)
WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Setting:
    value: Any
    source: str


Settings = dict[str, Setting]  # by the parser's dest


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """As parser.parse_args, with the settings of environment and file in place of defaults."""
    defaults = _take_defaults(parser)
    given, extra = parser.parse_known_args(argv)
    path = tuple(getattr(given, name) for name in ("command", "what") if hasattr(given, name))
    own = dict(commands(parser))[path]
    if extra:
        _refuse(own, path, extra)
    settings = _settings(parser, path, vars(given), os.environ, defaults[path])
    if getattr(given, "print_config", False):
        _print(settings)
        raise SystemExit(0)
    for name, setting in settings.items():
        setattr(given, name, setting.value)
    return given


def from_values(parser: argparse.ArgumentParser, path: Path, values: Mapping[str, Any]) -> argparse.Namespace:
    """For programs that have settings by name: values as in slipstream.toml, or texts as in the environment.

    Settings that are not among them come from environment, file and defaults.
    """
    defaults = _take_defaults(parser)[path]
    by_name = {name: action for action in settable(dict(commands(parser))[path]) for name in names(action)}
    given: dict[str, Any] = {}
    for key, value in values.items():
        action = by_name.get(key.replace("_", "-"))
        if action is None:
            raise ConfigError(f"{key} is no setting of {' '.join(path)}{meant(key.replace('_', '-'), by_name)}")
        converted = (_from_text if isinstance(value, str) else _from_toml)(action, value, key)
        if converted is not None:
            given[action.dest] = converted
    settings = _settings(parser, path, given, os.environ, defaults)
    return argparse.Namespace(**{name: setting.value for name, setting in settings.items()})


def variable(action: argparse.Action) -> str:
    """The environment variable of a flag."""
    return PREFIX + names(action)[0].upper().replace("-", "_")


def settable(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in arguments(parser) if action.dest not in ABOUT_SETTINGS]


def _take_defaults(parser: argparse.ArgumentParser) -> dict[Path, dict[str, Any]]:
    """Each command's defaults, taken out of its parser: what a namespace has afterwards was given."""
    taken: dict[Path, dict[str, Any]] = {}
    for path, each in commands(parser):
        taken[path] = {}
        for action in arguments(each):
            taken[path].setdefault(action.dest, action.default)
            action.default = argparse.SUPPRESS
    return taken


def _refuse(own: argparse.ArgumentParser, path: Path, extra: Sequence[str]) -> None:
    if path == ("serve",) and not any(word.startswith("-") for word in extra):
        raise ConfigError(
            "one server serves one model; for several behind one port put llama-swap in front, which starts them "
            "by name: docs/several-models.md has its configuration"
        )
    own.error(f"unrecognized arguments: {' '.join(extra)}")


def _settings(
    parser: argparse.ArgumentParser,
    path: Path,
    given: Mapping[str, Any],
    environment: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> Settings:
    own = settable(dict(commands(parser))[path])
    chosen = given.get("config", environment.get(f"{PREFIX}CONFIG"))
    file = open_config(chosen)
    settings = {name: Setting(value, "default") for name, value in defaults.items()}
    if file is not None:
        file.check_names(parser)
        settings |= _from_file(file, path, own)
    settings |= _from_environment(environment, own)
    return settings | {name: Setting(given[name], "command line") for name in settings if name in given}


def _from_environment(environment: Mapping[str, str], own: Sequence[argparse.Action]) -> Settings:
    found: Settings = {}
    for action in own:
        name = variable(action)
        if text := environment.get(name):
            value = _from_text(action, text, name)
            if value is not None:
                found[action.dest] = Setting(value, name)
    return found


def _from_text(action: argparse.Action, text: str, where: str) -> Any:
    if is_switch(action):
        if text.lower() not in WORDS:
            raise ConfigError(f"{where} must be true or false, not {text!r}")
        return _switched(action, WORDS[text.lower()])
    if is_list(action):
        parts = text.split(",") if action.metavar in ("NAME", "ORIGIN") else [text]  # texts and keys have commas
        return [_converted(action, part.strip(), where) for part in parts]
    return _converted(action, text, where)


def _from_file(file: ConfigFile, path: Path, own: Sequence[argparse.Action]) -> Settings:
    by_name = {name: action for action in own for name in names(action)}
    found: Settings = {}
    for entry in file.entries(path):
        action = by_name.get(entry.name)
        if action is not None:
            value = _from_toml(action, entry.value, entry.where)
            if value is not None:
                found[action.dest] = Setting(value, file.name)
    return found


def _from_toml(action: argparse.Action, value: Any, where: str) -> Any:
    if is_switch(action):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} must be true or false, not {value!r}")
        return _switched(action, value)
    if is_list(action):
        return [_scalar(action, each, where) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) and action.type not in (None, int, float):  # numbers with commas between
        value = ",".join(map(str, value))
    return _scalar(action, value, where)


def _scalar(action: argparse.Action, value: Any, where: str) -> Any:
    kinds: dict[Any, tuple[type, ...]] = {None: (str,), int: (int,), float: (int, float)}
    if isinstance(value, bool) or not isinstance(value, kinds.get(action.type, (str, int, float))):
        raise ConfigError(f"{where} must be {_kind(action)}, not {value!r}")
    return _converted(action, str(value), where)


def _converted(action: argparse.Action, text: str, where: str) -> Any:
    try:
        value = action.type(text) if callable(action.type) else text
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{where} must be {_kind(action)}, not {text!r}") from error
    if action.choices is not None and value not in action.choices:
        raise ConfigError(f"{where} must be one of {', '.join(action.choices)}, not {text!r}")
    return value


def _kind(action: argparse.Action) -> str:
    kinds: dict[Any, str] = {None: "text", int: "a whole number", float: "a number"}
    return kinds.get(action.type, "text or a number")


def _switched(action: argparse.Action, on: bool) -> Any:
    """None: a switch that is off and leaves things as they are."""
    if isinstance(action, argparse._StoreTrueAction):
        return on
    return action.const if on else None


def _print(settings: Settings) -> None:
    width = max(map(len, settings)) + 2
    for name, setting in settings.items():
        value = "(set)" if name in SECRETS and setting.value else _shown(setting.value)
        print(f"{name.replace('_', '-'):<{width}}{value:<24}  {setting.source}")


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return ",".join(map(str, value)) or "-" if isinstance(value, (list, tuple)) else str(value)
