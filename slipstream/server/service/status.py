"""`/v1/status`, for the page's panel; /metrics reads it too. A read-only view of the engine.

Speeds are averages over the last seconds, from samples that the server takes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from slipstream import __version__
from slipstream.config import EngineConfig
from slipstream.engine.contract import RunnerInfo
from slipstream.engine.engine import Engine
from slipstream.engine.stats import StatsSnapshot, StreamSnapshot
from slipstream.host import resident_bytes

State = Literal["loading", "ready", "sleeping", "waking", "draining", "failed"]
ASLEEP = ("sleeping", "waking")  # the model's memory is free; work is taken, and loads it again
SAMPLE_SECONDS = 0.5
NUM_SAMPLES = 9  # so speeds are averages over four seconds


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The constant properties of the served model."""

    name: str
    architecture: str
    format: str
    runner: str
    weight_bytes: int  # head included
    kv_token_bytes: int
    state_bytes: int
    kv_row_bytes: int = 0  # of buffers beside the pool of blocks
    kv_dtype: str = ""  # of keys and values in the cache
    state_dtype: str = ""  # of recurrent states; "": there are none, or the runner does not tell


class StatusMonitor:
    def __init__(self, queue_limit: int) -> None:
        self.state: State = "loading"
        self.started = time.monotonic()
        self._queue_limit = queue_limit
        self._engine: Engine | None = None
        self._facts: ModelFacts | None = None
        self._samples: deque[tuple[float, int]] = deque(maxlen=NUM_SAMPLES)
        self._request_ids: dict[str, str] = {}  # by stream

    def loaded(self, engine: Engine, facts: ModelFacts) -> None:
        self._engine, self._facts = engine, facts
        self._samples.clear()

    def move(self, before: State, after: State) -> None:
        """Unless something else has happened meanwhile, such as a shutdown."""
        if self.state == before:
            self.state = after

    @property
    def takes_work(self) -> bool:
        return self.state == "ready" or self.state in ASLEEP

    @property
    def labels(self) -> dict[str, str] | None:
        """vLLM's labels of what is counted for the model. None while it is being loaded."""
        return None if self._facts is None else {"model_name": self._facts.name, "engine": "0"}

    @property
    def kv_dtype(self) -> str:
        return "" if self._facts is None else self._facts.kv_dtype

    @property
    def state_dtype(self) -> str:
        return "" if self._facts is None else self._facts.state_dtype

    @contextmanager
    def named(self, stream: str, request_id: str) -> Iterator[None]:
        """Meanwhile the report gives this stream the id of its HTTP request: a client finds its own by it."""
        self._request_ids[stream] = request_id
        try:
            yield
        finally:
            del self._request_ids[stream]

    def snapshot(self) -> StatsSnapshot:
        return StatsSnapshot() if self._engine is None else self._engine.snapshot()

    def sample(self) -> None:
        """Called every SAMPLE_SECONDS."""
        self._samples.append((time.monotonic(), self.snapshot().num_output_tokens))

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "version": __version__,
            "state": self.state,
            "uptime_s": round(time.monotonic() - self.started, 1),
        }
        if self._engine is not None and self._facts is not None:
            seen, info = self._engine.snapshot(), self._engine.info
            report["model"] = _model(self._facts, info)
            report["sampling_defaults"] = self._engine.config.sampling_defaults.report()
            report["device"] = {
                "runner": self._facts.runner,
                "note": info.note,
                "kv_dtype": self._facts.kv_dtype,
                "state_dtype": self._facts.state_dtype,
            }
            report["speculation"] = _speculation(seen, info, self._engine.config)
            report["load"] = self._load(seen, self._engine.config)
            report["streams"] = _streams(self._engine.streams(), self._request_ids)
            report["prefix_cache"] = _prefix_cache(seen, info, self._engine.config)
            report["memory"] = self.memory()
        return report

    def memory(self) -> dict[str, int]:
        facts, seen = self._facts, self.snapshot()
        if self.state in ASLEEP:
            facts, seen = None, StatsSnapshot()
        total = seen.num_used_blocks + seen.num_free_blocks
        block_size = 0 if self._engine is None or facts is None else self._engine.info.block_size
        return {
            "kv_blocks_total": total,
            "kv_blocks_used": seen.num_used_blocks,
            "block_size": block_size,
            "kv_bytes": 0 if facts is None else total * block_size * facts.kv_token_bytes + facts.kv_row_bytes,
            "weight_bytes": 0 if facts is None else facts.weight_bytes,
            "state_bytes": 0 if facts is None else facts.state_bytes,
            "rss_bytes": resident_bytes(),
        }

    def _load(self, seen: StatsSnapshot, config: EngineConfig) -> dict[str, Any]:
        return {
            "running": seen.num_running,
            "waiting": seen.num_waiting,
            "max_streams": config.max_streams,
            "queue_limit": self._queue_limit,
            "tokens_per_second": self._speed(),
            "generated_tokens": seen.num_output_tokens,
            "prompt_tokens": seen.num_prompt_tokens,
            "steps": seen.num_steps,
            "requests": {reason: seen.finished.get(reason, 0) for reason in ("stop", "length", "abort", "error")},
        }

    def _speed(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (began, before), (now, after) = self._samples[0], self._samples[-1]
        return round((after - before) / (now - began), 1)


def _model(facts: ModelFacts, info: RunnerInfo) -> dict[str, Any]:
    return {
        "id": facts.name,
        "architecture": facts.architecture,
        "format": facts.format,
        "context": info.max_model_len,
        "vocab": info.vocab_size,
    }


def _speculation(seen: StatsSnapshot, info: RunnerInfo, config: EngineConfig) -> dict[str, Any]:
    max_depth = min(info.max_depth, config.max_depth)
    return {
        "available": max_depth > 0,
        "why_not": None if max_depth else info.why_no_draft or "the largest depth allowed is 0",
        "policy": str(config.draft),
        "depth": seen.last_depth,
        "reason": seen.depth_reason,
        "max_depth": max_depth,
        "drafts": seen.num_drafts,
        "draft_tokens": seen.num_draft_tokens,
        "accepted_tokens": seen.num_accepted_tokens,
        "accepted_per_position": _padded(seen.accepted_per_position, max_depth),
        "drafted_per_position": _padded(seen.drafted_per_position, max_depth),
        "mean_accepted_length": round(seen.mean_accepted_length, 3),
        "tokens_per_step": round(seen.tokens_per_step, 3),
        "draft_share": round(seen.draft_share, 3),
        "plain_row_steps": seen.num_plain_steps,
    }


def _prefix_cache(seen: StatsSnapshot, info: RunnerInfo, config: EngineConfig) -> dict[str, Any]:
    return {
        "enabled": config.prefix_cache and info.keep_grid > 0,
        "queried_tokens": seen.num_cache_queries,
        "found_tokens": seen.num_cache_hits,
        "blocks": seen.num_cached_blocks,
        "states_used": seen.num_used_states,
        "states_total": seen.num_states,
    }


def _padded(counts: Sequence[int], length: int) -> list[int]:
    return [*counts, *[0] * (length - len(counts))]


def _streams(streams: Sequence[StreamSnapshot], request_ids: Mapping[str, str]) -> list[dict[str, Any]]:
    now = time.monotonic()
    return [
        {
            "id": each.id,
            "request_id": request_ids.get(each.id),
            "state": "prefill" if each.first_token_at is None else "decode",
            "prompt_tokens": each.prompt_tokens,
            "generated": each.output_tokens,
            "tokens_per_second": _stream_speed(each, now),
            "depth": each.depth,
            "draft_tokens": each.draft_tokens,
            "accepted_tokens": each.accepted_tokens,
            "gain": None if each.gain is None else round(each.gain, 3),
        }
        for each in streams
    ]


def _stream_speed(stream: StreamSnapshot, now: float) -> float:
    if stream.first_token_at is None or now <= stream.first_token_at:
        return 0.0
    return round((stream.output_tokens - 1) / (now - stream.first_token_at), 1)
