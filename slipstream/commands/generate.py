"""`slipstream generate`: prompts in, answers out; `--json` with tokens and stats, one object a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from slipstream.commands.options import ModelOptions, load_llm
from slipstream.commands.text import summary
from slipstream.errors import ConfigError
from slipstream.llm import LLM, Output
from slipstream.sampling import SamplingParams

STDIN = "-"


def generate(
    options: ModelOptions, prompts: Sequence[str], sampling: Mapping[str, Any], *, raw: bool, as_json: bool
) -> int:
    """``sampling``: the parameters that were given; the others are the model's defaults."""
    if not prompts:
        raise ConfigError(
            "generate needs something to answer: --prompt TEXT, or --prompt - to read it from standard input"
        )
    prompts = [sys.stdin.read() if prompt == STDIN else prompt for prompt in prompts]
    with load_llm(replace(options, max_streams=min(options.max_streams, len(prompts)))) as llm:
        chat = not raw and llm.tokenizer.has_chat_template
        params = SamplingParams(**options.sampling_of(llm.model).merged(sampling))
        encoded = [_encode(llm, prompt, chat) for prompt in prompts]
        outputs = llm.generate(encoded, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            print(_as_json(llm, prompt, output) if as_json else output.text, flush=True)
            if not as_json:
                print(summary(output.stats), file=sys.stderr)
    return 0


def _encode(llm: LLM, prompt: str, chat: bool) -> list[int]:
    return llm.chat_tokens([{"role": "user", "content": prompt}]) if chat else llm.tokens_of(prompt)


def _as_json(llm: LLM, prompt: str, output: Output) -> str:
    report = {
        "model": llm.model.name,
        "prompt": prompt,
        "text": output.text,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stats": asdict(output.stats),
        "speculation": output.stats.speculation,
    }
    return json.dumps(report, ensure_ascii=False)
