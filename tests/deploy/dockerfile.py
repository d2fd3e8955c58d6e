"""Reads a Dockerfile and a .dockerignore: stages, their instructions, what the image is to run.

Only what ours uses: another instruction or flag is an error, so that nothing is left out in silence.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Instruction:
    name: str  # in capitals
    text: str  # what follows, lines joined

    @property
    def flags(self) -> dict[str, str]:
        """``--from=build``, and the like, in front of the rest."""
        return dict(word[2:].split("=", 1) for word in self._split()[0])

    @property
    def rest(self) -> str:
        return self._split()[1]

    def _split(self) -> tuple[list[str], str]:
        flags, rest = [], self.text
        while found := re.match(r"(--\S+)\s+", rest):
            flags.append(found[1])
            rest = rest[found.end() :]
        return flags, rest


@dataclass(frozen=True)
class Stage:
    name: str
    base: str  # an image, or another stage
    instructions: tuple[Instruction, ...]


@dataclass
class Settings:
    """What an image or a stage says of the processes in it."""

    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)  # ARG: of the build only
    workdir: str = "/"
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    stop_signal: str = "SIGTERM"
    healthcheck: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def inherited(self) -> Settings:
        """For a stage that is built from this one."""
        lists = {name: list(getattr(self, name)) for name in ("volumes", "ports", "healthcheck", "entrypoint")}
        return Settings(dict(self.environment), {}, self.workdir, self.user, **lists, command=list(self.command))

    def expand(self, text: str) -> str:
        known = self.arguments | self.environment
        return VARIABLE.sub(lambda found: known.get(found[1] or found[2], ""), text)

    def apply(self, instruction: Instruction) -> None:
        """An instruction that sets something; RUN and COPY are for who has a root to work in."""
        value = self.expand(instruction.rest) if instruction.name not in ("ENTRYPOINT", "CMD", "HEALTHCHECK") else ""
        match instruction.name:
            case "ENV":
                pairs = dict(word.split("=", 1) for word in shlex.split(instruction.rest))
                self.environment |= {name: self.expand(each) for name, each in pairs.items()}
            case "ARG":
                name, _, default = value.partition("=")
                self.arguments.setdefault(name, default)
            case "WORKDIR":
                self.workdir = str(PurePosixPath(self.workdir) / value)
            case "USER":
                self.user = value
            case "VOLUME":
                self.volumes += value.split()
            case "EXPOSE":
                self.ports += [int(port) for port in value.split()]
            case "STOPSIGNAL":
                self.stop_signal = value
            case "HEALTHCHECK":
                self.healthcheck = exec_form(instruction.rest.removeprefix("CMD "))
            case "ENTRYPOINT":
                self.entrypoint = exec_form(instruction.rest)
            case "CMD":
                self.command = exec_form(instruction.rest)
            case other:
                raise ValueError(f"unknown instruction {other}")


@dataclass(frozen=True)
class Dockerfile:
    arguments: dict[str, str]  # before the first stage
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        [found] = [stage for stage in self.stages if stage.name == name]
        return found

    def settings(self, name: str) -> Settings:
        """Of the finished target, without running anything."""
        names = {stage.name for stage in self.stages}
        stage = self.stage(name)
        settings = self.settings(stage.base).inherited() if stage.base in names else Settings()
        for instruction in stage.instructions:
            if instruction.name not in ("RUN", "COPY"):
                settings.apply(instruction)
        return settings


def exec_form(text: str) -> list[str]:
    """A list of words: the shell form would put a shell between us and the signals."""
    words = json.loads(text)
    assert isinstance(words, list)
    assert all(isinstance(word, str) for word in words)
    return words


def instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    split = [line.strip().partition(" ") for line in joined.splitlines()]
    return [Instruction(name.upper(), rest.strip()) for name, _, rest in split]


def parse(text: str) -> Dockerfile:
    before = Settings()
    stages: list[Stage] = []
    for instruction in instructions(text):
        if instruction.name == "FROM":
            base, word, name = before.expand(instruction.text).split()
            assert word.upper() == "AS", "every stage has a name"
            stages.append(Stage(name, base, ()))
        elif not stages:
            before.apply(instruction)
        else:
            last = stages.pop()
            stages.append(Stage(last.name, last.base, (*last.instructions, instruction)))
    return Dockerfile(before.arguments, tuple(stages))


@dataclass(frozen=True)
class Ignored:
    """A .dockerignore: the last pattern that fits a path, or a folder above it, counts."""

    patterns: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Ignored:
        lines = [line.strip() for line in path.read_text().splitlines()]
        return cls(tuple(line for line in lines if line and not line.startswith("#")))

    def __contains__(self, path: str) -> bool:
        ignored = False
        above = [str(each) for each in (PurePosixPath(path), *PurePosixPath(path).parents) if str(each) != "."]
        for pattern in self.patterns:
            if any(_fits(each, pattern.removeprefix("!")) for each in above):
                ignored = not pattern.startswith("!")
        return ignored


def _fits(path: str, pattern: str) -> bool:
    parts, wanted = path.split("/"), pattern.split("/")
    if wanted[0] == "**":  # at any depth
        parts, wanted = parts[-len(wanted[1:]) :], wanted[1:]
    return len(parts) == len(wanted) and all(fnmatchcase(part, each) for part, each in zip(parts, wanted))
