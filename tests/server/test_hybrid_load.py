"""A hundred clients of a hybrid model at once: texts and log-probabilities are those each client gets alone."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from load import ARGUMENTS
from real_server import WAIT, RealServer

NUM_CLIENTS = 100


def bodies() -> list[dict[str, Any]]:
    """Prompts of 5 to 140 tokens, greedy and sampled, drafting and not."""
    return [
        {
            "prompt": "A river, a lake and the sea. "[: 5 + 3 * i] * (1 + i // 2),
            "temperature": 0.0 if i % 2 else 0.8,
            "seed": i,
            "max_tokens": 10 + 2 * i,
            "logprobs": 3,
            "speculative": {"enabled": i % 3 != 0},
        }
        for i in range(10)
    ]


async def together(url: str, asked: list[dict[str, Any]]) -> list[list[Any]]:
    limits = httpx.Limits(max_connections=len(asked))
    async with httpx.AsyncClient(base_url=url, timeout=WAIT, limits=limits) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in asked))
    return [answer.raise_for_status().json()["choices"] for answer in answers]


@pytest.mark.parametrize("shape", [pytest.param("tiny", marks=pytest.mark.exhaustive), "tiny-moe"])
def test_a_hundred_clients_get_the_numbers_they_get_alone(shape: str) -> None:
    with RealServer("--shape", shape, "--random-weights", "--dtype", "int8", *ARGUMENTS) as server:
        asked = bodies()
        alone = [server.post("/v1/completions", **body).raise_for_status().json()["choices"] for body in asked]
        crowd = [i * 7 % len(asked) for i in range(NUM_CLIENTS)]
        answers = asyncio.run(together(server.url, [asked[i] for i in crowd]))
        status = server.status()
    for i, answer in zip(crowd, answers, strict=True):
        assert answer == alone[i]
        assert len(answer[0]["logprobs"]["token_logprobs"]) > 0
    assert status["speculation"]["drafts"] > 0
