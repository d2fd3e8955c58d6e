"""`slipstream bench http`: what HTTP costs. The same requests through the server and given to its engine directly.

One process holds engine and server; the client is a process of its own, on the same machine. The two ways take turns,
so that a machine that is busy for a while is busy for both, and each turn's ratio is worth more than the speeds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from slipstream.bench.harness.local_server import served
from slipstream.bench.harness.mtp_bench_prompts import MTP_BENCH_PROMPTS
from slipstream.bench.harness.report import check_writable, write_report
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.commands.progress import shown
from slipstream.engine.request import TokenEvent
from slipstream.sampling import SamplingParams
from slipstream.server.service.model_holder import LoadedModel

CLIENT = "slipstream.bench.harness.http_client"


@dataclass(frozen=True, slots=True)
class HttpTurn:
    streams: int
    direct_tok_s: float
    http_tok_s: float

    @property
    def ratio(self) -> float:
        return self.http_tok_s / self.direct_tok_s


def http(options: ModelOptions, streams: Sequence[int], num_tokens: int, repeats: int, to: ReportOptions) -> int:
    check_writable(to)
    with served(options) as (port, loaded):
        turns = _measure(port, loaded, streams, num_tokens, repeats)
    settings = {"streams": list(streams), "tokens": num_tokens, "repeats": repeats}
    write_report("http", options, to, {"settings": settings, "results": _medians(turns, streams)})
    return 0


def _measure(port: int, loaded: LoadedModel, streams: Sequence[int], tokens: int, repeats: int) -> list[HttpTurn]:
    turns: list[HttpTurn] = []
    for count in streams:
        for turn in shown(range(1 + repeats), f"{count} streams"):
            measured = HttpTurn(count, _direct(loaded, count, tokens), _through_http(port, count, tokens))
            if turn:  # the first warms up
                turns.append(measured)
                print(f"{count:>3} streams: {_line(measured)}", flush=True)
    return turns


def _prompts(count: int) -> list[str]:
    texts = list(MTP_BENCH_PROMPTS.values())
    return [texts[i % len(texts)] for i in range(count)]


def _direct(loaded: LoadedModel, count: int, num_tokens: int) -> float:
    """Tokens a second over all streams, from the first submit to the last token."""
    prompts = [loaded.tokenizer.chat([{"role": "user", "content": text}]) for text in _prompts(count)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    done = threading.Semaphore(0)

    def sink(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            done.release()

    began = time.perf_counter()
    for prompt in prompts:
        loaded.engine.submit(prompt, params, sink)
    for _ in prompts:
        done.acquire()
    return count * num_tokens / (time.perf_counter() - began)


def _through_http(port: int, count: int, num_tokens: int) -> float:
    request = json.dumps({"prompts": _prompts(count), "max_tokens": num_tokens})
    command = [sys.executable, "-m", CLIENT, str(port)]
    answer = subprocess.run(command, input=request, capture_output=True, text=True, check=True).stdout
    seconds, tokens = json.loads(answer)
    assert tokens == count * num_tokens, "a token was lost"
    return float(tokens / seconds)


def _line(turn: HttpTurn) -> str:
    return f"direct {turn.direct_tok_s:7.1f} tok/s, HTTP {turn.http_tok_s:7.1f} tok/s, ratio {turn.ratio:.3f}"


def _medians(turns: Sequence[HttpTurn], streams: Sequence[int]) -> list[dict[str, float]]:
    """Printed, and for the report."""
    medians = []
    for count in streams:
        mine = [turn for turn in turns if turn.streams == count]
        middle = HttpTurn(
            count,
            round(statistics.median(turn.direct_tok_s for turn in mine), 1),
            round(statistics.median(turn.http_tok_s for turn in mine), 1),
        )
        ratio = round(statistics.median(turn.ratio for turn in mine), 3)
        print(f"{count:>3} streams, medians: {_line(middle)}; median of the turns' ratios {ratio}")
        medians.append({**asdict(middle), "ratio": ratio, "turns": len(mine)})
    return medians
