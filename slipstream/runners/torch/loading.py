"""Puts a runner together: device, format, memory, weights, caches, head. The only file with every architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from torch import Tensor

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import Runner, RunnerInfo
from slipstream.load import OpenedModel
from slipstream.load.direct_reads import reading_directly
from slipstream.load.read_ahead import ReadAhead, places_in_order
from slipstream.load.spec import Architecture, ModelSpec
from slipstream.runners.backend import MemoryPlan, Progress, ignore_progress
from slipstream.runners.host.drafter import HostDrafter, MtpDrafter, NoDrafter
from slipstream.runners.host.runner import HostRunner
from slipstream.runners.simulate import Simulation, simulation_note
from slipstream.runners.torch.batch import RaggedBatch
from slipstream.runners.torch.caches import GdnCache, GdnRings, LayerCache, PagedKv
from slipstream.runners.torch.host_memory import HostMemory
from slipstream.runners.torch.host_model import BlockTable, TorchHead, TorchModel
from slipstream.runners.torch.memory import plan_memory, trim_heap
from slipstream.runners.torch.models import llama, qwen3_5, qwen3_5_moe
from slipstream.runners.torch.models.decoder import Decoder, load_decoder
from slipstream.runners.torch.models.layers import DecoderLayer, Sequential, rotary_table
from slipstream.runners.torch.models.mtp import MtpHead, load_head
from slipstream.runners.torch.ops import Linear, Rotary
from slipstream.runners.torch.platform import Platform
from slipstream.runners.torch.random_weights import open_weights
from slipstream.runners.torch.weights import Weights

TorchRunner = HostRunner[Tensor, RaggedBatch]
LoadLayer = Callable[[Weights, str, ModelSpec, Rotary, LayerCache], DecoderLayer]

_ARCHITECTURES: dict[Architecture, LoadLayer] = {
    "llama": llama.load_layer,
    "qwen2": llama.load_layer,
    "qwen3": llama.load_layer,
    "qwen3_5": qwen3_5.load_layer,
    "qwen3_5_moe": qwen3_5_moe.load_layer,
}


def load_runner(
    model: OpenedModel,
    engine: EngineConfig,
    config: RunnerConfig,
    platform: Platform,
    plan: MemoryPlan | None = None,
    progress: Progress = ignore_progress,
) -> Runner:
    """``plan``: None: made here."""
    memory = plan or plan_memory(model, platform, engine, config)
    # One thread copies to a GPU, and would wait for the disk. On a CPU all processors pack, and the system's own work
    # for what is read through its cache is in their way (log 251, 256).
    places, on_cpu = places_in_order(model), platform.ops.device.type == "cpu"
    files = model.mapped_files() if on_cpu else []
    with ReadAhead([] if on_cpu else places) as ahead, reading_directly(files, places):

        def advance(num_bytes: int) -> None:
            ahead.advance(num_bytes)
            progress(num_bytes)

        runner = _Loader(model, engine, config, platform, memory, advance).load()
    trim_heap()
    return runner


class _Loader:
    def __init__(
        self,
        model: OpenedModel,
        engine: EngineConfig,
        config: RunnerConfig,
        platform: Platform,
        memory: MemoryPlan,
        progress: Progress,
    ) -> None:
        self.model, self.spec = model, model.spec
        self.ops, self.platform = platform.ops, platform
        self.engine, self.config, self.memory, self.progress = engine, config, memory, progress
        self.max_depth = engine.max_depth if model.head is not None else 0
        # Drafts may be fed up to max_depth positions past the last one that counts.
        self.rotary = rotary_table(self.spec.rope, memory.max_context + self.max_depth, self.ops.device)
        num_kv = model.num_kv_layers
        sizes = (num_kv, memory.num_blocks, memory.block_size)
        self.kv = PagedKv(self.spec, *sizes, self.ops.device, platform.kv_dtype)
        self.gdn = self._gdn()
        self.blocks_per_slot = -(-(memory.max_context + self.max_depth) // memory.block_size)

    def load(self) -> Runner:
        if self.platform.device_resident and self.ops.device.type == "cuda":
            from slipstream.runners.cuda.warmup import hash_triton  # Triton is not everywhere

            hash_triton()
        decoder = self._decoder()
        return self._device_resident(decoder) if self.platform.device_resident else self._host_driven(decoder)

    def _host_driven(self, decoder: Decoder) -> TorchRunner:
        """Rows live on the host; a step ends with its result."""
        assert not isinstance(self.gdn, GdnRings)
        table = BlockTable(self.memory.num_slots, self.blocks_per_slot, self.ops.device)
        fused = not isinstance(decoder.layers, Sequential)
        model = TorchModel(decoder, self.ops, table, self.kv, self.gdn, host=self._host_memory(), fused=fused)
        survival = self.config.simulate_acceptance
        simulation = Simulation(survival, self.max_depth) if survival else None
        drafter: HostDrafter[Tensor, RaggedBatch] = NoDrafter()
        if self.max_depth:
            drafter = MtpDrafter(model, TorchHead(model, *self._head(decoder)), self.max_depth, simulation)
        return HostRunner(self._info(lag=0), model, drafter, simulation)

    def _device_resident(self, decoder: Decoder) -> Runner:
        """Rows live on the device; the host is one step late. Called by the engine's thread."""
        from slipstream.runners.cuda.buffers import StepBuffers  # Triton is not everywhere
        from slipstream.runners.cuda.rows import DeviceRows
        from slipstream.runners.cuda.runner import CudaRunner

        num_positions = self.memory.max_context + 2 * self.max_depth + 2
        rows = DeviceRows(self.memory.num_slots, num_positions, self.blocks_per_slot, self.ops.device)
        max_tokens = max(self.engine.max_step_tokens, self.memory.prompt_tokens)
        shared = (rows.block_table, self.spec.hidden_size, self.ops.dtype)
        keeps = self.memory.num_states > 0
        buffers = StepBuffers(self.memory.num_slots, max_tokens, self.max_depth, *shared, keeps_states=keeps)
        head = self._head(decoder) if self.max_depth else (None, None)
        assert not isinstance(self.gdn, GdnCache)
        parts = (self._info(lag=1), decoder, *head, rows, self.kv, buffers, self.gdn, self._host_memory())
        return CudaRunner(
            *parts, captured_tokens=self.memory.captured_tokens, simulated=self.config.simulate_acceptance
        )

    def _host_memory(self) -> HostMemory | None:
        memory = self.memory
        if not memory.num_host_blocks:
            return None
        return HostMemory(self.kv, self.gdn, memory.num_host_blocks, memory.num_host_states)

    def _gdn(self) -> GdnCache | GdnRings | None:
        if self.spec.gdn is None:
            return None
        sizes = (self.spec.gdn, self.spec.num_gdn_layers, self.memory.num_slots, self.memory.num_states)
        more = (self.max_depth, self.ops.device, self.ops.dtype)
        if self.platform.device_resident:
            return GdnRings(*sizes, *more, self.platform.state_dtype)
        return GdnCache(*sizes, *more)

    def _decoder(self) -> Decoder:
        weights = open_weights(self.model.checkpoint, self.ops, self.platform.form, self.progress)
        load_layer = _ARCHITECTURES[self.spec.architecture]
        kv = iter(self.kv.layers)
        gdn: Iterator[LayerCache] = iter(self.gdn.layers if self.gdn else ())
        layers = []
        for i, kind in enumerate(self.spec.layer_kinds):
            cache: LayerCache = next(kv) if kind == "full_attention" else next(gdn)
            layers.append(load_layer(weights, f"model.layers.{i}", self.spec, self.rotary, cache))
        return load_decoder(weights, self.spec, self.platform.stack(layers))

    def _head(self, decoder: Decoder) -> tuple[MtpHead, Linear]:
        """The draft head and its output matrix."""
        assert self.model.head is not None
        weights = open_weights(self.model.head, self.ops, self.platform.head_form, self.progress)
        load_layer, [name] = _ARCHITECTURES[self.spec.architecture], self.spec.head.layers
        layer = load_layer(weights, name, self.spec, self.rotary, self.kv.layers[-1])
        head = load_head(weights, self.spec, self.platform.stack([layer]))
        return head, decoder.output.for_drafts(self.platform.draft_vocab)

    def _keep_grid(self) -> int:
        """Recurrent layers on a GPU read prompts in chunks; on a CPU token by token."""
        if self.spec.gdn is None:
            return self.memory.block_size
        return math.lcm(self.memory.block_size, self.platform.chunk) if self.memory.num_states else 0

    def _info(self, lag: int) -> RunnerInfo:
        return RunnerInfo(
            num_slots=self.memory.num_slots,
            num_blocks=self.memory.num_blocks,
            block_size=self.memory.block_size,
            max_context=self.memory.max_context,
            vocab_size=self.spec.vocab_size,
            max_depth=self.max_depth,
            why_no_draft="" if self.max_depth else (self.model.head_reason or "max_depth is 0"),
            lag=lag,
            stops_early=not self.platform.device_resident and self.ops.device.type == "cpu",
            step_sizes=self.platform.step_sizes,
            prompt_tokens=self.memory.prompt_tokens,
            keep_grid=self._keep_grid(),
            num_states=self.memory.num_states,
            num_host_blocks=self.memory.num_host_blocks if self._keep_grid() else 0,
            num_host_states=self.memory.num_host_states,
            note=self.platform.note + simulation_note(self.config.simulate_acceptance),
        )
