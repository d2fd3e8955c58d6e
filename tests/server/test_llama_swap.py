"""The recipe of docs/several-models.md: a server started by its command line, polled and called as llama-swap does."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from real_server import COMMAND, WAIT

DOCUMENT = Path(__file__).parents[2] / "docs" / "several-models.md"
QUICKER = ["--draft", "2", "--max-context", "512", "--max-streams", "2"]


def recipe() -> dict[str, Any]:
    [block] = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return dict(yaml.safe_load(block))


def expanded(text: str, port: int, name: str) -> str:
    return text.replace("${PORT}", str(port)).replace("${MODEL_ID}", name)


def wait_healthy(process: subprocess.Popen[bytes], url: str) -> list[int]:
    """Polls until 200: the states on the way, 0 for a refused connection."""
    seen, end = [0], time.monotonic() + WAIT
    while seen[-1] != 200:
        assert process.poll() is None
        assert time.monotonic() < end
        try:
            seen.append(httpx.get(url, timeout=WAIT).status_code)
        except httpx.ConnectError:
            seen.append(0)
        time.sleep(0.05)
    return seen


def test_a_server_started_by_the_recipe() -> None:
    [name] = [name for name, model in recipe()["models"].items() if " serve --" in model["cmd"]]  # the default model
    model = recipe()["models"][name]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program, *arguments = shlex.split(expanded(model["cmd"], port, name))
    assert program == "slipstream"
    process = subprocess.Popen([*COMMAND, *arguments, *QUICKER], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        base = expanded(model["proxy"], port, name)
        seen = wait_healthy(process, base + model["checkEndpoint"])
        assert set(seen) <= {0, 503, 200}
        body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        # The client's Host is passed on: that of llama-swap.
        answer = httpx.post(f"{base}/v1/chat/completions", json=body, headers={"host": "localhost:8080"}, timeout=WAIT)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0
    finally:
        process.kill()
        process.wait()


def test_each_command_line_of_the_recipe_is_one_that_we_read() -> None:
    from slipstream.cli import build_parser, server_config
    from slipstream.commands.configuration import parse

    for name, model in recipe()["models"].items():
        arguments = shlex.split(expanded(model["cmd"], 1234, name))[1:]
        config = server_config(parse(build_parser(), [*arguments, "--config", ""]))
        assert config.port == 1234
        assert config.names == (name,)
        assert config.drain_seconds < 10, "llama-swap kills after 10 seconds"
