"""Completion in real shells, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.cli import build_parser, main
from slipstream.commands.completion import SHELLS, completion_script
from slipstream.commands.parsers import arguments, commands

PARSER = build_parser()


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def completed(line: str) -> list[str]:
    """What bash offers for the last word of a line."""
    script = (
        f"{completion_script(PARSER, 'bash')}\n"
        'read -ra COMP_WORDS <<<"$1"\n[[ $1 == *" " ]] && COMP_WORDS+=("")\n'
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n_slipstream\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run([shell("bash"), "-c", script, "bash", line], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_commands() -> None:
    assert {"serve", "generate", "chat", "bench", "completion"} <= set(completed("slipstream "))
    assert completed("slipstream sel") == ["selfcheck"]
    assert {"streams", "step", "prompts"} <= set(completed("slipstream bench "))
    assert completed("slipstream completion z") == ["zsh"]


def test_flags_are_those_of_the_command() -> None:
    assert completed("slipstream serve --po") == ["--port"]
    assert completed("slipstream plan --po") == []
    assert completed("slipstream bench streams --simulate") == ["--simulate-acceptance"]
    assert completed("slipstream serve model --draft-") == ["--draft-vocab"]
    offered = set(completed("slipstream serve --"))
    for action in arguments(dict(commands(PARSER))[("serve",)]):
        assert set(action.option_strings) <= offered


def test_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.gguf").touch()
    assert completed("slipstream serve --dtype int") == ["int8", "int4"]
    assert completed("slipstream serve --draft ") == ["off", "solo", "adaptive"]
    assert completed("slipstream serve --port ") == []
    assert completed("slipstream serve so") == ["some.gguf"]
    assert completed("slipstream serve --config ") == ["some.gguf"]


@pytest.mark.parametrize("name", SHELLS)
def test_each_shell_reads_its_script(name: str) -> None:
    script = completion_script(PARSER, name)
    done = subprocess.run([shell(name), "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", SHELLS)
def test_every_flag_of_every_command_is_in_every_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", name]) == 0
    script = capsys.readouterr().out
    dashes = "-l " if name == "fish" else "--"
    for _, parser in commands(PARSER):
        for action in arguments(parser):
            for flag in action.option_strings:
                assert dashes + flag.removeprefix("--") in script
    assert script.count("'") % 2 == 0
