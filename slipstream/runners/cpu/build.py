"""Compiles the C kernels with the system's compiler and keeps the result in the user's cache folder.

Knows compilers, flags and files, not the kernels themselves. Where there is no compiler, or it fails, the
answer is a sentence for the user: the runner then computes with PyTorch's own operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import ConfigError

log = logging.getLogger(__name__)
SOURCE_DIR = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
# No contraction: a*b+c is fused where the source says so and nowhere else, so all builds of a kernel agree.
FLAGS = ("-O3", "-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
NATIVE = ("-march=native", "-mcpu=native", "")  # the first that the compiler accepts
# Which instruction set the kernels are compiled for, if not the machine's best: to test one on a machine that has more.
ISA_VARIABLE = "SLIPSTREAM_CPU_ISA"
ISA_FLAGS: dict[str, tuple[str, ...] | None] = {
    "native": None,
    "avx512": ("-march=native", "-mno-avx512vnni"),
    "avx2": ("-march=native", "-mno-avx512f", "-mno-avxvnni"),
    "avx2-vnni": ("-march=native", "-mno-avx512f"),
    "portable": ("-DSS_PORTABLE",),
}


@dataclass(frozen=True, slots=True)
class Build:
    """Either a library or the reason why there is none."""

    library: ctypes.CDLL | None
    why_not: str = ""


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "slipstream" / "kernels"


def chosen_flags() -> tuple[str, ...] | None:
    """Of the instruction set that the environment names; None: the machine's own."""
    name = os.environ.get(ISA_VARIABLE) or "native"
    if name not in ISA_FLAGS:
        raise ConfigError(f"{ISA_VARIABLE} is {name!r}; it may be one of {', '.join(ISA_FLAGS)}")
    return ISA_FLAGS[name]


def find_compiler(names: Sequence[str] = COMPILERS) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def cpu_model() -> str:
    """What -march=native depends on: a cache folder may be shared by machines."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def source_files() -> list[Path]:
    return sorted(path for path in SOURCE_DIR.iterdir() if path.suffix in (".c", ".h"))


def build_key(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join([compiler, *flags, cpu_model()]).encode())
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def compile_to(target: Path, compiler: str, flags: Sequence[str]) -> str:
    """Empty when ``target`` now holds the library, else what the compiler said. Others may do the same meanwhile."""
    sources = [str(path) for path in source_files() if path.suffix == ".c"]
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        command = [compiler, *FLAGS, *flags, *sources, "-lm", "-o", temporary]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip() or f"exit status {done.returncode}"
        os.replace(temporary, target)
        return ""
    finally:
        Path(temporary).unlink(missing_ok=True)


def build(
    flags: Sequence[str] | None = None, directory: Path | None = None, compilers: Sequence[str] = COMPILERS
) -> Build:
    """The library for this machine, from the cache or freshly compiled. ``flags`` replace the native ones."""
    flags = chosen_flags() if flags is None else flags
    compiler = find_compiler(compilers)
    if compiler is None:
        return Build(None, f"no C compiler found (looked for {', '.join(compilers)}), so the CPU kernels are not used")
    directory = directory or cache_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        choices = [[flag] if flag else [] for flag in NATIVE] if flags is None else [list(flags)]
        return _build_in(directory, compiler, choices)
    except OSError as error:
        return Build(None, f"the CPU kernels could not be built in {directory}: {error}")


def _build_in(directory: Path, compiler: str, choices: list[list[str]]) -> Build:
    said = ""
    for flags in choices:
        target = directory / f"{build_key(compiler, flags)}.so"
        said = ""
        if not target.exists():
            log.info("compiling the kernels for this processor, once: half a minute")
            said = compile_to(target, compiler, flags)
        if not said:
            return Build(ctypes.CDLL(str(target)))
    first_line = next((line for line in said.splitlines() if "error" in line), said.splitlines()[0])
    return Build(None, f"{compiler} could not compile the CPU kernels: {first_line}")
