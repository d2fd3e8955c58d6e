"""A server whose keys and values are cached in FP8: it answers, it says so, and drafts change nothing."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
from real_server import WAIT, RealServer

PROMPT = "The history of the lighthouse begins with fires on hills. " * 60
GREEDY, HOT = {"temperature": 0}, {"temperature": 1.0}


def answer(server: RealServer, depth: int, **options: object) -> str:
    body = {"prompt": PROMPT, "max_tokens": 40, "speculative": {"depth": depth}, "seed": 7, **options}
    return str(server.post("/v1/completions", **body).json()["choices"][0]["text"])


def test_a_server_with_keys_and_values_in_fp8(tmp_path: Path) -> None:
    options = ("--max-streams", "4", "--kv-memory", "60MB", "--cache-dir", str(tmp_path / "cache"))
    with RealServer("--kv-dtype", "fp8", *options, "--sleep-idle", "1") as server:
        plain = answer(server, 0, **GREEDY)
        assert len(plain) > 20
        assert answer(server, 4, **GREEDY) == plain
        assert answer(server, 3, **HOT) == answer(server, 0, **HOT)
        several = server.post("/v1/completions", prompt=PROMPT, max_tokens=8, n=3, seed=1, temperature=1.0).json()
        assert len(several["choices"]) == 3
        end = time.monotonic() + WAIT
        while server.status()["state"] != "sleeping":
            assert time.monotonic() < end
            time.sleep(0.1)
        assert answer(server, 4, **GREEDY) == plain, "loaded again"
    with RealServer("--kv-dtype", "fp8", *options) as server:
        assert answer(server, 2, **GREEDY) == plain
        assert server.status()["prefix_cache"]["found_tokens"] > 500, "what the first one left on disk"
        check_status(server)
    with RealServer(*options) as server:
        answer(server, 2, **GREEDY)
        assert server.status()["prefix_cache"]["found_tokens"] == 0, "of another type"
        assert server.status()["device"]["kv_dtype"] == "float32"


def check_status(server: RealServer) -> None:
    status = server.status()
    assert status["device"]["kv_dtype"] == "fp8"
    assert ", KV in fp8" in status["device"]["note"]
    memory = status["memory"]
    per_token = memory["kv_bytes"] / memory["kv_blocks_total"] / memory["block_size"]
    assert per_token == 31 * 2 * 3 * (64 + 2)  # layers and the head's, keys and values, heads; codes and a scale
    metrics = httpx.get(f"{server.url}/metrics", timeout=WAIT).text
    assert re.search(r'^vllm:cache_config_info\{.*cache_dtype="fp8"', metrics, re.MULTILINE)
