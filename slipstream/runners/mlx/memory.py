"""How much memory a model and its streams take, computed before a weight is read or a stream admitted.

The model itself shows what caches will hold: one token goes through it without being evaluated, and the
shapes of the caches afterwards are read. Each slot has positions of its own. What the prefix cache holds is copied out
of them, so with it there are blocks beside the slots' own room, and states beside theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import ConfigError
from slipstream.host import available_bytes, resident_bytes
from slipstream.load.contents import part_of
from slipstream.runners.backend import MemoryPlan, StepTraffic
from slipstream.runners.mlx.caches import KvCache
from slipstream.runners.mlx.target import Cache

SHARE_OF_FREE = 0.8
MIN_TOKENS = 32
SHARE_OF_STATES = 0.1  # of the memory for streams: what states that the prefix cache keeps take
MIN_STATES = 8
SHARE_OF_SLOTS = 1 / 3  # blocks at least, of those that would hold all slots at full length; and enough for one slot


@dataclass(frozen=True, slots=True)
class StreamCost:
    """Bytes."""

    kv_per_token: int
    state: int  # recurrent layers, whatever the length


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as it will be loaded. Bytes, unless the name says otherwise."""

    dtype: str  # of activations
    weights: Mapping[str, int]  # by name
    weights_note: str  # as in MemoryPlan
    head: Mapping[str, int]
    loading: int  # beside both, while they are read
    cost: StreamCost
    max_depth: int
    draft_vocab: int  # the head drafts among the first so many tokens
    expert_share: float  # of the experts, those that one token chooses


