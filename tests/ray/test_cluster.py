"""Two replicas of the default model on Ray Serve, through its HAProxy: what clients see when things go wrong."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest
from fake_server import until
from ray_cluster import MODEL, WAIT, Answer, RayCluster, ask, ask_until_whole, question

pytestmark = [
    pytest.mark.first,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray has HAProxy on Linux only"),
    pytest.mark.timeout(1200),
]

NUM_CLIENTS, NUM_QUESTIONS, MAX_NUMBER = 32, 8, 64


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster("replicas=2") as found:
        found.wait_for_replicas(2)
        yield found


@pytest.fixture(scope="module")
def texts(cluster: RayCluster) -> dict[int, str]:
    """The answers that clients get alone, by the number they ask about: half of them from each replica.

    Which replica has a number is a matter of chance: it depends on the name that Ray makes up for the replica.
    """

    async def alone() -> dict[int, str]:
        found, of_replica = {}, Counter[str]()
        for number in range(MAX_NUMBER):
            replica = (await ask(cluster.url, question(number, max_tokens=1))).replica
            if of_replica[replica] < NUM_QUESTIONS // 2:
                answer = await ask(cluster.url, question(number))
                assert answer.whole, answer
                of_replica[answer.replica] += 1
                found[number] = answer.text
            if len(found) == NUM_QUESTIONS:
                return found
        raise AssertionError(f"of {MAX_NUMBER} conversations, too few on one replica: {of_replica}")

    found = asyncio.run(alone())
    assert len(set(found.values())) == NUM_QUESTIONS
    return found


def converse(url: str, index: int, turns: int, **headers: str) -> list[tuple[str, int, int]]:
    """A conversation's turns: replica, tokens of the prompt, those of them that were cached."""
    messages: list[dict[str, str]] = [{"role": "user", "content": f"Name a city of the country number {index}."}]
    seen = []
    for _ in range(turns):
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT).raise_for_status()
        usage = response.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        seen.append((response.headers["x-slipstream-replica"], usage["prompt_tokens"], cached))
        answer = response.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And another one?"}]
    return seen


def test_conversations_stay_with_their_replica(cluster: RayCluster) -> None:
    """In 95 % of their turns. On a busy core one of twenty was once seen to move and come back; why is not known."""
    found = [converse(cluster.url, index, 5) for index in range(20)]
    assert len({replica for turns in found for replica, _, _ in turns}) == 2
    moved = 0
    for turns in found:
        for (replica, before, _), (next_replica, _, cached) in pairwise(turns):
            moved += replica != next_replica
            if replica == next_replica:
                assert cached >= before - 32  # all of the last prompt but what did not fill a block
    assert moved <= 5, found


def test_a_session_header_comes_first(cluster: RayCluster) -> None:
    """Different conversations of one session; and one conversation in different sessions."""
    same = {converse(cluster.url, index, 1, **{"x-session-id": "s"})[0][0] for index in range(12)}
    assert len(same) == 1
    spread = {converse(cluster.url, 1, 1, **{"x-session-id": f"s{index}"})[0][0] for index in range(12)}
    assert len(spread) == 2


def test_metrics_by_replica_and_in_sum(cluster: RayCluster) -> None:
    def tokens(query: str) -> list[float]:
        lines = httpx.get(f"{cluster.url}/metrics{query}", timeout=WAIT).text.splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total")]

    each, [total] = tokens(""), tokens("?sum")
    assert len(each) == 2
    assert sum(each) == total > 0


