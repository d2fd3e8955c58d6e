"""llama.cpp on a file, in a process of its own: greedy tokens and the likeliest tokens at each. Run as a script."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xllamacpp  # type: ignore[import-not-found]

NUM_TOKENS = 64


@dataclass(frozen=True)
class Verdict:
    tokens: list[int]
    likeliest: list[list[tuple[int, float]]]  # of each token: ids and log-probabilities; empty while it drafts
    num_drafted: int
    num_accepted: int


def judge(path: Path, prompt: list[int], *, draft: int = 0) -> Verdict:
    command = [sys.executable, __file__, str(path), str(draft), json.dumps(prompt)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    positions = answer["choices"][0]["logprobs"]["content"]
    timings = answer["timings"]
    return Verdict(
        [each["id"] for each in positions],
        [[(top["id"], top["logprob"]) for top in each["top_logprobs"]] for each in positions],
        timings.get("draft_n", 0),
        timings.get("draft_n_accepted", 0),
    )


def _server(path: str, draft: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx, params.n_gpu_layers, params.warmup = 1, 512, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.verbosity, params.hostnames, params.port = 0, ["127.0.0.1"], 0
    if draft:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        params.speculative.draft.n_max = draft
        params.speculative.draft.p_min = 0.0
        params.load_mtp = True
    return xllamacpp.Server(params)


def main(path: str, draft: str, prompt: str) -> None:
    request = {"prompt": json.loads(prompt), "n_predict": NUM_TOKENS, "ignore_eos": True, "n_probs": 5}
    greedy = {"temperature": 0, "top_k": 1, "samplers": ["top_k"], "cache_prompt": False, "timings_per_token": True}
    print(json.dumps(_server(path, int(draft)).handle_completions(request | greedy)))


if __name__ == "__main__":
    main(*sys.argv[1:])
