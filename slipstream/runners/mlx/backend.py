"""MLX as a backend: mlx-lm's models under our caches and our step."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import ConfigError
from slipstream.load import OpenedModel
from slipstream.load.random.model import RandomCheckpoint
from slipstream.runners.backend import GgufTensor, MemoryPlan, Progress, StepTraffic, ignore_progress
from slipstream.runners.mlx.device import MlxDevice
from slipstream.runners.mlx.loading import MlxRunner, load_runner, model_shape
from slipstream.runners.mlx.memory import ModelShape, plan_memory, step_traffic
from slipstream.runners.mlx.peer import MlxLmPeer
from slipstream.runners.simulate import simulation_note


class MlxBackend:
    name = "mlx"
    any_architecture = True
    random_shapes = False

    def __init__(self, config: RunnerConfig) -> None:
        if config.kv_dtype != "auto":
            raise ConfigError(
                f"kv_dtype {config.kv_dtype} is the torch runner's: on MLX keys and values stay in the model's type"
            )
        self._config = config
        self._known: tuple[OpenedModel, int, ModelShape] | None = None
        self.device = MlxDevice(config.device)

    def describe(self, model: OpenedModel) -> str:
        device = self.device.name if self.device.kind == "gpu" else "cpu"
        return f"mlx {version('mlx')}, {device}, {self._shape(model).dtype}"

    def plan_memory(self, model: OpenedModel, engine: EngineConfig, free: int | None = None) -> MemoryPlan:
        return plan_memory(self._shape(model, engine), model.spec.max_context, engine, self._config, free)

    def load(
        self,
        model: OpenedModel,
        engine: EngineConfig,
        plan: MemoryPlan | None = None,
        progress: Progress = ignore_progress,
    ) -> MlxRunner:
        self.device.use()
        memory = plan or self.plan_memory(model, engine)
        return load_runner(model, engine, self._config, memory, self._note(model), progress)

    def _note(self, model: OpenedModel) -> str:
        return self.describe(model) + simulation_note(self._config.simulate_acceptance)

    def step_traffic(self, model: OpenedModel) -> StepTraffic:
        return step_traffic(self._shape(model), model.spec.vocab_size)

    def gguf_twin(self, checkpoint: RandomCheckpoint) -> Iterator[GgufTensor]:
        raise ConfigError("random weights are made by the torch runner only")

    def library_peer(self, model: OpenedModel) -> MlxLmPeer:
        return MlxLmPeer(model, self._config.dtype)

    def _shape(self, model: OpenedModel, engine: EngineConfig | None = None) -> ModelShape:
        """Found once for a model and a depth."""
        if self._known is not None and self._known[0] is model:
            _, max_depth, shape = self._known
            if engine is None or engine.max_depth == max_depth:
                return shape
        self.device.use()
        engine = engine or EngineConfig()
        shape = model_shape(model, engine, self._config)
        self._known = (model, engine.max_depth, shape)
        return shape
