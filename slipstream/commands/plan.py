"""`slipstream plan`: the memory a model takes, from its headers alone, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict

from slipstream.commands.options import ModelOptions
from slipstream.commands.text import size
from slipstream.load import open_model
from slipstream.runners.torch.loading import memory_of
from slipstream.runners.torch.memory import MemoryPlan

LENGTHS = (512, 2048, 8192, 32768, 131072)


def plan(options: ModelOptions, *, as_json: bool) -> int:
    model = open_model(options.model, options.mtp)
    model.tokenizer.eos_token_ids  # noqa: B018 - opened here, so that its memory counts as it does in a run
    memory = memory_of(model, options.engine_config, options.runner_config)
    if as_json:
        print(json.dumps({"model": model.name, **asdict(memory), "total": memory.total}))
        return 0
    head = "with its MTP head" if model.head is not None else f"without drafting: {model.head_reason}"
    print(f"{model.name} ({model.spec.family}), {head}")
    for label, value in _lines(memory):
        print(f"  {label:<28}{value:>12}")
    for length in LENGTHS:
        if length <= memory.max_context:
            print(f"  streams of {length:>6} tokens: {memory.streams_of(length):>4}")
    return 0


def _lines(memory: MemoryPlan) -> list[tuple[str, str]]:
    return [
        ("weights", size(memory.weights)),
        ("MTP head", size(memory.head)),
        ("KV per token", size(memory.kv_per_token)),
        (f"KV pool, {memory.pool_tokens} tokens", size(memory.kv_pool)),
        ("recurrent state per stream", size(memory.state_per_stream)),
        (f"states of {memory.num_slots} streams", size(memory.states)),
        ("workspace", size(memory.workspace)),
        ("interpreter and libraries", size(memory.process)),
        ("in all", size(memory.total)),
    ]
