"""The unit for systemd: read by systemd's own tools, and its command by our own."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.cli import build_parser, server_config
from slipstream.commands.configuration import parse
from slipstream.server.http.lifecycle import CLOSE_SECONDS
from slipstream.server.service.settings import ServerConfig

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "systemd"
UNIT = FOLDER / "slipstream.service"
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
MOST_EXPOSED = 2.0  # on systemd's scale from 0 to 10


def settings() -> dict[str, str]:
    """The last value of each key."""
    return dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))


def environment() -> dict[str, str]:
    """Of the example file, with what it only suggests."""
    return dict(re.findall(r"^#?(\w+)=(.*)$", (FOLDER / "slipstream.env").read_text(), re.MULTILINE))


def config(monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    _, *arguments = settings()["ExecStart"].split()
    return server_config(parse(build_parser(), arguments))


def test_our_command_line_takes_its_command_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    found = config(monkeypatch)
    assert found.api_keys == ("change-me",)
    args = parse(build_parser(), settings()["ExecStart"].split()[1:])
    read = {"SLIPSTREAM_" + name.upper(): str(value) for name, value in vars(args).items()}
    read["SLIPSTREAM_API_KEY"] = args.api_key[0]
    assert environment().items() <= read.items(), "a variable that no flag has"


def test_it_is_stopped_after_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert int(settings()["TimeoutStopSec"]) >= config(monkeypatch).drain_seconds + CLOSE_SECONDS + 5
    assert settings()["KillMode"] == "mixed", "SIGTERM would end the processes that the last requests need"


def test_caches_are_in_the_folder_that_may_be_written() -> None:
    caches = dict(word.split("=") for word in settings()["Environment"].split())
    assert caches["XDG_CACHE_HOME"] == "%C", "our folder in it is named as the unit's"
    writable = f"%C/{settings()['CacheDirectory']}"
    assert settings()["CacheDirectory"] == "slipstream"
    assert all(caches[name].startswith(f"{writable}/") for name in ("HF_HOME", "TRITON_CACHE_DIR"))


@needs_systemd
def test_systemd_reads_it(tmp_path: Path) -> None:
    """Its command need not be installed here: another stands for it."""
    assert ANALYZE is not None
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/slipstream/bin/slipstream", "/bin/true"))
    verified = subprocess.run([ANALYZE, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")


@needs_systemd
def test_it_is_as_closed_as_it_says(tmp_path: Path) -> None:
    assert ANALYZE is not None
    command = [ANALYZE, "security", "--offline=yes", f"--threshold={round(MOST_EXPOSED * 10)}", str(UNIT)]
    seen = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in seen.stderr:
        pytest.skip("this systemd-analyze does not judge files")
    assert seen.returncode == 0, seen.stdout
