"""Puts a runner together: weights, head, memory, caches. Nothing large is read before the memory plan allows it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import RowJoin, RunnerInfo
from slipstream.errors import HeadError
from slipstream.load import OpenedModel
from slipstream.load.gguf.file import GgufCheckpoint
from slipstream.runners.backend import MemoryPlan, Progress
from slipstream.runners.host.drafter import HostDrafter, MtpDrafter, NoDrafter
from slipstream.runners.host.runner import HostRunner
from slipstream.runners.mlx.block_store import BlockStore
from slipstream.runners.mlx.caches import FIRST_LENGTH, FeedHolder, KvCache
from slipstream.runners.mlx.grid import Grids
from slipstream.runners.mlx.host_model import MlxHead, MlxModel
from slipstream.runners.mlx.loaders.gguf_weights import unpacked_weights
from slipstream.runners.mlx.loaders.heads import head_loading_bytes, load_head
from slipstream.runners.mlx.loaders.models import load_shapes, load_target, loading_bytes, target_names
from slipstream.runners.mlx.memory import ModelShape, StreamCost, keep_grid, slot_positions, stream_cost
from slipstream.runners.mlx.mtp import MtpHead
from slipstream.runners.mlx.states import RecurrentCache
from slipstream.runners.mlx.target import OpaqueTarget, OpenTarget, TargetModel, make_caches, tape_recurrences
from slipstream.runners.rows import RowSpan
from slipstream.runners.simulate import Simulation
from slipstream.sampling.params import SamplingParams

MlxRunner = HostRunner[mx.array, Grids]
DRAFT_VOCAB = 32768  # a draft pass over all of a large vocabulary reads mostly the output matrix


def model_shape(model: OpenedModel, engine: EngineConfig, config: RunnerConfig) -> ModelShape:
    """From headers alone: what `load_runner` will hold and compute with."""
    lazy = LazyModel(model, engine, config, load_shapes(model, config.dtype), None)
    loading, head = loading_bytes(model, config.dtype), {}
    if lazy.head is not None and model.head is not None:
        loading = max(loading, head_loading_bytes(model.head, _activation_dtype(lazy.model)))
        head = _sizes(lazy.head)
    return ModelShape(
        dtype=lazy.dtype,
        weights=_sizes(lazy.model),
        weights_note=_weights_note(model, lazy.dtype),
        head=head,
        loading=loading,
        cost=lazy.stream_cost(),
        max_depth=lazy.max_depth,
        draft_vocab=lazy.draft_vocab,
        expert_share=lazy.expert_share,
    )


def _weights_note(model: OpenedModel, dtype: str) -> str:
    """Of the target model, as the head's matrices are few."""
    if not isinstance(model.checkpoint, GgufCheckpoint):
        return ""
    names = target_names(model)
    unpacked = unpacked_weights(model.checkpoint, names)
    share = sum(unpacked.values()) / sum(math.prod(model.checkpoint.shape(name)) for name in names)
    percent = f"{100 * share:.0f}" if share >= 0.005 else "less than 1"
    types = ", ".join(stored for stored, _ in unpacked.most_common())
    return f"{percent} % of the weights become {dtype} on MLX ({types})" if unpacked else ""


@contextmanager
def _no_spare_buffers() -> Iterator[None]:
    """What loading is done with goes back to the system at once: MLX would keep it for later arrays."""
    limit = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(limit)


@_no_spare_buffers()
def load_runner(
    model: OpenedModel, engine: EngineConfig, config: RunnerConfig, plan: MemoryPlan, note: str, progress: Progress
) -> MlxRunner:
    """``note``: what computes where."""
    lazy = LazyModel(model, engine, config, load_target(model, config.dtype, progress), progress)
    host_model = lazy.host_model(plan.num_slots, slot_positions(plan.max_context, lazy.max_depth))
    if keep_grid(plan):
        kv = [cache for cache in host_model.all_caches if isinstance(cache, KvCache)]
        host_model.blocks = BlockStore(kv, plan.num_blocks, plan.block_size)
    simulation = Simulation(config.simulate_acceptance, lazy.max_depth) if config.simulate_acceptance else None
    drafter: HostDrafter[mx.array, Grids] = NoDrafter()
    if lazy.head is not None:
        drafter = MtpDrafter(host_model, lazy.host_head(host_model), lazy.max_depth, simulation)
    return HostRunner(_info(model, plan, lazy, note), host_model, drafter, simulation)


