"""Puts a runner together: device and format, memory, weights, caches, head. The only file that knows every family."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.plan import RunnerInfo
from slipstream.load import OpenedModel
from slipstream.load.spec import Family, ModelSpec
from slipstream.runners.torch.caches import GdnCache, GdnLayerCache, PagedKv
from slipstream.runners.torch.drafter import Drafter, MtpDrafter, NoDrafter
from slipstream.runners.torch.memory import MemoryPlan, plan_memory, trim_heap
from slipstream.runners.torch.models import llama, qwen3_5, qwen3_5_moe
from slipstream.runners.torch.models.decoder import Decoder, load_decoder
from slipstream.runners.torch.models.layers import DecoderLayer, rotary_table
from slipstream.runners.torch.models.mtp import load_head
from slipstream.runners.torch.ops import LayerKv, Rotary
from slipstream.runners.torch.placement import Placement, place
from slipstream.runners.torch.rows import RowTable
from slipstream.runners.torch.runner import TorchRunner
from slipstream.runners.torch.weights import Weights

Progress = Callable[[int], None]  # called with the bytes just read
LoadLayer = Callable[[Weights, str, ModelSpec, Rotary, LayerKv | GdnLayerCache], DecoderLayer]

_FAMILIES: dict[Family, LoadLayer] = {
    "llama": llama.load_layer,
    "qwen2": llama.load_layer,
    "qwen3": llama.load_layer,
    "qwen3_5": qwen3_5.load_layer,
    "qwen3_5_moe": qwen3_5_moe.load_layer,
}


def ignore_progress(num_bytes: int) -> None:
    """Nobody watches."""


def load_runner(
    model: OpenedModel, engine: EngineConfig, config: RunnerConfig, progress: Progress = ignore_progress
) -> TorchRunner:
    placement = place(config, model.spec)
    memory = plan_memory(model, placement, engine, config)
    runner = _Loader(model, engine, config, placement, memory, progress).load()
    trim_heap()
    return runner


class _Loader:
    def __init__(
        self,
        model: OpenedModel,
        engine: EngineConfig,
        config: RunnerConfig,
        placement: Placement,
        memory: MemoryPlan,
        progress: Progress,
    ) -> None:
        self.model, self.spec = model, model.spec
        self.ops, self.placement = placement.ops, placement
        self.config, self.memory, self.progress = config, memory, progress
        self.max_depth = engine.max_depth if model.head is not None else 0
        # Drafts may be fed up to max_depth positions past the last one that counts.
        self.rotary = rotary_table(self.spec.rope, memory.max_context + self.max_depth, self.ops.device)
        num_kv = self.spec.num_attention_layers + (1 if model.head is not None else 0)
        self.kv = PagedKv(self.spec, num_kv, memory.num_blocks, memory.block_size, self.ops.device, self.ops.dtype)
        self.gdn = self._gdn()
        blocks_per_slot = -(-(memory.max_context + self.max_depth) // memory.block_size)
        self.table = RowTable(memory.num_slots, blocks_per_slot, self.ops.device)

    def load(self) -> TorchRunner:
        decoder = self._decoder()
        drafter = self._drafter(decoder)
        return TorchRunner(self._info(drafter), decoder, drafter, self.ops, self.table, self.kv, self.gdn)

    def _gdn(self) -> GdnCache | None:
        if self.spec.gdn is None:
            return None
        return GdnCache(
            self.spec.gdn,
            self.spec.num_gdn_layers,
            self.memory.num_slots,
            self.max_depth,
            self.ops.device,
            self.ops.dtype,
        )

    def _decoder(self) -> Decoder:
        weights = Weights(self.model.checkpoint, self.ops, self.placement.form, self.progress)
        load_layer = _FAMILIES[self.spec.family]
        kv = iter(self.kv.layers)
        gdn = iter(self.gdn.layers if self.gdn else ())
        layers = []
        for i, kind in enumerate(self.spec.layer_kinds):
            cache = next(kv) if kind == "full_attention" else next(gdn)
            layers.append(load_layer(weights, f"model.layers.{i}", self.spec, self.rotary, cache))
        return load_decoder(weights, self.spec, self.placement.stack(layers))

    def _drafter(self, decoder: Decoder) -> Drafter:
        if self.model.head is None or self.max_depth == 0:
            return NoDrafter()
        weights = Weights(self.model.head, self.ops, self.placement.head_form, self.progress)
        layer = _FAMILIES[self.spec.family](weights, "mtp.layers.0", self.spec, self.rotary, self.kv.layers[-1])
        head = load_head(weights, self.spec, self.placement.stack([layer]))
        output = decoder.output.for_drafts(self.placement.draft_vocab)
        return MtpDrafter(head, decoder.embedding, output, self.ops, self.table.block_table, self.max_depth)

    def _info(self, drafter: Drafter) -> RunnerInfo:
        return RunnerInfo(
            num_slots=self.memory.num_slots,
            num_blocks=self.memory.num_blocks,
            block_size=self.memory.block_size,
            max_context=self.memory.max_context,
            vocab_size=self.spec.vocab_size,
            max_depth=drafter.max_depth,
            why_no_draft="" if drafter.max_depth else (self.model.head_reason or "max_depth is 0"),
            stops_early=self.ops.device.type == "cpu",
            note=self.placement.note,
        )
