"""`slipstream completion`: scripts for bash, zsh and fish, made from the parser: a new flag is in them by itself."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from slipstream.commands.arguments import draft_setting
from slipstream.commands.parsers import Path, arguments, commands, is_switch, subcommands, summaries

SHELLS = ("bash", "zsh", "fish")
FILES = ("PATH", "FILE", "FOLDER", "SVG", "MODEL")  # values that are looked for on the disk


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](parser)


def _flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in arguments(parser) if action.option_strings]


def _positional(parser: argparse.ArgumentParser) -> argparse.Action | None:
    return next((action for action in arguments(parser) if not action.option_strings), None)


def _values(action: argparse.Action) -> Sequence[str]:
    """The words that it may be, where they are few."""
    if action.choices is not None:
        return list(action.choices)
    return ("off", "solo", "adaptive") if action.type is draft_setting else ()


def _is_file(action: argparse.Action) -> bool:
    return action.metavar in FILES


def _meaning(action: argparse.Action) -> str:
    return re.sub(r" \(default:.*\)$", "", action.help or "")


def _groups(parser: argparse.ArgumentParser, path: Path = ()) -> dict[Path, argparse.ArgumentParser]:
    """The parsers that have subcommands."""
    below = subcommands(parser)
    found = {path: parser} if below else {}
    for name, each in below.items():
        found |= _groups(each, (*path, name))
    return found


# bash

_BASH = """\
_slipstream() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} command="" words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$command ${{COMP_WORDS[i]}}" in
            {paths}) command="${{command:+$command }}${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$command $prev" in
{values}
    esac
    case "$command" in
{words}
    esac
    [[ $cur == -* ]] || words=${{words//--*/}}
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ $cur != -* && -n $command && -z $words ]]; then
        compopt -o filenames 2>/dev/null
        COMPREPLY=($(compgen -f -- "$cur"))
    fi
}}
complete -F _slipstream slipstream"""


def _bash(parser: argparse.ArgumentParser) -> str:
    leaves, groups = dict(commands(parser)), _groups(parser)
    paths = "|".join(f'"{" ".join(path[:-1])} {path[-1]}"' for path in (*leaves, *groups) if path)
    values = [line for path, each in leaves.items() for action in _flags(each) for line in _bash_value(path, action)]
    words = [_bash_words(path, list(subcommands(each))) for path, each in groups.items()]
    for path, each in leaves.items():
        positional = _positional(each)
        named = [*(_values(positional) if positional is not None else ())]
        words.append(_bash_words(path, [*named, *(flag for action in _flags(each) for flag in action.option_strings)]))
    return _BASH.format(paths=paths, values="\n".join(values), words="\n".join(words))


def _bash_words(path: Path, words: Sequence[str]) -> str:
    return f'        "{" ".join(path)}") words="{" ".join([*words, "--help"])}" ;;'


def _bash_value(path: Path, action: argparse.Action) -> list[str]:
    if is_switch(action):
        return []
    patterns = "|".join(f'"{" ".join(path)} {flag}"' for flag in action.option_strings)
    if _is_file(action):
        does = 'compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$cur"))'
    else:
        does = f'COMPREPLY=($(compgen -W "{" ".join(_values(action))}" -- "$cur"))'
    return [f"        {patterns}) {does}; return ;;"]


# zsh


def _zsh(parser: argparse.ArgumentParser) -> str:
    parts = ["#compdef slipstream"]
    for path, each in commands(parser):
        specs = [_zsh_flag(action) for action in _flags(each)]
        positional = _positional(each)
        if positional is not None:
            specs.append(_quoted(f"1:{positional.metavar or positional.dest}:{_zsh_value(positional)}"))
        lines = " \\\n        ".join([*specs, "'--help[show the flags]'"])
        parts.append(f"{_zsh_name(path)}() {{\n    _arguments \\\n        {lines}\n}}")
    parts += [_zsh_group(path, each) for path, each in reversed(_groups(parser).items())]
    parts.append('if [[ $funcstack[1] == _slipstream ]]; then\n    _slipstream "$@"')
    parts.append("else\n    compdef _slipstream slipstream\nfi")
    return "\n".join(parts)


def _zsh_name(path: Path) -> str:
    return "_".join(("_slipstream", *path))


def _zsh_group(path: Path, parser: argparse.ArgumentParser) -> str:
    about = summaries(parser)
    described = "\n        ".join(_quoted(f"{name}:{about[name]}") for name in subcommands(parser))
    cases = "\n        ".join(f"{name}) {_zsh_name((*path, name))} ;;" for name in subcommands(parser))
    return (
        f"{_zsh_name(path)}() {{\n"
        f"    local -a commands=(\n        {described}\n    )\n"
        "    if (( CURRENT == 2 )); then\n        _describe command commands\n        return\n    fi\n"
        "    shift words\n    (( CURRENT-- ))\n"
        f"    case $words[1] in\n        {cases}\n    esac\n}}"
    )


def _zsh_flag(action: argparse.Action) -> str:
    meaning = re.sub(r"([\[\]:\\])", r"\\\1", _meaning(action))
    value = "" if is_switch(action) else f":{action.metavar or action.dest}:{_zsh_value(action)}"
    return " ".join(_quoted(f"*{flag}[{meaning}]{value}") for flag in action.option_strings)


def _zsh_value(action: argparse.Action) -> str:
    if words := _values(action):
        return f"({' '.join(words)})"
    return "_files" if _is_file(action) else ""


# fish


def _fish(parser: argparse.ArgumentParser) -> str:
    lines = ["complete -c slipstream -f"]
    for path, each in _groups(parser).items():
        here = _fish_inside(path) if path else "__fish_use_subcommand"
        if path:
            here += f"; and not __fish_seen_subcommand_from {' '.join(subcommands(each))}"
        for name, about in summaries(each).items():
            lines.append(f"complete -c slipstream -n {_quoted(here)} -a {name} -d {_quoted(about)}")
    for path, each in commands(parser):
        condition = _quoted(_fish_inside(path))
        lines += [f"complete -c slipstream -n {condition} {_fish_flag(action)}" for action in _flags(each)]
        positional = _positional(each)
        if positional is not None:
            offered = f"-a {_quoted(' '.join(words))}" if (words := _values(positional)) else "-F"
            lines.append(f"complete -c slipstream -n {condition} {offered}")
    return "\n".join(lines)


def _fish_inside(path: Path) -> str:
    return "; and ".join(f"__fish_seen_subcommand_from {name}" for name in path)


def _fish_flag(action: argparse.Action) -> str:
    spellings = " ".join(f"-l {flag.removeprefix('--')}" for flag in action.option_strings)
    value = "" if is_switch(action) else " -r -F" if _is_file(action) else " -x"
    words = f" -a {_quoted(' '.join(_values(action)))}" if _values(action) else ""
    return f"{spellings}{value}{words} -d {_quoted(_meaning(action))}"


def _quoted(text: str) -> str:
    """For all three shells: a quote inside single quotes ends them, stands escaped, and begins them again."""
    return "'" + text.replace("'", "'\\''") + "'"
