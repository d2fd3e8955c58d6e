"""In the shape of llama.cpp's mtp-bench: nine prompts, a model name of its own, and the server's own `timings`."""

from __future__ import annotations

import json
import sys
import urllib.request

from slipstream.bench.harness.mtp_bench_prompts import MTP_BENCH_PROMPTS


def ask(url: str, prompt: str, max_tokens: int) -> dict[str, float]:
    body = {"model": "llama", "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        timings: dict[str, float] = json.load(response)["timings"]
    return timings


def main() -> None:
    url, max_tokens = sys.argv[1], int(sys.argv[2])
    found = []
    for name, prompt in MTP_BENCH_PROMPTS.items():
        timings = ask(url, prompt, max_tokens)
        found.append(timings)
        predicted, drafted, accepted = (int(timings[key]) for key in ("predicted_n", "draft_n", "draft_n_accepted"))
        speed = timings["predicted_per_second"]
        print(f"{name:18} pred={predicted:4} draft={drafted:4} acc={accepted:4} {speed:7.1f} tok/s")
    totals = {key: sum(each[key] for each in found) for key in ("predicted_n", "draft_n", "draft_n_accepted")}
    print(json.dumps({"requests": len(found), **totals}))


if __name__ == "__main__":
    main()
