"""Options that several commands share, as frozen objects, and how they become a loaded model."""

from __future__ import annotations

from dataclasses import dataclass, fields

from slipstream.commands.progress import LoadingBar
from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.load import OpenedModel, open_model
from slipstream.load.random.mixes import STORED_AS
from slipstream.load.random.model import RANDOM_SHAPES, open_random
from slipstream.runners.backend import Backend
from slipstream.runners.choose import choose_backend
from slipstream.sampling import NEUTRAL, DraftSetting, SamplingDefaults

SHAPE_NAMES = tuple(RANDOM_SHAPES)
STORED_NAMES = STORED_AS
SAMPLING_DEFAULTS = ("model", "neutral")
SWITCH = ("on", "off")
DEFAULTS = EngineConfig()


@dataclass(frozen=True, slots=True)
class ModelOptions:
    model: str | None = None
    mtp: str | None = None
    shape: str | None = None
    random_weights: bool = False
    vocab: int | None = None
    stored_as: str | None = None
    runner: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    draft: DraftSetting = "adaptive"
    max_depth: int = 4
    p_min: float = 0.0
    max_streams: int = 16
    max_step_tokens: int | None = None
    max_slowdown: float = 2.0
    memory: int | None = None
    kv_memory: int | None = None
    kv_dtype: str = "auto"
    state_dtype: str = "float32"
    max_context: int | None = None
    draft_vocab: int | None = None
    fp8_activations: str = "off"  # see SWITCH
    simulate_acceptance: tuple[float, ...] = ()
    prefix_cache: str = "on"  # see SWITCH
    cache_host: int | None = None
    cache_dir: str | None = None
    cache_disk: int | None = None
    sampling_defaults: str = "model"  # see SAMPLING_DEFAULTS

    @property
    def engine_config(self) -> EngineConfig:
        """By default a step has room for a full draft of every stream."""
        depth = min(self.max_depth, len(self.simulate_acceptance) or self.max_depth)  # after it nothing is accepted
        full = self.max_streams * (1 + depth) + DEFAULTS.min_chunk
        return EngineConfig(
            max_streams=self.max_streams,
            max_step_tokens=self.max_step_tokens or max(DEFAULTS.max_step_tokens, full),
            max_slowdown=self.max_slowdown,
            draft=self.draft,
            max_depth=depth,
            p_min=self.p_min,
            prefix_cache=self.prefix_cache == "on",
            cache_host=self.cache_host,
            cache_dir=self.cache_dir,
            cache_disk=DEFAULTS.cache_disk if self.cache_disk is None else self.cache_disk,
        )

    @property
    def runner_config(self) -> RunnerConfig:
        return RunnerConfig(
            self.device,
            self.dtype,
            self.kv_memory,
            self.max_context,
            self.draft_vocab,
            simulate_acceptance=self.simulate_acceptance,
            runner=self.runner,
            kv_dtype=self.kv_dtype,
            state_dtype=self.state_dtype,
            fp8_activations=self.fp8_activations == "on",
            memory=self.memory,
        )

    @property
    def backend(self) -> Backend:
        return choose_backend(self.runner_config)

    @property
    def model_name(self) -> str:
        suffix = f" with {self.vocab} tokens" if self.vocab else ""
        suffix += f" as {self.stored_as}" if self.stored_as else ""
        return (self.shape or self.model or "default") + suffix

    def open(self, *, to_load: bool = True) -> OpenedModel:
        """Reads headers only. ``to_load``: weights will be needed."""
        backend = choose_backend(self.runner_config, present=False)  # a device that is missing is an error of loading
        if self.shape is None:
            if self.random_weights or self.vocab is not None or self.stored_as is not None:
                what = "--random-weights, --stored-as and --vocab"
                raise ConfigError(f"{what} need a --shape: a model that has files keeps its own")
            return open_model(self.model, self.mtp, any_architecture=backend.any_architecture)
        if self.model is not None or self.mtp is not None:
            raise ConfigError("--shape stands for a model and its head: give no other model and no --mtp")
        if to_load and not self.random_weights:
            raise ConfigError(f"{self.shape} is a shape and has no weights of its own: say --random-weights")
        if not backend.random_shapes:
            raise ConfigError("a --shape runs on the torch runner only: say --runner torch")
        return open_random(self.shape, self.vocab, self.stored_as)

    def sampling_of(self, model: OpenedModel) -> SamplingDefaults:
        return NEUTRAL if self.sampling_defaults == "neutral" else model.sampling_defaults

    def arguments(self) -> list[str]:
        """The command-line arguments that these options came from."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {field.name for field in fields(self) if named[field.name] != field.default} - {"model"}
        words = [self.model] if self.model is not None else []
        for name in sorted(changed):
            value, flag = named[name], "--" + name.replace("_", "-")
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [flag] if value is True else [flag, shown]
        return words


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Where a benchmark's result goes, beside the terminal."""

    command: tuple[str, ...] = ()  # the arguments it was called with
    out: str | None = None  # a file that gets the JSON line appended
    save: str | None = None  # a folder that gets a file with the result; "": the repository's bench/results/
    plot: str | None = None  # an SVG file


def load_llm(options: ModelOptions, *, lines: bool = False) -> LLM:
    """``lines``: tells its progress also where there is no terminal."""
    bar = LoadingBar(lines=lines)
    try:
        return LLM.from_config(options.open(), options.engine_config, options.runner_config, bar)
    finally:
        bar.close()
