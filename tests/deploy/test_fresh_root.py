"""The Dockerfile's CPU target, built and run in a fresh Debian root; and our unit there, run by systemd itself.

In both the default model is fetched, loaded and asked, and SIGTERM drains.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

import httpx
import pytest
import systemd_root
from dockerfile import parse
from fake_server import until
from fresh_root import Builder, Image, debian_mirror, folders, why_not
from systemd_root import Systemd

ROOT = Path(__file__).parent.parent.parent
KEY = "the-key-of-the-test"
WAIT = 900.0  # fetches PyTorch and a model, compiles, on a machine that may be busy


def test_the_mirror_of_a_machine(tmp_path: Path) -> None:
    assert debian_mirror(tmp_path) is None
    (tmp_path / "sources.list").write_text(
        "# deb http://no.example/debian x\ndeb [arch=amd64] http://a.example/debian/ x main\n"
    )
    assert debian_mirror(tmp_path) == "http://a.example/debian"
    (tmp_path / "sources.list").unlink()
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "debian.sources").write_text(
        "Types: deb\nURIs: http://b.example/debian\nSuites: x\n"
    )
    assert debian_mirror(tmp_path) == "http://b.example/debian"


def test_the_folders_that_pip_needs(tmp_path: Path) -> None:
    (tmp_path / "index" / "simple").mkdir(parents=True)
    settings = {"extra-index-url": f"https://a.example file://{tmp_path}/index/simple", "find-links": str(tmp_path)}
    assert folders(settings | {"cert": "/no/such/file"}) == [str(tmp_path), str(tmp_path / "index")]


class Container:
    """A process of the image, the first of its own: what it says, how it ends."""

    def __init__(self, image: Image, volume: Path, **environment: str) -> None:
        self._image, self._environment = image, environment
        self._volumes = dict.fromkeys(image.settings.volumes, str(volume))
        words = [*image.settings.entrypoint, *image.settings.command]
        self._process = subprocess.Popen(
            image.command(words, environment, self._volumes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self.output += iter(lines)

    @property
    def first(self) -> int:
        """Our number of the process that is 1 to itself."""
        unshared = self._process.pid
        [child] = Path(f"/proc/{unshared}/task/{unshared}/children").read_text().split()
        return int(child)

    def is_ready(self) -> bool:
        assert self._process.poll() is None, "".join(self.output)
        return is_ready(self._environment)

    def healthcheck(self) -> int:
        command = self._image.command(self._image.settings.healthcheck, self._environment, self._volumes)
        return subprocess.run(command, capture_output=True, check=False).returncode

    def stop(self) -> None:
        os.kill(self.first, signal.Signals[self._image.settings.stop_signal])

    def wait(self) -> int:
        code = self._process.wait(WAIT)
        self._reader.join(WAIT)
        return code

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            os.kill(self.first, signal.SIGKILL)  # the first of them all: the others end with it
        self.wait()


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slipstream-root-"))
    folder.chmod(0o755)  # the image's user must come through
    try:
        yield Builder(parse((ROOT / "Dockerfile").read_text()), ROOT, folder).build("cpu")
    finally:
        shutil.rmtree(folder)


def new_volume(image: Image) -> Path:
    """As Docker makes one: it begins as the folder in the image, and belongs to whom that belongs."""
    [inside] = image.settings.volumes
    folder = image.root.parent / "volume"
    subprocess.run(["cp", "-a", f"{image.root}{inside}", str(folder)], check=True)
    return folder


def own_address() -> dict[str, str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return {"SLIPSTREAM_HOST": "127.0.0.1", "SLIPSTREAM_PORT": str(port)}


def url(address: dict[str, str]) -> str:
    return f"http://127.0.0.1:{address['SLIPSTREAM_PORT']}"


def is_ready(address: dict[str, str]) -> bool:
    try:
        return httpx.get(f"{url(address)}/ready", timeout=WAIT).status_code == 200
    except httpx.ConnectError:
        return False


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_image_serves(image: Image) -> None:
    volume = new_volume(image)
    does_not_start_without_a_key(image, volume)
    answers_and_drains(image, volume)
    keeps_model_and_kernels(image, volume)


def does_not_start_without_a_key(image: Image, volume: Path) -> None:
    with Container(image, volume) as container:
        assert container.wait() == 1
        assert "that needs an API key" in "".join(container.output)


def answers_and_drains(image: Image, volume: Path) -> None:
    address = own_address()
    with (
        Container(image, volume, SLIPSTREAM_API_KEY=KEY, **address) as container,
        httpx.Client(base_url=url(address), timeout=WAIT) as client,
    ):
        until(container.is_ready, WAIT)
        is_the_first_process_and_not_root(image, container)
        answers(client)
        assert container.healthcheck() == 0
        assert count_while_stopping(client, container.stop) == 40
        assert container.wait() == 0, "".join(container.output)
        assert container.healthcheck() == 1


def answers(client: httpx.Client) -> None:
    """With the key only, by kernels that were compiled here."""
    assert client.get("/v1/status").status_code == 401
    client.headers["authorization"] = f"Bearer {KEY}"
    assert re.search(r"\w+ kernels on \d+ thread", client.get("/v1/status").json()["device"]["note"])
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    answer = client.post("/v1/chat/completions", json=question).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


def is_the_first_process_and_not_root(image: Image, container: Container) -> None:
    """So it gets the signal itself."""
    status = Path(f"/proc/{container.first}/status").read_text()
    uid, gid = image.settings.user.split(":")
    assert re.search(rf"^Uid:\t{uid}\t.*^Gid:\t{gid}\t.*^NSpid:\t.*\t1$", status, re.MULTILINE | re.DOTALL)


def count_while_stopping(client: httpx.Client, stop: Callable[[], object]) -> int:
    """Tokens of a stream during which the server is told to stop."""
    body = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}) as response:
        lines = response.iter_lines()
        events = [next(lines)]
        stop()
        events += [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    [usage] = [found for event in events[:-1] if (found := json.loads(event[6:]).get("usage"))]
    return int(usage["completion_tokens"])


def keeps_model_and_kernels(image: Image, volume: Path) -> None:
    """Nothing is fetched or compiled again."""
    before = files(volume)
    assert {path.suffix for path in before} == {".so", ".gguf"}
    assert {path.stat().st_uid for path in before} == {int(image.settings.user.split(":")[0])}
    with Container(image, volume, SLIPSTREAM_API_KEY=KEY, PIP_NO_INDEX="1", **own_address()) as container:
        until(container.is_ready, WAIT)
        container.stop()
        assert container.wait() == 0
    assert files(volume) == before


def files(volume: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in volume.rglob("*") if path.suffix in (".so", ".gguf")}


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_systemd_runs_the_unit(image: Image) -> None:
    """With its restrictions: as a user of its own, under a filter of system calls, with one folder to write to."""
    if reason := systemd_root.why_not():
        pytest.skip(reason)
    address = own_address()
    service = Systemd(image, ROOT / "deploy" / "systemd", SLIPSTREAM_API_KEY=KEY, **address)
    with service, httpx.Client(base_url=url(address), timeout=WAIT) as client:
        until(service.is_up, WAIT)
        until(lambda: has_not_failed(service) and is_ready(address), WAIT)
        answers(client)
        cache = service.run("find", "/var/cache/private/slipstream", "-name", "*.gguf", "-or", "-name", "*.so")
        assert len(cache.stdout.split()) == 2, "model and kernels"
        service.run("systemctl", "kill", "--signal=KILL", "slipstream")
        until(lambda: service.property("NRestarts") == "1" and is_ready(address), WAIT)
        stop = partial(service.run, "systemctl", "stop", "--no-block", "slipstream")
        assert count_while_stopping(client, stop) == 40
        until(lambda: service.property("ActiveState") == "inactive", WAIT)
        assert (service.property("Result"), service.property("ExecMainStatus")) == ("success", "0")


def has_not_failed(service: Systemd) -> bool:
    assert service.property("NRestarts") == "0", service.run("journalctl", "--unit=slipstream").stdout
    return True