def stream_cost(caches: Sequence[Cache]) -> StreamCost:
    """From what one token of one stream left in the caches; nothing of it is evaluated."""
    kv = [array for cache in caches if isinstance(cache, KvCache) for array in cache.arrays()]
    states = [array for cache in caches if not isinstance(cache, KvCache) for array in cache.arrays()]
    per_token = sum(array.nbytes // (array.shape[0] * array.shape[2]) for array in kv)
    return StreamCost(per_token, sum(array.nbytes for array in states))


def slot_positions(max_context: int, max_depth: int) -> int:
    """That a slot has room for: after the context drafts, and padding beside longer rows."""
    return max_context + 2 * (1 + max_depth)


def plan_memory(
    shape: ModelShape, max_context: int, engine: EngineConfig, config: RunnerConfig, free: int | None = None
) -> MemoryPlan:
    """``max_context``: the model's own. The context is as long as every slot can have at once."""
    weights, head, cost = sum(shape.weights.values()), sum(shape.head.values()), shape.cost
    free, process = free_bytes() if free is None else free, resident_bytes()
    if config.memory is not None:
        free = min(free, config.memory - process)
    left = free - weights - head - shape.loading
    if left <= 0:
        more = "give more memory, or " if config.memory is not None else ""
        raise ConfigError(
            f"loading the weights takes {(free - left) / 1e9:.2f} GB, but {max(free, 0) / 1e9:.2f} GB are free: {more}"
            "take a model with fewer weights or with fewer bits a weight"
        )
    budget = config.kv_memory if config.kv_memory is not None else int(left * SHARE_OF_FREE)
    wanted = min(config.max_context or max_context, max_context)
    plans = [
        _sized(shape, wanted, engine, budget, cached) for cached in ([True] if engine.prefix_cache else []) + [False]
    ]
    fitting = [plan for plan in plans if plan is not None]
    if not fitting:
        raise ConfigError(
            f"{budget / 1e6:.1f} MB are left for {engine.max_streams} streams, of which each takes "
            f"{cost.state / 1e6:.1f} MB and {cost.kv_per_token / 1e3:.1f} kB a token: "
            "give more kv_memory or allow fewer max_streams"
        )
    return replace(
        fitting[0],
        weights=weights,
        weights_note=shape.weights_note,
        weight_parts=_parts(shape.weights),
        head=head,
        workspace=shape.loading,
        process=process,
        kv_dtype=shape.dtype,
    )


def _parts(weights: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """By part of the model, the largest first."""
    found: Counter[str] = Counter()
    for name, size in weights.items():
        found[part_of(_canonical(name))] += size
    return tuple(found.most_common())


def _canonical(name: str) -> str:
    """The name that a checkpoint has for a parameter of mlx-lm's, or for what it is packed with."""
    stem, _, kind = name.removeprefix("language_model.").replace(".switch_mlp.", ".experts.").rpartition(".")
    return f"{stem}.weight" if kind in ("scales", "biases") else f"{stem}.{kind}"


def _sized(shape: ModelShape, max_context: int, engine: EngineConfig, budget: int, cached: bool) -> MemoryPlan | None:
    """The caches of all slots, with or without a prefix cache. None: they do not fit."""
    cost, num_slots = shape.cost, engine.max_streams
    most_blocks = num_slots * -(-slot_positions(max_context, shape.max_depth) // engine.block_size)
    num_states = _num_states(cost, budget, most_blocks) if cached else 0
    if cached and cost.state and not num_states:
        return None
    budget -= (num_slots + num_states) * cost.state
    share = max(SHARE_OF_SLOTS, 1 / num_slots) if cached else 0.0
    context = max_context
    if cost.kv_per_token:
        room = int(budget / (1 + share)) // num_slots // cost.kv_per_token
        context = min(context, room - slot_positions(0, shape.max_depth))
    if budget < 0 or context < min(MIN_TOKENS, max_context):
        return None
    positions = slot_positions(context, shape.max_depth)
    in_slots = num_slots * -(-positions // engine.block_size)
    rows = num_slots * positions * cost.kv_per_token if cached else 0
    num_blocks = in_slots
    if cached and cost.kv_per_token:
        left = (budget - rows) // (engine.block_size * cost.kv_per_token)
        num_blocks = min(in_slots, max(-(-in_slots // num_slots), left))
    return MemoryPlan(
        weights=0,
        head=0,
        kv_per_token=cost.kv_per_token,
        state_per_stream=cost.state,
        workspace=0,
        process=0,
        num_slots=num_slots,
        num_blocks=num_blocks,
        block_size=engine.block_size,
        max_context=context,
        num_states=num_states,
        kept_state=cost.state,
        shared_pool=False,
        row_buffers=rows,
    )


def _num_states(cost: StreamCost, budget: int, most_blocks: int) -> int:
    """That the prefix cache may keep. ``most_blocks``: of all slots at full length; a state is kept at a block's end"""
    if not cost.state:
        return 0
    wanted = max(MIN_STATES, int(budget * SHARE_OF_STATES) // cost.state)
    return max(0, min(wanted, most_blocks, budget // 4 // cost.state))


def keep_grid(plan: MemoryPlan) -> int:
    """Of which numbers of tokens rows keep something for others: see RunnerInfo. 0: of none."""
    blocks = plan.row_buffers > 0 or not plan.kv_per_token
    states = plan.num_states > 0 or not plan.state_per_stream
    return plan.block_size if blocks and states else 0


def step_traffic(shape: ModelShape, vocab_size: int) -> StepTraffic:
    embedding, output = _named(shape.weights, "embed_tokens"), _named(shape.weights, "lm_head")
    dense, experts = _dense_and_experts(shape.weights)
    return StepTraffic(
        dense - (embedding if output else 0),
        experts,
        *_dense_and_experts(shape.head),
        draft_output=(output or embedding) * shape.draft_vocab // vocab_size,
        kv_per_token=shape.cost.kv_per_token,
        states=shape.cost.state,
        expert_share=shape.expert_share,
    )


def _dense_and_experts(sizes: Mapping[str, int]) -> tuple[int, int]:
    experts = _named(sizes, "switch_mlp")
    return sum(sizes.values()) - experts, experts


def _named(sizes: Mapping[str, int], part: str) -> int:
    return sum(size for name, size in sizes.items() if part in name.split("."))


def free_bytes() -> int:
    """What this process may still take: on a GPU what Metal recommends, else what the system has."""
    if mx.default_device().type == mx.DeviceType.gpu:
        return int(mx.device_info()["max_recommended_working_set_size"]) - mx.get_active_memory()
    return available_bytes()
