"""`ray start` and `serve deploy` with the files in deploy/ray: a cluster as operators run one, with autoscaling."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from free_ports import free_port
from ray_cluster import WAIT, Answer, ask_until_whole, own_places, question

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Ray has HAProxy on Linux only"),
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),
]
FILES = Path(__file__).parent.parent.parent / "deploy" / "ray"
BIN = Path(sys.executable).parent
KEY = "a key of the tests"
HEADERS = {"Authorization": f"Bearer {KEY}"}


def environment(folder: str) -> dict[str, str]:
    """As `set -a; . deploy/ray/environment` makes it."""
    lines = (FILES / "environment").read_text().splitlines()
    flags = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    own = {"SLIPSTREAM_API_KEY": KEY, "RAY_AUTH_MODE": "token", "PATH": f"{BIN}:{os.environ['PATH']}"}
    return {**os.environ, **flags, **own_places(folder), **own}


@contextmanager
def ray_start(env: dict[str, str], dashboard: int, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    names = ("port", "ray-client-server-port", "dashboard-agent-listen-port")
    ports = [f"--{name}={free_port()}" for name in names]
    words = [
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        "--num-cpus=4",
        f"--dashboard-port={dashboard}",
        *ports,
    ]
    with output.open("wb") as file:
        launch = [str(BIN / "ray"), "start", *words]
        process = subprocess.Popen(launch, env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT)


def config(port: int) -> dict[str, Any]:
    """The file as it is, but for the model, the number of cores, the address and how long Ray waits."""
    found = yaml.safe_load((FILES / "serve.yaml").read_text())
    found["http_options"] |= {"host": "127.0.0.1", "port": port}
    [application] = found["applications"]
    small = {"model": None, "max_context": 1024, "max_streams": 4, "gpus_per_replica": 0, "cpus_per_replica": 1}
    application["args"] = {key: value for key, value in (application["args"] | small).items() if value is not None}
    [deployment] = application["deployments"]
    fast = {"upscale_delay_s": 1, "downscale_delay_s": 2, "metrics_interval_s": 0.5, "look_back_period_s": 1}
    deployment["autoscaling_config"] |= {"max_replicas": 2, "target_ongoing_requests": 2, **fast}
    return dict(found)


def replicas(url: str) -> int:
    try:
        response = httpx.get(f"{url}/metrics", headers=HEADERS, timeout=WAIT)
    except httpx.HTTPError:
        return 0
    return response.text.count("\nslipstream_ready{replica=")


def test_the_files_run_scale_and_lose_nothing(tmp_path: Path) -> None:
    """1 -> 2 -> 1 replicas by the number of requests; every answer is whole and right, nobody sees an error."""
    folder = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
    env, dashboard, port = environment(folder.name), free_port(), free_port()
    url, file, output = f"http://127.0.0.1:{port}", tmp_path / "serve.yaml", tmp_path / "output"
    file.write_text(yaml.safe_dump(config(port)))

    def serve(*words: str) -> int:
        launch = [str(BIN / "serve"), *words, "-a", f"http://127.0.0.1:{dashboard}"]
        with output.open("ab") as log:
            return subprocess.run(launch, env=env, stdout=log, stderr=log, timeout=WAIT).returncode

    async def until(what: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT
        while not await asyncio.to_thread(what):
            assert ray.poll() is None, output.read_text()[-20_000:]
            assert time.monotonic() < end, output.read_text()[-20_000:]
            await asyncio.sleep(0.3)

    async def client(index: int, ended: asyncio.Event) -> list[tuple[Answer, list[str]]]:
        found = []
        while not ended.is_set():
            found.append(await ask_until_whole(url, question(index), HEADERS))
        return found

    async def scene() -> list[tuple[Answer, list[str]]]:
        await until(lambda: serve("deploy", str(file)) == 0)
        await until(lambda: replicas(url) == 1)
        alone = [await ask_until_whole(url, question(index), HEADERS) for index in range(8)]
        busy, ended = asyncio.Event(), asyncio.Event()
        many = [asyncio.create_task(client(index, busy)) for index in range(1, 8)]
        few = asyncio.create_task(client(0, ended))
        await until(lambda: replicas(url) == 2)
        busy.set()
        found = [each for task in many for each in await task]
        await until(lambda: replicas(url) == 1)
        ended.set()
        found += await few
        assert {answer.text for answer, _ in found} == {answer.text for answer, _ in alone}
        assert httpx.get(f"{url}/v1/models", timeout=WAIT).status_code == 401
        await until(lambda: serve("shutdown", "-y") == 0)
        return found

    with ray_start(env, dashboard, output) as ray:
        found = asyncio.run(scene())
    folder.cleanup()
    assert len(found) > 8
    assert [errors for _, errors in found if errors] == []
