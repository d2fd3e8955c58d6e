"""The Dockerfile as text: what it copies and runs is there, and what it starts is our own command line."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from dockerfile import Dockerfile, Ignored, Settings, instructions, parse

from slipstream.cli import build_parser, server_config
from slipstream.commands import configuration
from slipstream.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "Dockerfile").read_text()
TARGETS = ("cpu", "cuda")

SMALL = r"""
# a comment
ARG BASE=debian:12
FROM ${BASE} AS one
ENV A=1 \
    PATH=/opt/bin:$PATH B="two words"
ARG WHICH
RUN first \
    && second $WHICH
WORKDIR /a
WORKDIR b
FROM one AS two
COPY --from=one /x /y
USER 5:6
HEALTHCHECK --interval=15s CMD ["ask", "it"]
ENTRYPOINT ["run", "$A"]
"""


@pytest.fixture(scope="module")
def ours() -> Dockerfile:
    return parse(TEXT)


def test_the_reader() -> None:
    small = parse(SMALL)
    assert [(stage.name, stage.base) for stage in small.stages] == [("one", "debian:12"), ("two", "one")]
    run = small.stage("one").instructions[2]
    assert (run.name, run.rest) == ("RUN", "first  && second $WHICH")
    copy = small.stage("two").instructions[0]
    assert (copy.flags, copy.rest) == ({"from": "one"}, "/x /y")
    two = small.settings("two")
    assert two.environment == {"A": "1", "PATH": "/opt/bin:", "B": "two words"}
    assert (two.user, two.workdir) == ("5:6", "/a/b")
    assert (two.healthcheck, two.entrypoint) == (["ask", "it"], ["run", "$A"])
    with pytest.raises(ValueError, match="ONBUILD"):
        parse("FROM x AS y\nONBUILD RUN z").settings("y")


def test_what_is_ignored() -> None:
    rules = Ignored(("*", "!kept", "!file.py", "**/__pycache__"))
    assert [path for path in ("other", "kept/a", "file.py", "kept/b/__pycache__/c.pyc", "x/kept") if path in rules] == [
        "other",
        "kept/b/__pycache__/c.pyc",
        "x/kept",
    ]


def test_the_last_target_is_for_a_cpu(ours: Dockerfile) -> None:
    assert ours.stages[-1].name == "cpu"
    assert set(TARGETS) < {stage.name for stage in ours.stages}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_our_command_as_somebody(ours: Dockerfile, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = ours.settings(target)
    uid, gid = image.user.split(":")
    assert int(uid) > 0 < int(gid), "a number, so that Kubernetes can tell that it is not root"
    assert (image.entrypoint, image.command) == (["slipstream", "serve"], [])
    assert signal.Signals[image.stop_signal] == signal.SIGTERM
    for name, value in image.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="API key"):
        server_config(configuration.parse(build_parser(), image.entrypoint[1:]))
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "k")
    config = server_config(configuration.parse(build_parser(), image.entrypoint[1:]))
    assert (config.host, [config.port], config.api_keys) == ("0.0.0.0", image.ports, ("k",))


@pytest.mark.parametrize("target", TARGETS)
def test_every_cache_is_in_the_volume(ours: Dockerfile, target: str) -> None:
    image = ours.settings(target)
    [volume] = image.volumes
    caches = {name: image.environment[name] for name in ("XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR")}
    assert all(f"{path}/".startswith(f"{volume}/") for path in caches.values())


def sources(settings: Settings, text: str) -> list[str]:
    return settings.expand(text).split()[:-1]


def test_what_is_copied_is_there_and_not_ignored(ours: Dockerfile) -> None:
    ignored = Ignored.read(ROOT / ".dockerignore")
    copied = {
        name
        for stage in ours.stages
        for each in stage.instructions
        if each.name == "COPY" and "from" not in each.flags
        for name in sources(Settings(), each.rest)
    }
    assert {"slipstream", "pyproject.toml", "constraints.txt"} <= copied
    assert all((ROOT / name).exists() and name not in ignored for name in copied)
    kept = {path.name for path in ROOT.iterdir() if path.name not in ignored}
    assert kept == copied, "what is sent to the builder is what is copied"
    assert "slipstream/server/__pycache__/x.pyc" in ignored


def test_every_target_installs_the_pinned_torch() -> None:
    installs = [each.text for each in instructions(TEXT) if each.name == "RUN" and "pip install" in each.text]
    assert len(installs) == 4
    assert all("--constraint constraints.txt" in text for text in installs)
    assert not re.search(r"torch\d*[=<>]", TEXT), "the version is in constraints.txt alone"
