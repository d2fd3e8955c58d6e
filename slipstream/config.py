"""What the operator chose: frozen, validated once, handed down in small pieces.

Knows no command line and no file; the command line fills these in.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.sampling.defaults import NEUTRAL, SamplingDefaults
from slipstream.sampling.params import MAX_DEPTH, DraftSetting, check_draft


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine shares one runner among its streams."""

    max_streams: int = 16  # streams that run at once
    max_step_tokens: int = 512  # tokens one step feeds at most, all rows together; a runner may allow more
    min_chunk: int = 32  # of those, kept for prompts while there is one to read
    max_slowdown: float = 2.0  # of a step that decodes, by the prompt tokens it reads, as a factor
    draft: DraftSetting = "adaptive"
    max_depth: int = 4
    p_min: float = 0.0
    block_size: int = 16
    prefix_cache: bool = True  # a prompt that begins like an earlier one is computed from where they part
    cache_host: int | None = None  # bytes of host memory for cached prompts; None: none, or enough for cache_dir
    cache_dir: str | None = None  # a folder for cached prompts, kept beyond this process; None: they end with it
    cache_disk: int = 20_000_000_000  # bytes of that folder, at most
    sampling_defaults: SamplingDefaults = NEUTRAL  # of requests that leave fields out; the server applies them

    def __post_init__(self) -> None:
        self._check_int("max_streams", 1, 1 << 16)
        self._check_int("max_step_tokens", 1, 1 << 24)
        self._check_int("min_chunk", 1, 1 << 24)
        self._check_int("max_depth", 0, MAX_DEPTH)
        self._check_int("block_size", 1, 1 << 16)
        if self.cache_host is not None:
            self._check_int("cache_host", 0, 1 << 60)
        self._check_int("cache_disk", 0, 1 << 60)
        if self.cache_dir is not None and (not isinstance(self.cache_dir, str) or not self.cache_dir):
            raise ConfigError(f"cache_dir must name a folder, not {self.cache_dir!r}")
        if not self.prefix_cache and (self.cache_dir is not None or self.cache_host):
            raise ConfigError("prefix_cache is off: cache_dir and cache_host, where it would go, have no meaning then")
        check_draft(self.draft)
        if not isinstance(self.p_min, (int, float)) or not 0.0 <= self.p_min <= 1.0:
            raise ConfigError(f"p_min must be a number from 0 to 1, not {self.p_min!r}")
        if not isinstance(self.max_slowdown, (int, float)) or not 1.0 <= self.max_slowdown <= 1e6:
            raise ConfigError(f"max_slowdown must be a number from 1 to 1000000, not {self.max_slowdown!r}")
        needed = self.max_streams + self.min_chunk
        if self.max_step_tokens < needed:
            raise ConfigError(
                f"max_step_tokens must be at least max_streams + min_chunk = {needed}, not {self.max_step_tokens}"
            )

    def _check_int(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {value!r}")


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What computes, on which device, and in what format a model is held."""

    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1", ...
    dtype: str = "auto"  # "auto", or how matrices are stored: see DTYPES
    kv_memory: int | None = None  # bytes for KV and recurrent state; None: chosen from what is free
    max_context: int | None = None  # None: the model's own
    draft_vocab: int | None = None  # the head drafts among the first n tokens; 0: all; None: chosen by size
    kernels: bool = True  # False: plain PyTorch operations even where we have our own kernels
    # For benchmarks: acceptance by chance instead of comparison; the chance that the first 1, 2, ... are accepted.
    simulate_acceptance: tuple[float, ...] = ()
    runner: str = "auto"  # the array library: see RUNNERS
    kv_dtype: str = "auto"  # of keys and values in the cache: see KV_DTYPES
    fp8_activations: bool = False  # on a GPU, beside matrices in FP8: round activations to FP8 where that is faster
    state_dtype: str = "float32"  # in which recurrent states are stored: see STATE_DTYPES
    memory: int | None = None  # bytes of the device to use at most, for everything; None: what is free

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            raise ConfigError(f"runner must be one of {', '.join(RUNNERS)}, not {self.runner!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {self.kv_dtype!r}")
        if self.state_dtype not in STATE_DTYPES:
            raise ConfigError(f"state_dtype must be one of {', '.join(STATE_DTYPES)}, not {self.state_dtype!r}")
        for name in ("memory", "kv_memory", "max_context", "draft_vocab"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ConfigError(f"{name} must be a whole number, not {value!r}")
        if self.max_context == 0:
            raise ConfigError("max_context must be at least 1 token")
        rates = self.simulate_acceptance
        if not all(before >= after >= 0.0 for before, after in zip((1.0, *rates), rates)):
            raise ConfigError(f"simulate_acceptance must fall from at most 1 to at least 0, not {rates}")

    @property
    def for_triton(self) -> str:
        """The option, if there is one, that only the Triton kernels of a CUDA GPU have."""
        if self.fp8_activations:
            return "fp8_activations"
        return "" if self.state_dtype == "float32" else f"state_dtype {self.state_dtype}"


RUNNERS = ("auto", "torch", "mlx")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64", "int8", "int4", "fp8")
KV_DTYPES = ("auto", "fp8")  # auto: the type of activations; fp8: e4m3, decision 21
STATE_DTYPES = ("float32", "float16", "bfloat16")  # sums are float32 in any case: decision 23
