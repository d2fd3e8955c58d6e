"""How much memory a model and its streams take, computed before a weight is read or a stream admitted.

What caches will hold is asked of the model itself: one token goes through it without being evaluated, and the shapes
of what it leaves behind tell. Each slot has places of its own, so what is admitted always fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import ConfigError
from slipstream.runners.mlx.caches import KvCache
from slipstream.runners.mlx.trunk import Cache

SHARE_OF_FREE = 0.8
LEAST_TOKENS = 32


@dataclass(frozen=True, slots=True)
class StreamCost:
    """Bytes."""

    kv_per_token: int
    state: int  # recurrent layers, whatever the length


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, unless the name says otherwise."""

    weights: int  # the head's included
    cost: StreamCost
    num_slots: int
    max_context: int  # tokens
    num_places: int  # tokens a slot has room for: drafts and padding stand behind the context
    block_size: int

    @property
    def blocks_per_slot(self) -> int:
        return -(-self.num_places // self.block_size)

    @property
    def streams(self) -> int:
        """When every slot is as long as it may be."""
        return self.num_slots * (self.num_places * self.cost.kv_per_token + self.cost.state)

    @property
    def total(self) -> int:
        return self.weights + self.streams


def stream_cost(caches: Sequence[Cache]) -> StreamCost:
    """From what one token of one stream left in the caches; nothing of it is evaluated."""
    kv = [array for cache in caches if isinstance(cache, KvCache) for array in cache.arrays()]
    states = [array for cache in caches if not isinstance(cache, KvCache) for array in cache.arrays()]
    per_token = sum(array.nbytes // (array.shape[0] * array.shape[2]) for array in kv)
    return StreamCost(per_token, sum(array.nbytes for array in states))


def plan_memory(
    cost: StreamCost, weights: int, max_context: int, max_depth: int, engine: EngineConfig, config: RunnerConfig
) -> MemoryPlan:
    """``max_context``: the model's own. The context is as long as every slot can have at once."""
    context = min(config.max_context or max_context, max_context)
    ahead = 2 * (1 + max_depth)  # drafts fed behind the last token, and padding beside longer rows
    budget = config.kv_memory if config.kv_memory is not None else int((free_bytes() - weights) * SHARE_OF_FREE)
    each = budget // engine.max_streams - cost.state
    if cost.kv_per_token:
        context = min(context, each // cost.kv_per_token - ahead)
    if each < 0 or context < min(LEAST_TOKENS, max_context):
        raise ConfigError(
            f"{budget / 1e6:.1f} MB are left for {engine.max_streams} streams, of which each takes "
            f"{cost.state / 1e6:.1f} MB and {cost.kv_per_token / 1e3:.1f} kB a token: "
            "give more kv_memory or allow fewer max_streams"
        )
    return MemoryPlan(weights, cost, engine.max_streams, context, context + ahead, engine.block_size)


def free_bytes() -> int:
    """What this process may still take: on a GPU what Metal recommends, else what the system has."""
    if mx.default_device().type == mx.DeviceType.gpu:
        return int(mx.device_info()["max_recommended_working_set_size"]) - mx.get_active_memory()
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 << 30
