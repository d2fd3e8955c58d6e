"""A Dockerfile without Docker: its instructions run in a fresh Debian root, and what it starts runs there as there.

The official Python image cannot be had this way: Debian's own Python of the same version, with venv, stands for it.
The roots see this machine's name servers and pip's settings, with the folders that those name, in mounts that no root
keeps. Needs the rights of root, for chroot; every process has mounts and process ids of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.error import URLError

from dockerfile import Dockerfile, Ignored, Instruction, Settings

SUITE = "bookworm"
STANDS_FOR = "python:3.11-slim-bookworm"
PACKAGES = "python3,python3-venv"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RESOLVER = ("/etc/resolv.conf", "/etc/hosts")
PROXIES = ("http_proxy", "https_proxy", "no_proxy")
NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]


def debian_mirror(folder: Path = Path("/etc/apt")) -> str | None:
    """Where this machine has Debian's packages from."""
    files = [folder / "sources.list", *folder.glob("sources.list.d/*.sources"), *folder.glob("sources.list.d/*.list")]
    text = "\n".join(path.read_text() for path in files if path.exists())
    found = re.search(r"^(?:URIs:|deb(?: \[.*?\])?)\s+(https?://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
    return found[1] if found else None


def why_not() -> str:
    """Why no root can be made here; empty if one can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a fresh root needs the rights of root"
    for program in ("debootstrap", "unshare", "chroot"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode:
        return "this machine allows no mounts of one's own"
    mirror = debian_mirror()
    if mirror is None:
        return "no Debian mirror in /etc/apt"
    try:
        urllib.request.urlopen(f"{mirror}/dists/{SUITE}/Release", timeout=60).close()
    except (URLError, TimeoutError) as error:
        return f"{mirror} cannot be reached: {error}"
    return ""


def debootstrap(root: Path) -> None:
    """What stands for the image that the Dockerfile begins with."""
    mirror = debian_mirror()
    assert mirror is not None
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), mirror]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def pip_settings() -> dict[str, str]:
    """Those of this machine, from files and environment: its index, its certificates, its folders of wheels."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = re.findall(r"^\S+?\.([\w-]+)='(.*)'$", listed.stdout, re.MULTILINE)
    return {name: value.replace("\\n", " ") for name, value in found}


def folders(settings: Mapping[str, str]) -> list[str]:
    """Paths of this machine that pip's settings name. The pages of a local index lead to files beside it."""
    words = [word for value in settings.values() for word in value.split()]
    paths = [str(Path(word[7:]).parent) if word.startswith("file://") else word for word in words]
    return sorted({path for path in paths if path.startswith("/") and Path(path).exists()})


@dataclass(frozen=True)
class Mounts:
    """What a process in a root sees besides it: ``given`` read only, ``volumes`` not, both as {inside: outside}."""

    given: Mapping[str, str]
    volumes: Mapping[str, str]
    read_only: bool = False  # the root itself, as Kubernetes' readOnlyRootFilesystem

    def script(self, root: Path) -> str:
        inside = shlex.quote(str(root))
        lines = [f"mount --bind {inside} {inside}", f"mount -t proc proc {inside}/proc"]
        lines += [f"mount --rbind /dev {inside}/dev"]
        for target, source in (*self.given.items(), *self.volumes.items()):
            at = shlex.quote(f"{root}{target}")
            make = f"mkdir -p {at}" if Path(source).is_dir() else f"mkdir -p $(dirname {at}) && touch {at}"
            lines += [make, f"mount --bind {shlex.quote(source)} {at}"]
            lines += [f"mount -o remount,bind,ro {at}"] if target in self.given else []
        if self.read_only:
            lines += [f"mount -t tmpfs -o nosuid,nodev,noexec tmpfs {inside}/tmp", f"mount -o remount,bind,ro {inside}"]
        return " && ".join(lines)


def command_in(root: Path, settings: Settings, mounts: Mounts, words: Sequence[str]) -> list[str]:
    """The command line that runs ``words`` in a root, as the first process there."""
    environment = [f"{name}={value}" for name, value in settings.environment.items()]
    enter = ["chroot", f"--userspec={settings.user}", str(root), "env", "-i", *environment]
    enter += ["sh", "-c", 'cd "$0" && exec "$@"', settings.workdir, *words]
    script = f'{mounts.script(root)} && exec "$@"'
    return [*NAMESPACES, "sh", "-c", script, "sh", *enter]


@dataclass(frozen=True)
class Image:
    root: Path
    settings: Settings
    given: Mapping[str, str]

    def command(self, words: Sequence[str], environment: Mapping[str, str], volumes: Mapping[str, str]) -> list[str]:
        """As `docker run --read-only -e ... -v ...` would run it."""
        assert set(volumes) == set(self.settings.volumes)
        settings = replace(self.settings, environment={**self.settings.environment, **environment})
        return command_in(self.root, settings, Mounts(self.given, volumes, read_only=True), words)


class Builder:
    """Each stage is a folder; a stage that begins with another one begins with a copy of its folder."""

    def __init__(self, dockerfile: Dockerfile, context: Path, folder: Path) -> None:
        self._dockerfile, self._context, self._folder = dockerfile, context, folder
        self._ignored = Ignored.read(context / ".dockerignore")
        self._built: dict[str, Image] = {}
        settings = pip_settings()
        config = folder / "pip.conf"
        config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
        self._given = {path: path for path in (*RESOLVER, *folders(settings))} | {"/etc/pip.conf": str(config)}

    def build(self, target: str) -> Image:
        if target not in self._built:
            self._built[target] = self._stage(target) if target != STANDS_FOR else self._base()
        return self._built[target]

    def _base(self) -> Image:
        root = self._folder / "base-image"
        debootstrap(root)
        proxies = {name: os.environ[name] for name in PROXIES if name in os.environ}
        return Image(root, Settings(environment={"PATH": PATH, **proxies}), self._given)

    def _stage(self, name: str) -> Image:
        stage = self._dockerfile.stage(name)
        base = self.build(stage.base)
        root = self._folder / name
        subprocess.run(["cp", "-a", "--reflink=auto", str(base.root), str(root)], check=True)
        image = Image(root, base.settings.inherited(), self._given)
        for instruction in stage.instructions:
            match instruction.name:
                case "RUN":
                    self._run(image, instruction)
                case "COPY":
                    self._copy(image, instruction)
                case _:
                    image.settings.apply(instruction)
        return image

    def _run(self, image: Image, instruction: Instruction) -> None:
        assert not instruction.flags, "a flag of RUN that is not known here"
        settings = replace(image.settings, environment=image.settings.arguments | image.settings.environment)
        (image.root / settings.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mounts = Mounts(self._given, {})
        command = command_in(image.root, settings, mounts, ["sh", "-c", instruction.rest])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"RUN {instruction.rest}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"

    def _copy(self, image: Image, instruction: Instruction) -> None:
        assert set(instruction.flags) <= {"from"}, "a flag of COPY that is not known here"
        *sources, target = image.settings.expand(instruction.rest).split()
        into = image.root / str(Path(image.settings.workdir) / target).lstrip("/")
        is_folder = target.endswith("/") or len(sources) > 1
        other = instruction.flags.get("from")
        for source in sources:
            start = self.build(other).root / source.lstrip("/") if other else self._context / source
            place = into / start.name if is_folder and start.is_file() else into
            place.parent.mkdir(parents=True, exist_ok=True)
            if start.is_file():
                shutil.copy(start, place)
            else:
                ignore = None if other else self._left_out
                shutil.copytree(start, place, symlinks=True, ignore=ignore, dirs_exist_ok=True)

    def _left_out(self, folder: str, names: list[str]) -> set[str]:
        above = Path(folder).relative_to(self._context)
        return {name for name in names if str(above / name) in self._ignored}