def aborted(cluster: RayCluster) -> float:
    text = httpx.get(f"{cluster.url}/metrics?sum", timeout=WAIT).text
    found = re.search(r'^vllm:request_success_total{.*finished_reason="abort".*} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_client_that_leaves_is_cancelled_in_the_engine(cluster: RayCluster) -> None:
    before = aborted(cluster)
    answer = asyncio.run(ask(cluster.url, question(0, max_tokens=900), leave_after=3))
    assert answer.left
    until(lambda: aborted(cluster) == before + 1)


def test_a_killed_replica_under_load(cluster: RayCluster, texts: dict[int, str]) -> None:
    """32 clients stream, a third leave, a replica is killed. The others have their exact text, some after an error."""
    before = cluster.wait_for_replicas(2)
    asked = [number for number, _ in zip(itertools.cycle(texts), range(NUM_CLIENTS))]
    num_leaving = NUM_CLIENTS // 3

    async def scene() -> tuple[list[Answer], list[tuple[Answer, list[str]]]]:
        leaving = [ask(cluster.url, question(number), leave_after=3) for number in asked[:num_leaving]]
        staying = [ask_until_whole(cluster.url, question(number)) for number in asked[num_leaving:]]
        left, stayed = asyncio.gather(*leaving), asyncio.gather(*staying)
        await left
        while sum(count >= 2 for count in await asyncio.to_thread(cluster.running_by_replica)) < 2:
            assert not stayed.done(), "they ended before both replicas were seen at work"
            await asyncio.sleep(0.01)
        os.kill(cluster.replica_pids()[0], signal.SIGKILL)
        return await left, await asyncio.wait_for(stayed, WAIT)

    left, stayed = asyncio.run(scene())
    assert all(answer.left or answer.error for answer in left)
    assert [answer.text for answer, _ in stayed] == [texts[number] for number in asked[num_leaving:]]
    errors = [error for _, own in stayed for error in own]
    assert errors, "nobody was on the replica that was killed"
    print(Counter(errors))
    cluster.wait_for_replaced(before, 1)
    assert sum(cluster.running_by_replica()) == 0


@pytest.mark.exhaustive
def test_scaling_under_load_loses_no_answer(cluster: RayCluster, texts: dict[int, str]) -> None:
    """2 -> 1 -> 2: a replica that Ray removes finishes its answers first."""

    async def scene() -> list[tuple[Answer, list[str]]]:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        async def client(number: int) -> list[tuple[Answer, list[str]]]:
            found = []
            while not ended.is_set():
                found.append(await ask_until_whole(cluster.url, question(number)))
            return found

        clients = [asyncio.create_task(client(number)) for number in texts]
        for count in (1, 2):
            await loop.run_in_executor(None, cluster.scale, count)
            await loop.run_in_executor(None, cluster.wait_for_replicas, count)
        ended.set()
        return [each for task in clients for each in await asyncio.wait_for(task, WAIT)]

    found = asyncio.run(scene())
    assert len(found) >= 2 * NUM_QUESTIONS
    assert [errors for _, errors in found if errors] == []
    assert {answer.text for answer, _ in found} == set(texts.values())


@pytest.mark.exhaustive
def test_an_engine_that_dies_is_replaced(cluster: RayCluster, texts: dict[int, str]) -> None:
    """Its process lives on, but Ray asks for the engine's health. Its clients are told, and served by the other one."""
    before = cluster.wait_for_replicas(2)

    async def scene() -> list[tuple[Answer, list[str]]]:
        clients = asyncio.gather(*(ask_until_whole(cluster.url, question(number)) for number in texts))
        while not any(await asyncio.to_thread(cluster.running_by_replica)):
            assert not clients.done(), "they ended before they were seen"
            await asyncio.sleep(0.01)
        cluster.fault.touch()
        return await asyncio.wait_for(clients, WAIT)

    found = asyncio.run(scene())
    assert not cluster.fault.exists()
    assert [answer.text for answer, _ in found] == list(texts.values())
    errors = [error for _, errors in found for error in errors]
    assert any("engine" in error for error in errors), errors
    cluster.wait_for_replaced(before, 1)


async def being_answered(cluster: RayCluster, numbers: list[int]) -> list[asyncio.Task[Answer]]:
    """Their clients have all been let in, and some are still being answered."""
    while True:
        clients = [asyncio.create_task(ask(cluster.url, question(number))) for number in numbers]
        while not all(task.done() for task in clients):
            num_done = sum(task.done() for task in clients)
            num_running = sum(await asyncio.to_thread(cluster.running_by_replica))
            if num_running and num_done + num_running >= len(numbers):
                return clients
            await asyncio.sleep(0.02)


def test_it_drains(cluster: RayCluster, texts: dict[int, str]) -> None:
    """The last test: clients that are being answered get their whole text, and the process ends with code 0."""

    async def scene() -> tuple[list[Answer], int]:
        clients = await being_answered(cluster, list(texts)[:6])
        code = await asyncio.get_running_loop().run_in_executor(None, cluster.end)
        return [await task for task in clients], code

    answers, code = asyncio.run(scene())
    assert code == 0
    assert [answer.text for answer in answers] == list(texts.values())[:6]


@pytest.mark.exhaustive
def test_the_command_drains_after_a_signal(texts: dict[int, str]) -> None:
    """`python -m slipstream.ray`, as operators of one machine run it."""
    command = [sys.executable, "-m", "slipstream.ray", *MODEL]
    with RayCluster("replicas=2", command=command, ready="^page") as cluster:

        async def scene() -> list[Answer]:
            clients = await being_answered(cluster, list(texts)[:6])
            cluster.process.send_signal(signal.SIGTERM)
            return [await task for task in clients]

        answers = asyncio.run(scene())
        assert [answer.text for answer in answers] == list(texts.values())[:6]
        assert cluster.end() == 0
        assert any("drafts" in line for line in cluster.output), "a replica says at its start whether it drafts"
