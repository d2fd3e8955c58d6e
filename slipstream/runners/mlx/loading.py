"""Puts a runner together: weights, head, memory, caches. Nothing large is read before the memory plan allows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import RowJoin, RunnerInfo
from slipstream.errors import ConfigError, HeadError
from slipstream.load import OpenedModel
from slipstream.runners.host.drafter import Drafter, MtpDrafter, NoDrafter
from slipstream.runners.host.runner import HostRunner
from slipstream.runners.mlx.caches import FIRST_LENGTH, FeedHolder, KvCache
from slipstream.runners.mlx.grid import Grids
from slipstream.runners.mlx.heads import load_head
from slipstream.runners.mlx.host_model import MlxHead, MlxModel
from slipstream.runners.mlx.memory import MemoryPlan, StreamCost, plan_memory, stream_cost
from slipstream.runners.mlx.models import load_lazily
from slipstream.runners.mlx.mtp import MtpHead
from slipstream.runners.mlx.states import RecurrentCache
from slipstream.runners.mlx.trunk import OpaqueTrunk, OpenTrunk, Trunk, make_caches, tape_recurrences
from slipstream.runners.rows import RowSpan
from slipstream.runners.simulate import Simulation, simulation_note
from slipstream.sampling.params import SamplingParams

DRAFT_VOCAB = 32768  # a draft pass over all of a large vocabulary reads mostly the output matrix

MlxRunner = HostRunner[mx.array, Grids]
Progress = Callable[[int], None]  # called with the bytes just read
log = logging.getLogger(__name__)


def ignore_progress(num_bytes: int) -> None:
    """Nobody watches."""


def load_runner(
    model: OpenedModel, engine: EngineConfig, config: RunnerConfig, progress: Progress = ignore_progress
) -> MlxRunner:
    _use_device(config.device)
    return _Loader(model, engine, config).load(progress)


def _use_device(name: str) -> None:
    """``auto``: the GPU where there is one."""
    if name not in ("auto", "cpu"):
        raise ConfigError(f"on MLX, device is auto or cpu, not {name!r}")
    if name == "cpu":
        mx.set_default_device(mx.cpu)


class _Loader:
    def __init__(self, model: OpenedModel, engine: EngineConfig, config: RunnerConfig) -> None:
        self._opened, self._engine, self._config = model, engine, config
        self._architecture = model.spec.architecture
        self._model = load_lazily(model, config.dtype)
        self._trunk: Trunk = OpaqueTrunk(self._model) if self._architecture == "other" else OpenTrunk(self._model)
        self._head, self._why_no_draft = self._find_head()
        self._max_depth = engine.max_depth if self._head is not None else 0
        tape_recurrences(self._model)

    def load(self, progress: Progress) -> MlxRunner:
        weights: list[mx.array] = [array for _, array in tree_flatten(self._model.parameters())]
        if self._head is not None:
            weights += [array for _, array in tree_flatten(self._head.parameters())]
        num_bytes = sum(array.nbytes for array in weights)
        memory = plan_memory(
            self._stream_cost(), num_bytes, self._opened.spec.max_context, self._max_depth, self._engine, self._config
        )
        for array in weights:
            mx.eval(array)
            progress(array.nbytes)
        return self._runner(memory)

    def _find_head(self) -> tuple[MtpHead | None, str]:
        """The head, or why there is none: one that does not fit never stops the model."""
        if self._opened.head is None:
            return None, self._opened.head_reason
        if self._engine.max_depth == 0:
            return None, "max_depth is 0"
        try:
            args = self._trunk.args if isinstance(self._trunk, OpenTrunk) else None
            return load_head(self._opened.head, self._architecture, args, _activation_dtype(self._model)), ""
        except HeadError as error:
            return None, f"no MTP head: {error}"

    def _stream_cost(self) -> StreamCost:
        """One token through model and head, not evaluated: the shapes of what it leaves in the caches."""
        model = self._host_model(1, FIRST_LENGTH)
        model.join(RowJoin(0, (0,), 1, SamplingParams(), 0, 0.0))
        batch = model.lay_out([RowSpan(0, 0, 0, 1)])
        hidden = model.forward([0], batch)
        if self._head is not None:
            self._host_head(model).forward(hidden, [0], batch)
        return stream_cost(model.all_caches)

    def _host_model(self, max_rows: int, max_length: int) -> MlxModel:
        holder = FeedHolder()
        caches = make_caches(self._model, holder, max_rows, max_length, self._max_depth)
        head_cache = KvCache(holder, max_rows, max_length) if self._head is not None else None
        pads = not any(isinstance(cache, RecurrentCache) for cache in caches)
        return MlxModel(self._trunk, caches, head_cache, holder, self._max_depth, pads)

    def _host_head(self, model: MlxModel) -> MlxHead:
        assert self._head is not None
        assert isinstance(self._trunk, OpenTrunk)
        vocab = self._opened.spec.vocab_size
        asked = self._config.draft_vocab
        drafted = (DRAFT_VOCAB if vocab > 2 * DRAFT_VOCAB else 0) if asked is None else asked
        if 0 < drafted < vocab:
            return MlxHead(model, self._trunk, self._head, self._trunk.output_rows(drafted), drafted)
        return MlxHead(model, self._trunk, self._head, self._trunk.unembed, vocab)

    def _runner(self, memory: MemoryPlan) -> MlxRunner:
        log.info("memory: weights %d bytes, streams at most %d", memory.weights, memory.streams)
        model = self._host_model(memory.num_slots, memory.num_places)
        survival = self._config.simulate_acceptance
        simulation = Simulation(survival, self._max_depth) if survival else None
        drafter: Drafter[mx.array, Grids] = NoDrafter()
        if self._head is not None:
            drafter = MtpDrafter(model, self._host_head(model), self._max_depth, simulation)
        return HostRunner(self._info(memory), model, drafter, simulation)

    def _info(self, memory: MemoryPlan) -> RunnerInfo:
        return RunnerInfo(
            num_slots=memory.num_slots,
            num_blocks=memory.num_slots * memory.blocks_per_slot,
            block_size=memory.block_size,
            max_context=memory.max_context,
            vocab_size=self._opened.spec.vocab_size,
            max_depth=self._max_depth,
            why_no_draft=self._why_no_draft,
            stops_early=mx.default_device().type == mx.DeviceType.cpu,
            note=self._note() + simulation_note(self._config.simulate_acceptance),
        )

    def _note(self) -> str:
        dtype = str(_activation_dtype(self._model)).removeprefix("mlx.core.")
        return f"mlx {version('mlx')}, {_device_name()}, {dtype}"


def _device_name() -> str:
    return str(mx.device_info()["device_name"]) if mx.default_device().type == mx.DeviceType.gpu else "cpu"


def _activation_dtype(model: Any) -> mx.Dtype:
    """That of the norms: they are never packed."""
    norms = (array for name, array in tree_flatten(model.parameters()) if name.endswith("norm.weight"))
    found: mx.Dtype = next(norms).dtype
    return found
