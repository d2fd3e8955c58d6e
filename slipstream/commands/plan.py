"""`slipstream plan`: the memory a model takes, from its headers or its shape alone, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict

from slipstream.commands.options import ModelOptions
from slipstream.commands.text import show, size
from slipstream.load import OpenedModel
from slipstream.load.contents import Contents, head_contents, head_place, target_contents
from slipstream.runners.backend import MemoryPlan
from slipstream.runners.choose import choose_backend

SMALL_SHARE = 0.0005  # of the weights: types below it are not listed
LENGTHS = (512, 2048, 8192, 32768, 131072)


def plan(options: ModelOptions, *, as_json: bool) -> int:
    """With --memory for a device with as much, which need not be in this machine."""
    model = options.open(to_load=False)
    chat_fault = model.tokenizer.check_chat()  # and the tokenizer's memory counts, as it does in a run
    backend = choose_backend(options.runner_config, present=options.memory is None)
    memory = backend.plan_memory(model, options.engine_config, options.memory)
    if as_json:
        print(json.dumps({**_as_dict(model, memory), "chat_fault": chat_fault}))
    else:
        _print(model, memory, options, backend.describe(model), chat_fault)
    return 0


def _as_dict(model: OpenedModel, memory: MemoryPlan) -> dict[str, object]:
    derived = {name: getattr(memory, name) for name in ("kv_pool", "states", "kept_states", "pool_tokens", "total")}
    parts = {"weight_parts": dict(memory.weight_parts)}
    return {"model": model.name, **asdict(memory), **parts, **derived, "streams_of": _streams(memory), **_files(model)}


def _files(model: OpenedModel) -> dict[str, object]:
    """What the files hold; how much of it becomes memory is the runner's."""
    target, head = target_contents(model), head_contents(model)
    described: dict[str, object] = {"files": _contents_dict(target), "head_place": head_place(model)}
    return described | {"head_files": _contents_dict(head) if head else None}


def _contents_dict(contents: Contents) -> dict[str, object]:
    return {
        "format": contents.format,
        "bytes": contents.num_bytes,
        "bits_per_weight": round(contents.bits_per_weight, 3) if contents.num_weights else None,
        "types": {dtype: round(share, 4) for dtype, share in contents.types},
    }


def _streams(memory: MemoryPlan) -> dict[int, int]:
    """How many streams fit, by the length of each."""
    lengths = [length for length in LENGTHS if length < memory.max_context] + [memory.max_context]
    return {length: memory.streams_of(length) for length in lengths}


def _print(model: OpenedModel, memory: MemoryPlan, options: ModelOptions, note: str, chat_fault: str) -> None:
    show(f"{model.name} ({model.spec.architecture}), {_head(model, options)}")
    for line in _describe(model):
        show(line)
    show(note)
    if memory.weights_note:
        show(memory.weights_note)
    print()
    if chat_fault:
        show(f"chat: a plain question fails: {chat_fault}")
        print()
    for label, num_bytes in _lines(memory, options.memory):
        print(f"  {label:<40}{size(num_bytes):>10}")
    print(f"\nfits at once, of {memory.num_slots} streams and {memory.pool_tokens} tokens in all:")
    for length, count in _streams(memory).items():
        print(f"  {count:>4} of {length:>6} tokens")
    print("more or fewer with --memory, --kv-memory, --max-streams and --max-context")


def _head(model: OpenedModel, options: ModelOptions) -> str:
    """Loaded even where only requests may turn drafting on."""
    if model.head is None:
        return model.head_reason
    off = options.engine_config.draft in ("off", 0)
    return f"with its MTP head{', for requests that ask for drafts' if off else ''}"


def _describe(model: OpenedModel) -> list[str]:
    """The model's files and those of its head, a line each."""
    lines = [f"files: {_in_words(target_contents(model))}"]
    head = head_contents(model)
    return lines if head is None else [*lines, f"head: {head_place(model)}, {_in_words(head)}".replace(": ,", ":")]


def _in_words(contents: Contents) -> str:
    if not contents.num_weights:
        return f"{contents.format}, {size(contents.num_bytes)}"
    types = ", ".join(f"{dtype} {100 * share:.1f} %" for dtype, share in contents.types if share >= SMALL_SHARE)
    sizes = f"{size(contents.num_bytes)}, {contents.bits_per_weight:.2f} bits a weight"
    return f"{contents.format}, {sizes}: {types}"


def _lines(memory: MemoryPlan, given: int | None) -> list[tuple[str, int]]:
    each = ", ".join(filter(None, (memory.state_dtype, size(memory.state_per_stream))))
    recurrent = [(f"recurrent states, {each} each", memory.states)] if memory.states else []
    kept = [(f"kept states, {size(memory.kept_state)} each", memory.kept_states)] if memory.kept_states else []
    rows = [("KV buffers, a row a stream", memory.row_buffers)] if memory.row_buffers else []
    workspace = [("workspace", memory.workspace)] if memory.workspace else []
    process = [("the process itself", memory.process)] if memory.process else []
    host = [("host memory for the prefix cache, besides", memory.host_tier)] if memory.host_tier else []
    return [
        ("weights", memory.weights),
        *((f"  {part}", num_bytes) for part, num_bytes in memory.weight_parts),
        ("MTP head", memory.head),
        (f"KV pool, {memory.kv_dtype}, {size(memory.kv_per_token)} a token", memory.kv_pool),
        *rows,
        *recurrent,
        *kept,
        *workspace,
        *process,
        (f"in all, of {size(given)} given" if given else "in all", memory.total),
        *host,
    ]