class LazyModel:
    """Target model and head, none of whose arrays has to be evaluated."""

    def __init__(
        self, opened: OpenedModel, engine: EngineConfig, config: RunnerConfig, model: Any, progress: Progress | None
    ) -> None:
        """``progress`` None: the head is not read."""
        self._spec, self._config = opened.spec, config
        self.model = model
        self.target: TargetModel = OpaqueTarget(model) if opened.spec.architecture == "other" else OpenTarget(model)
        self.head, self.why_no_draft = self._find_head(opened, engine, progress)
        self.max_depth = engine.max_depth if self.head is not None else 0
        tape_recurrences(model, tiled=opened.spec.gdn is not None and opened.spec.gdn.tiled)

    @property
    def dtype(self) -> str:
        return str(_activation_dtype(self.model)).removeprefix("mlx.core.")

    @property
    def draft_vocab(self) -> int:
        """The head drafts among the first so many tokens."""
        vocab, chosen = self._spec.vocab_size, self._config.draft_vocab
        default = DRAFT_VOCAB if vocab > 2 * DRAFT_VOCAB else vocab
        return min(default if chosen is None else chosen or vocab, vocab)

    @property
    def expert_share(self) -> float:
        """Of the experts, those that one token chooses; all of them where the architecture is not known."""
        args = vars(self.target.args) if isinstance(self.target, OpenTarget) else {}
        return args["num_experts_per_tok"] / args["num_experts"] if args.get("num_experts") else 1.0

    def host_model(self, max_rows: int, max_length: int) -> MlxModel:
        holder = FeedHolder()
        caches = make_caches(self.model, holder, max_rows, max_length, self.max_depth)
        head_cache = KvCache(holder, max_rows, max_length) if self.head is not None else None
        pads = not any(isinstance(cache, RecurrentCache) for cache in caches)
        return MlxModel(self.target, caches, head_cache, holder, self.max_depth, pads)

    def host_head(self, host_model: MlxModel) -> MlxHead:
        assert self.head is not None
        assert isinstance(self.target, OpenTarget)
        num_rows = self.draft_vocab
        output = self.target.output_rows(num_rows) if num_rows < self._spec.vocab_size else self.target.unembed
        return MlxHead(host_model, self.target, self.head, output, num_rows)

    def stream_cost(self) -> StreamCost:
        """One token through target model and head, not evaluated: the shapes of the caches after it."""
        host_model = self.host_model(1, FIRST_LENGTH)
        host_model.join(RowJoin(0, (0,), 1, SamplingParams(), 0, 0.0))
        batch = host_model.lay_out([RowSpan(0, 0, 0, 1)])
        hidden = host_model.forward([0], batch)
        if self.head is not None:
            self.host_head(host_model).forward(hidden, [0], batch)
        return stream_cost(host_model.all_caches)

    def _find_head(
        self, opened: OpenedModel, engine: EngineConfig, progress: Progress | None
    ) -> tuple[MtpHead | None, str]:
        """The head, or why there is none: one that does not fit never stops the model."""
        if opened.head is None:
            return None, opened.head_reason
        if engine.max_depth == 0:
            return None, "max_depth is 0"
        try:
            args = self.target.args if isinstance(self.target, OpenTarget) else None
            dtype = _activation_dtype(self.model)
            return load_head(opened.head, self._spec.architecture, args, dtype, progress), ""
        except HeadError as error:
            return None, f"no MTP head: {error}"


def _info(model: OpenedModel, plan: MemoryPlan, lazy: LazyModel, note: str) -> RunnerInfo:
    return RunnerInfo(
        num_slots=plan.num_slots,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_context=plan.max_context,
        vocab_size=model.spec.vocab_size,
        max_depth=lazy.max_depth,
        why_no_draft=lazy.why_no_draft,
        prompts_apart=True,
        keep_grid=keep_grid(plan),
        num_states=plan.num_states,
        stops_early=mx.default_device().type == mx.DeviceType.cpu,
        note=note,
    )


def _sizes(module: Any) -> dict[str, int]:
    return {name: array.nbytes for name, array in tree_flatten(module.parameters())}


def _activation_dtype(model: Any) -> mx.Dtype:
    """That of the norms: they are never packed."""
    norms = (array for name, array in tree_flatten(model.parameters()) if name.endswith("norm.weight"))
    found: mx.Dtype = next(norms).dtype
    return found
