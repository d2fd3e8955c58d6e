"""What a parser of the command line offers, read back from it: for settings in files, completion and the documents."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

Path = tuple[str, ...]  # ("serve",), ("bench", "streams")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def summaries(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The line of help of each subcommand."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {each.dest: each.help or "" for action in actions for each in action._choices_actions}


def commands(parser: argparse.ArgumentParser, path: Path = ()) -> Iterator[tuple[Path, argparse.ArgumentParser]]:
    """Every command that can be run, with the words that call it."""
    below = subcommands(parser)
    if not below:
        yield path, parser
    for name, each in below.items():
        yield from commands(each, (*path, name))


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Flags and positionals, without those that only print and leave."""
    leaving = (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction)
    return [action for action in parser._actions if not isinstance(action, leaving)]


def names(action: argparse.Action) -> list[str]:
    """As a file spells it: without dashes in front, the usual one first."""
    return [flag.removeprefix("--") for flag in action.option_strings if flag.startswith("--")] or [action.dest]


def is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0


def is_list(action: argparse.Action) -> bool:
    """May be given several times."""
    return isinstance(action, argparse._AppendAction)
