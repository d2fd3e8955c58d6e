"""Steps of made-up rows on the CPU: what attention, its cache writes and the recurrence launch for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from slipstream.engine.contract import MAX_KEEPS
from slipstream.load.spec import GdnSpec
from slipstream.runners.cuda.kernels.attention.attention import attend
from slipstream.runners.cuda.kernels.attention.rope import rope_store
from slipstream.runners.cuda.kernels.recurrent.gdn import gdn_mix
from slipstream.runners.torch.caches import FP8, GdnRings, LayerKv, coded_layer, kv_bytes
from slipstream.runners.torch.ops import HeadShape, Rotary

BF16 = torch.bfloat16


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def step(num_tokens: int, tile_size: int, context: int) -> Any:
    num_rows = num_tokens // tile_size
    rows = {name: ints(num_rows) for name in ("row_slots", "row_offsets", "row_starts", "row_fed")}
    tokens = {name: ints(num_tokens) for name in ("positions", "token_slots", "token_rows")}
    tiles = {"tile_rows": ints(num_rows), "tile_firsts": ints(num_rows), "tile_size": tile_size}
    tokens["rope_positions"] = tokens["positions"]
    return SimpleNamespace(**rows, **tokens, **tiles, block_table=ints(64, 4096), context_hint=context)


def cache(heads: HeadShape, dtype: torch.dtype) -> LayerKv:
    if dtype == FP8:
        num_bytes = kv_bytes(heads.num_kv * 16, heads.dim, FP8)
        return coded_layer(torch.empty(2, 8, num_bytes, dtype=torch.uint8), (heads.num_kv, 16, heads.dim))
    return LayerKv(*torch.empty(2, 8, heads.num_kv, 16, heads.dim, dtype=dtype))


def attention(
    heads: HeadShape,
    num_tokens: int,
    tile_size: int,
    context: int,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
) -> None:
    wide = torch.empty(num_tokens, 2 * heads.num_q * heads.dim, dtype=dtype)
    q, gate = wide.chunk(2, dim=1)
    attend(q, heads, cache(heads, kv_dtype or dtype), step(num_tokens, tile_size, context), gate)


def rope(heads: HeadShape, num_tokens: int, half: int, kv_dtype: torch.dtype = BF16) -> None:
    mixed = torch.empty(num_tokens, heads.qkv_width, dtype=BF16)
    rotary = Rotary(torch.empty(64, half), torch.empty(64, half))
    weight = torch.empty(heads.dim)
    rope_store(mixed, heads, rotary, cache(heads, kv_dtype), step(num_tokens, 1, 64), (weight, weight, 1e-6))


def recurrence(
    num_rows: int,
    num_tokens: int,
    has_prompts: bool = False,
    dtype: torch.dtype = BF16,
    max_keeps: int = MAX_KEEPS,
    states: torch.dtype = torch.float32,
) -> None:
    gdn = GdnSpec(16, 48, 128, 128, 4)
    cache = GdnRings(gdn, 1, 2, 2, 3, torch.device("cpu"), dtype, states).layers[0]
    width = gdn.conv_channels + gdn.num_v_heads * gdn.v_dim + 2 * gdn.num_v_heads
    batch = step(num_tokens, num_tokens // num_rows, 512)
    batch.num_rows, batch.has_prompts, batch.max_replay = num_rows, has_prompts, 3
    batch.row_committed, batch.row_replay, batch.row_stores = ints(num_rows), ints(num_rows), ints(num_rows)
    batch.keep_positions, batch.keep_states = ints(num_rows * MAX_KEEPS), ints(num_rows * MAX_KEEPS)
    batch.max_keeps = max_keeps
    vectors = (torch.empty(gdn.num_v_heads), torch.empty(gdn.num_v_heads), torch.empty(gdn.v_dim))
    conv = torch.empty(4, gdn.conv_channels, dtype=dtype)
    mixed = torch.empty(num_tokens, width, dtype=dtype)
    gdn_mix(mixed, conv, *vectors, 1e-6, gdn, cache.state, cache.ring, batch)
