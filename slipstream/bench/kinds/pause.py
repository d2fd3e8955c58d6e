"""`slipstream bench pause`: the asyncio loop's worst pause while streams generate.

A ticker sleeps a millisecond at a time in the loop that also consumes and detokenizes every stream; what it oversleeps
is time in which the loop served no client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from slipstream.assemble import make_engine
from slipstream.bench.harness.mtp_bench_prompts import MTP_BENCH_PROMPTS
from slipstream.bench.harness.report import check_writable, write_report
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.commands.progress import LoadingBar, say
from slipstream.engine.async_engine import AsyncEngine
from slipstream.load import OpenedModel, StreamingDetokenizer
from slipstream.sampling import SamplingParams

TICK = 0.001


def pause(options: ModelOptions, num_streams: int, num_tokens: int, to: ReportOptions) -> int:
    check_writable(to)
    model = options.open()
    bar = LoadingBar(lines=True)
    engine = AsyncEngine(make_engine(model, options.engine_config, options.backend, progress=bar))
    result = asyncio.run(measure(engine, model, num_streams, num_tokens, bar))
    print(
        f"{result['tokens']} tokens in {num_streams} streams; the loop's worst pause was {result['worst_ms']} ms, "
        f"the 99th percentile {result['p99_ms']} ms"
    )
    write_report("pause", options, to, {"streams": num_streams, **result})
    return 0


async def measure(
    engine: AsyncEngine, model: OpenedModel, num_streams: int, num_tokens: int, bar: LoadingBar
) -> dict[str, float]:
    await engine.start()
    bar.close()
    say(f"{num_streams} streams of {num_tokens} tokens")  # a line each token would be a pause of our own
    try:
        over: list[float] = []
        ticker = asyncio.create_task(_tick(over.append))
        texts = list(MTP_BENCH_PROMPTS.values())
        streams = [_consume(engine, model, texts[i % len(texts)], num_tokens) for i in range(num_streams)]
        counts = await asyncio.gather(*streams)
        ticker.cancel()
        over.sort()
        worst, p99 = over[-1], over[int(len(over) * 0.99)]
        return {"tokens": sum(counts), "worst_ms": round(worst * 1e3, 2), "p99_ms": round(p99 * 1e3, 2)}
    finally:
        await engine.close()


async def _tick(note: Callable[[float], None]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK)
        note(time.perf_counter() - began - TICK)


async def _consume(engine: AsyncEngine, model: OpenedModel, text: str, num_tokens: int) -> int:
    tokens = model.tokenizer.chat([{"role": "user", "content": text}])
    detokenizer = StreamingDetokenizer(model.tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    count = 0
    async with engine.submit(tokens, params) as stream:
        async for event in stream:
            detokenizer.push(event.tokens)
            count += len(event.tokens)
    return count
