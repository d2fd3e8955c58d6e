"""The process in which llama.cpp runs: one JSON line in, one out, until its input ends.

A process of its own, because in ours it was measured at a third of its speed (why is not known; both bring an OpenMP
library). Imports no array library. Started by llamacpp_peer.py.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, TextIO

llama: Any = import_module("xllamacpp")
GREEDY = {"temperature": 0, "top_k": 1, "samplers": ["top_k"]}  # and no more: a sampler goes over the whole vocabulary


def main(path: str, count: int, context: int, num_threads: int, caching: int) -> None:
    answers = _own_output()
    try:
        server = _server(path, count, context, num_threads, caching=bool(caching))
    except RuntimeError as error:
        _send(answers, {"error": str(error)})
        return
    _send(answers, {"note": _note(num_threads)})
    with ThreadPoolExecutor(count) as threads:
        for line in sys.stdin:
            options = {**json.loads(line), "cache_prompt": bool(caching)}
            prompts = options.pop("prompts")
            _send(answers, list(threads.map(partial(_answer, server, options), prompts)))


def _own_output() -> TextIO:
    """Standard output for our lines alone: what native code prints there or as an error goes nowhere."""
    own = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return own


def _send(answers: TextIO, reply: object) -> None:
    print(json.dumps(reply), file=answers, flush=True)


def _note(num_threads: int) -> str:
    built = re.findall(r"(\w+) = 1", llama.get_system_info())
    return f"xllamacpp {llama.__version__} on {num_threads} threads, built with {' '.join(built)}"


def _server(path: str, count: int, context: int, num_threads: int, *, caching: bool) -> Any:
    """``caching``: with its prompt cache, by its own defaults; else without any."""
    params = llama.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx = count, count * context
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    params.hostnames, params.port = ["127.0.0.1"], 0
    if not caching:
        params.cache_prompt, params.cache_ram_mib = False, 0
        params.n_ctx_checkpoints = 0  # copies of recurrent states for prompts to come: there are none
    params.verbosity = 0
    return llama.Server(params)


def _answer(server: Any, options: dict[str, Any], prompt: Sequence[int]) -> dict[str, Any]:
    """When tokens came, and how many; the likeliest tokens of each position if ``n_probs`` asks for some."""
    request = {**options, **GREEDY, "prompt": prompt, "stream": True, "timings_per_token": True}
    answer: dict[str, Any] = {"submitted": time.perf_counter(), "times": [], "counts": [], "likeliest": []}
    server.handle_completions(request, partial(_add_chunk, answer))
    return answer


def _add_chunk(answer: dict[str, Any], chunk: dict[str, Any]) -> None:
    """A chunk holds one token, or several where some were half a character."""
    now = time.perf_counter()
    if "error" in chunk:
        answer["error"] = str(chunk["error"])
        return
    num_new = chunk["timings"]["predicted_n"] - sum(answer["counts"])
    if num_new:
        answer["times"].append(now)
        answer["counts"].append(num_new)
    for position in (chunk["choices"][0]["logprobs"] or {}).get("content", []):
        answer["likeliest"].append([(each["id"], each["logprob"]) for each in position["top_logprobs"]])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
