"""The requests of a benchmark's streams: random ids for a shape, the nine prompts where there is text."""

from __future__ import annotations

import random
from collections.abc import Sequence

from slipstream.bench.harness.mtp_bench_prompts import MTP_BENCH_PROMPTS
from slipstream.bench.harness.traffic import StreamRequest
from slipstream.llm import LLM
from slipstream.sampling import DraftSetting, SamplingParams

RANDOM_PROMPT = 128  # tokens, by default


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=length)


def prompts(llm: LLM, count: int, length: int | None, seed: int = 0) -> list[list[int]]:
    """``length`` None: real text where the model has a chat template, else random ids of the usual length."""
    if length is None and llm.tokenizer.has_chat_template:
        texts = list(MTP_BENCH_PROMPTS.values())
        chats = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(count)]
        return [llm.chat_tokens(chat) for chat in chats]
    vocab_size = llm.engine.info.vocab_size
    return [random_prompt(length or RANDOM_PROMPT, vocab_size, seed + i) for i in range(count)]


def stream_requests(
    prompts: Sequence[Sequence[int]], num_new: int, temperature: float, draft: DraftSetting, seed: int = 0
) -> list[StreamRequest]:
    """One a prompt, to its full length, each stream with a seed of its own."""
    return [
        StreamRequest(
            prompt, SamplingParams(temperature, seed=seed + i, max_tokens=num_new, ignore_eos=True, draft=draft)
        )
        for i, prompt in enumerate(prompts)
    ]
