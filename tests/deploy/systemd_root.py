"""systemd as the first process of a fresh root, with our unit in it as docs/deploy.md installs it.

It sees no devices but the harmless ones, and of the control groups only systemd's own hierarchy, below a new group.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from types import TracebackType

from dockerfile import Settings
from fake_server import until
from fresh_root import PATH, Image, Mounts, command_in

GROUPS = Path("/sys/fs/cgroup/systemd")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# Of no use without hardware, a network of its own or somebody to log in.
MASKED = ("systemd-udevd.service", "systemd-logind.service", "systemd-tmpfiles-setup-dev.service", "getty@tty1.service")
UNITS = "etc/systemd/system"
INSTALL = "apt-get update -qq && apt-get install --yes -qq --no-install-recommends systemd dbus && userdel slipstream"


def why_not() -> str:
    return "" if os.access(GROUPS / "cgroup.procs", os.W_OK) else "no control group that systemd could have"


class Systemd:
    """``folder``: deploy/systemd. The unit is started as at the start of a machine."""

    def __init__(self, image: Image, folder: Path, **environment: str) -> None:
        self._root = image.root.with_name("systemd")
        subprocess.run(["cp", "-a", "--reflink=auto", str(image.root), str(self._root)], check=True)
        install = command_in(
            self._root, Settings(environment={"PATH": PATH}), Mounts(image.given, {}), ["sh", "-c", INSTALL]
        )
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        self._add_unit(folder, environment)
        self._group = GROUPS / f"slipstream-test-{os.getpid()}"
        self._given = image.given

    def _add_unit(self, folder: Path, environment: dict[str, str]) -> None:
        units = self._root / UNITS
        (units / "slipstream.service").write_text((folder / "slipstream.service").read_text())
        wants = units / "multi-user.target.wants"
        wants.mkdir(exist_ok=True)
        (wants / "slipstream.service").symlink_to("../slipstream.service")
        (units / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
        for name in MASKED:
            (units / name).unlink(missing_ok=True)
            (units / name).symlink_to("/dev/null")
        settings = self._root / "etc" / "slipstream"
        settings.mkdir()
        more = "".join(f"{name}={value}\n" for name, value in environment.items())
        (settings / "slipstream.env").write_text((folder / "slipstream.env").read_text() + more)

    def _script(self) -> str:
        root = shlex.quote(str(self._root))
        lines = [Mounts(self._given, {}).script(self._root), f"umount --recursive {root}/dev"]
        lines += [f"mount -t sysfs sysfs {root}/sys", f"mount -t tmpfs tmpfs {root}/sys/fs/cgroup"]
        lines += [f"mkdir {root}/sys/fs/cgroup/systemd"]
        lines += [f"mount -t cgroup -o none,name=systemd cgroup {root}/sys/fs/cgroup/systemd"]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {root}/{name}" for name in ("run", "dev")]
        lines += [f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}" for name in DEVICES]
        lines += [f"cd {root} && mkdir -p outside && pivot_root . outside && umount --lazy /outside"]
        lines += [f"exec env -i container=other PATH={PATH} /lib/systemd/systemd --system --show-status=no </dev/null"]
        return " && ".join(lines)

    def __enter__(self) -> Systemd:
        self._group.mkdir()
        enter = f"echo $$ > {self._group}/cgroup.procs && exec unshare --mount --pid --uts --ipc --cgroup --fork "
        command = ["sh", "-c", enter + f"--kill-child sh -c {shlex.quote(self._script())}"]
        self._log = self._root.with_name("systemd.log").open("w+")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # which ends all that it started
        self._process.wait()
        self._log.close()
        groups = sorted((path for path in self._group.rglob("*") if path.is_dir()), reverse=True)
        for group in (*groups, self._group):
            until(lambda group=group: not (group / "cgroup.procs").read_text())  # the last of them may still be ending
            group.rmdir()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command beside it."""
        [first] = self._children()
        namespaces = [f"--{name}" for name in ("mount", "pid", "uts", "ipc", "cgroup")]
        command = ["nsenter", f"--target={first}", *namespaces, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def property(self, name: str) -> str:
        """Of our unit."""
        return self.run("systemctl", "show", "slipstream", f"--property={name}", "--value").stdout.strip()

    def is_up(self) -> bool:
        self._log.seek(0)
        assert self._process.poll() is None, self._log.read()
        return bool(self._children()) and self._is_active("multi-user.target")

    def _is_active(self, unit: str) -> bool:
        return self.run("systemctl", "is-active", unit).stdout == "active\n"

    def _children(self) -> list[str]:
        unshared = self._process.pid
        return Path(f"/proc/{unshared}/task/{unshared}/children").read_text().split()
