"""What every client needs: an environment of its own, a server, files in the shape of a hub's cache, a text to read."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import tokenizers

from slipstream.host import available_threads
from slipstream.load.default_model import cache_dir, default_model_path
from slipstream.load.opened import open_tokenizer

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
TOKENIZER = "slipstream/default"  # the name of the default model's tokenizer in our hub cache
START_SECONDS = 300.0
CLIENT_SECONDS = 900.0


class ClientFailure(Exception):
    """What a client did not do, with the end of its output."""


@dataclass(frozen=True)
class Setting:
    """Of one client's run."""

    bin: Path  # of its environment
    hub: Path
    work: Path  # an empty folder

    def run(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        """Its output. Programs of the environment by name; it sees no hub but ours."""
        command = [str(self.bin / program), *arguments]
        try:
            done = subprocess.run(
                command,
                env=self._environment(),
                cwd=cwd or self.work,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=CLIENT_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ClientFailure(f"not done in {CLIENT_SECONDS:g} s: {str(error.output)[-2000:]}") from None
        (self.work / "output.txt").write_text(done.stdout)
        if done.returncode != 0:
            raise ClientFailure(f"exit code {done.returncode}: {done.stdout[-2000:]}")
        return done.stdout

    @contextmanager
    def running(self, program: str, *arguments: str) -> Iterator[None]:
        """A program of the environment that runs meanwhile."""
        command = [str(self.bin / program), *arguments]
        with (self.work / "output.txt").open("w") as log:
            process = subprocess.Popen(
                command, env=self._environment(), cwd=self.work, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                yield
            finally:
                process.terminate()
                process.wait()

    def _environment(self) -> dict[str, str]:
        ours = {
            "HF_HOME": str(self.hub),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HOME": str(self.work),
            "NO_PROXY": "127.0.0.1",
            "COLUMNS": "200",
        }
        return {**os.environ, **ours, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}


def clients_cache() -> Path:
    return cache_dir() / "clients"


def environment(name: str, requirements: tuple[str, ...]) -> Path:
    """The `bin` of a virtual environment with the packages, made once; made again when the requirements change. Without
    requirements our own."""
    if not requirements:
        return Path(sys.executable).parent
    key = hashlib.sha256(" ".join((sys.version, *requirements)).encode()).hexdigest()[:8]
    folder = clients_cache() / f"{name}-{key}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *requirements]
        done = subprocess.run(install, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise ClientFailure(f"could not be installed: {done.stdout[-1000:]}")
        (folder / "ready").touch()
    return folder / "bin"


def hub_cache() -> Path:
    """A folder for HF_HOME that holds the default model's tokenizer, as if it had been fetched from a hub."""
    home = clients_cache() / "hub"
    repository = home / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    revision = "0" * 40
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    tokenizer = open_tokenizer(default_model_path())
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(snapshot / "tokenizer.json"))
    end = tokenizer.decode(tokenizer.eos_token_ids[:1], skip_special=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.template_text,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": 8192,
    }
    (snapshot / "tokenizer_config.json").write_text(json.dumps(config))
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return home


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """`slipstream serve` on the default model and a free port; its address."""
    with server_process(*arguments) as (url, _):
        yield url


@contextmanager
def server_process(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "slipstream.cli", "serve", "--port", "0", *arguments]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True)
        try:
            yield _wait_until_loaded(process, log.fileno()), process
        finally:
            process.terminate()
            process.wait()


def _wait_until_loaded(process: subprocess.Popen[str], log: int) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        text = os.pread(log, 1 << 20, 0).decode()
        if found := re.search(r"^page +(\S+)/$", text, re.MULTILINE):
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise ClientFailure(f"the server did not start: {text[-2000:]}")


@contextmanager
def llamacpp_server() -> Iterator[str | None]:
    """The address of llama.cpp's server on the same model; None where its package is not installed."""
    if find_spec("xllamacpp") is None:
        yield None
        return
    script, model = FOLDER / "scripts" / "llamacpp_server.py", default_model_path()
    command = [sys.executable, str(script), str(model), str(available_threads())]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = next((line.split()[1] for line in process.stdout if line.startswith("ADDRESS ")), None)
        if found is None:
            raise ClientFailure("llama.cpp's server did not start")
        yield found
    finally:
        process.kill()
        process.communicate()


@contextmanager
def book() -> Iterator[str]:
    """The address of a long text, for clients that fetch one."""
    handler = functools.partial(_Silent, directory=str(ROOT / "docs"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{files.server_port}/LOG.md"
        files.shutdown()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass
