"""How much memory a model takes, computed before anything is loaded, and how much of the rest its streams get.

Arithmetic on shapes: what ``slipstream plan`` prints and what the caches are sized by are the same numbers.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import ConfigError
from slipstream.host import available_bytes, resident_bytes
from slipstream.load import OpenedModel
from slipstream.load.contents import part_of
from slipstream.load.direct_reads import read_ahead_bytes
from slipstream.load.hf.folder import HfCheckpoint
from slipstream.load.random.model import RandomCheckpoint
from slipstream.load.spec import ModelSpec
from slipstream.load.tensor import Checkpoint
from slipstream.runners.backend import MemoryPlan, StepTraffic
from slipstream.runners.torch.caches import kv_bytes, ring_bytes
from slipstream.runners.torch.ops import order_bytes
from slipstream.runners.torch.platform import Platform, PromptSteps, type_name
from slipstream.runners.torch.weights import PLAIN_TYPES, LinearFormat

DEFAULT_TOKENS_PER_STREAM = 1024
MIN_BLOCKS = 2
FIRST_STEPS = 16 << 20  # parts of libraries and of the allocator that only running touches; measured on Linux
SLAB_BYTES = 1 << 28  # on a GPU, of rows that are brought from a file's bits into those of its kernels
CUDA_PROCESS = 400 << 20  # the device's context, kernels and captured steps; measured on an H200, 0.2 to 0.4 GB
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
SHARE_OF_FREE = {"cpu": 0.5, "cuda": 0.9}
SHARE_OF_PROMPTS = 1 / 16  # of what the weights leave: activations of steps that read prompts, if there is a choice
SHARE_OF_GIVEN = 0.97  # of memory that the operator named: what is left are fragments
# A session of an agent has 110k tokens in the median; four states are 8 % of its KV in a 27B model.
SHARE_OF_POOL = 0.1  # of the memory for KV: what states that the prefix cache keeps take
MIN_STATES = {"cpu": 16, "cuda": 8}


def plan_memory(
    model: OpenedModel, platform: Platform, engine: EngineConfig, runner: RunnerConfig, free: int | None = None
) -> MemoryPlan:
    """``free``: bytes of the device; None: as it reports."""
    spec, target, head = model.spec, model.checkpoint, model.head
    max_depth = engine.max_depth if head is not None else 0
    max_context = min(runner.max_context or spec.max_context, spec.max_context)
    state, kept_state = _state_bytes(spec, max_depth, platform)
    parts = _stored_parts(target, (n for n in target.names() if not spec.head.owns(n)), platform.form, spec)
    weights, head_bytes = sum(parts.values()), 0 if head is None else _head_bytes(head, platform, spec)
    process = resident_bytes() + FIRST_STEPS if platform.device.type == "cpu" else CUDA_PROCESS
    is_present = free is None
    free = free_bytes(platform.device) if free is None else free
    given = free if runner.memory is None else runner.memory - process
    share = SHARE_OF_FREE[platform.device.type] if runner.memory is None or given > free else SHARE_OF_GIVEN
    free = min(free, given) - weights - head_bytes
    steps = _prompt_steps(spec, platform, free)
    fixed = MemoryPlan(
        weights=weights,
        head=head_bytes,
        kv_per_token=kv_per_token(model, platform.kv_dtype),
        state_per_stream=state,
        workspace=max(_steps_bytes(spec, engine, platform, max_depth, steps), _loading_bytes(target, platform, spec))
        + _rotary_bytes(spec, max_context),
        process=process,
        num_slots=engine.max_streams,
        num_blocks=0,
        block_size=engine.block_size,
        max_context=max_context,
        kept_state=kept_state,
        weight_parts=tuple(parts.most_common()),
        kv_dtype=platform.kv_name,
        state_dtype=type_name(platform.state_dtype) if state else "",
        prompt_tokens=steps.largest,
        captured_tokens=steps.captured,
    )
    free -= fixed.workspace
    _check_weights(fixed, free, runner.memory)
    budget, num_blocks = _num_blocks(fixed, platform, runner.kv_memory, free, share)
    plan = replace(fixed, num_blocks=num_blocks)
    if state and engine.prefix_cache:
        plan = _with_kept_states(plan, budget, MIN_STATES[platform.device.type])
    _check_room(plan, budget, free)
    if not engine.prefix_cache:
        return plan
    plan = _with_host_tier(plan, _host_bytes(plan, engine))
    if platform.device.type == "cpu":
        _check_host(plan, engine, free - plan.caches)
    elif is_present:
        _check_host(plan, engine, available_bytes())
    return plan


def _host_bytes(plan: MemoryPlan, engine: EngineConfig) -> int:
    """Host memory for copies of the caches. The disk needs some: what is read from it comes there first."""
    if engine.cache_host is not None:
        return engine.cache_host
    return min(plan.caches, available_bytes() // 4) if engine.cache_dir else 0


def kv_per_token(model: OpenedModel, dtype: torch.dtype) -> int:
    return model.num_kv_layers * 2 * kv_bytes(model.spec.num_kv_heads, model.spec.head_dim, dtype)


def _stored_parts(checkpoint: Checkpoint, names: Iterable[str], form: LinearFormat, spec: ModelSpec) -> Counter[str]:
    """Bytes in memory, by part of the model."""
    found: Counter[str] = Counter()
    for name in names:
        if spec.tied and name == "lm_head.weight":
            continue
        shape = checkpoint.shape(name)
        found[part_of(name)] += form.of(name).stored_bytes(checkpoint.dtype(name), shape)
        if isinstance(checkpoint, HfCheckpoint) and checkpoint.is_reordered(name):
            found[part_of(name)] += order_bytes(shape[-1])  # matrices that are joined may share theirs
    return found


def _head_bytes(head: Checkpoint, platform: Platform, spec: ModelSpec) -> int:
    names = (name for name in head.names() if spec.head.owns(name))
    rough = platform.head_form.draft_bytes(platform.draft_vocab, (spec.vocab_size, spec.hidden_size))
    return sum(_stored_parts(head, names, platform.head_form, spec).values()) + rough


def _state_bytes(spec: ModelSpec, max_depth: int, platform: Platform) -> tuple[int, int]:
    """Recurrent layers: committed state, conv window, tape; on a GPU the last two are one ring. And without the tape:
    what the prefix cache keeps."""
    if spec.gdn is None:
        return 0, 0
    item, wide = platform.ops.dtype.itemsize, platform.state_dtype.itemsize
    if platform.device_resident:
        both = ring_bytes(spec.gdn, spec.num_gdn_layers, max_depth, item, wide)
        return both, both
    gdn, depth = spec.gdn, max(1, max_depth)
    state = gdn.num_v_heads * gdn.k_dim * gdn.v_dim * wide
    window = (gdn.conv_kernel - 1) * gdn.conv_channels * item
    tape = depth * (gdn.conv_channels * item + 2 * gdn.num_v_heads * wide)
    return spec.num_gdn_layers * (state + window + tape), spec.num_gdn_layers * (state + window)


def _rotary_bytes(spec: ModelSpec, max_context: int) -> int:
    return max_context * spec.rope.rotary_dim * 4


def _loading_bytes(checkpoint: Checkpoint, platform: Platform, spec: ModelSpec) -> int:
    """What stands between the file and the largest matrix that is made of it."""
    largest = max(_between_bytes(checkpoint, name, platform) for name in checkpoint.names())
    if platform.device.type == "cpu":
        return largest + read_ahead_bytes(checkpoint.mapped_files())
    joined = max(map(math.prod, _matrices(spec)))  # whose parts are joined, or reordered
    return largest + joined * platform.ops.dtype.itemsize


def _between_bytes(checkpoint: Checkpoint, name: str, platform: Platform) -> int:
    num_bytes, dtype = checkpoint.num_bytes(name), checkpoint.dtype(name)
    if platform.device.type == "cpu":
        return num_bytes
    if isinstance(checkpoint, RandomCheckpoint):  # made up on the device, as a whole
        stored = platform.form.of(name).stored_bytes(dtype, checkpoint.shape(name))
        return num_bytes if stored < num_bytes else 0
    if dtype in PLAIN_TYPES:
        return 0
    weights = math.prod(checkpoint.shape(name))  # as floats, if they are unpacked there
    stays = platform.form.of(name).stored_bytes(dtype, checkpoint.shape(name)) < weights * platform.ops.dtype.itemsize
    return min(weights * 4, SLAB_BYTES) if stays else weights * 4


def _prompt_steps(spec: ModelSpec, platform: Platform, left: int) -> PromptSteps:
    """``left``: bytes beside the weights. The first of the platform's in which prompts take a small share of them."""
    if not platform.prompt_steps:
        return PromptSteps(0, 0)
    per_token = _activation_bytes(spec, platform)
    for steps in platform.prompt_steps:
        if (steps.largest + steps.captured) * per_token <= SHARE_OF_PROMPTS * left:
            break
    return steps


def _steps_bytes(
    spec: ModelSpec, engine: EngineConfig, platform: Platform, max_depth: int, prompts: PromptSteps
) -> int:
    """Activations of the fullest step, the logits of its sampled positions, and a matrix unpacked for it.

    Captured steps keep theirs, beside those of a step that runs as it is (log 240).
    """
    logits = engine.max_streams * (max_depth + 1) * spec.vocab_size * platform.ops.dtype.itemsize
    per_token = _activation_bytes(spec, platform)
    step = max(engine.max_step_tokens, prompts.largest) * per_token + logits
    captured = max(engine.max_step_tokens, prompts.captured) * per_token + logits if platform.device_resident else 0
    return step + captured + _unpacked_bytes(spec, platform)


def _unpacked_bytes(spec: ModelSpec, platform: Platform) -> int:
    """Room for any matrix of a layer, and for output matrices, which may have a format and room of their own."""
    layer, form = max(map(platform.form.unpacked_bytes, _matrices(spec))), platform.form.of(OUTPUT)
    output = max(form.unpacked_bytes((rows, spec.hidden_size)) for rows in (spec.vocab_size, platform.draft_vocab))
    return max(layer, output) if form is platform.form else layer + output


def _activation_bytes(spec: ModelSpec, platform: Platform) -> int:
    """Of a token, in a layer."""
    item = platform.ops.dtype.itemsize
    per_token = (4 * spec.hidden_size + 2 * _qkv_rows(spec) + 3 * _inner(spec)) * item
    if spec.moe is not None and platform.device.type == "cpu":  # what its experts read and answer, side by side
        per_token += 2 * spec.hidden_size * spec.moe.num_active * item
    return per_token


def _matrices(spec: ModelSpec) -> list[tuple[int, int]]:
    """The large ones of a layer, but for stacks of experts; gate and up may be joined or apart."""
    hidden, inner = spec.hidden_size, _inner(spec)
    from_hidden = [(rows, hidden) for rows in (_qkv_rows(spec), inner, 2 * inner, _recurrent_rows(spec))]
    return [*from_hidden, (hidden, inner), (hidden, spec.num_heads * spec.head_dim)]


def _qkv_rows(spec: ModelSpec) -> int:
    return (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim


def _recurrent_rows(spec: ModelSpec) -> int:
    """q, k, v, z, b and a."""
    gdn = spec.gdn
    return 0 if gdn is None else 2 * (gdn.num_k_heads * gdn.k_dim + gdn.num_v_heads * (gdn.v_dim + 1))


def _inner(spec: ModelSpec) -> int:
    return spec.intermediate_size or (spec.moe.expert_size * spec.moe.num_active if spec.moe else 0)


def _num_blocks(
    fixed: MemoryPlan, platform: Platform, kv_memory: int | None, free: int, share: float
) -> tuple[int, int]:
    """The bytes for KV, and the blocks to have. ``free``: bytes beside the weights, of which a share is for KV."""
    block = fixed.block_size * fixed.kv_per_token
    one_stream = -(-fixed.max_context // fixed.block_size)
    if kv_memory is not None:
        budget = kv_memory - fixed.states
    else:
        budget = int((free - fixed.states) * share)
    wanted = max(one_stream, fixed.num_slots * -(-DEFAULT_TOKENS_PER_STREAM // fixed.block_size))
    at_full_length = fixed.num_slots * one_stream
    by_default = wanted if platform.device.type == "cpu" else at_full_length
    num_blocks = min(budget // block, by_default if kv_memory is None else at_full_length)
    return budget, num_blocks


def _with_kept_states(plan: MemoryPlan, budget: int, min_states: int) -> MemoryPlan:
    """States for the prefix cache, from the memory that blocks leave over; if that is too little, from the blocks', but
    there no more than one a stream."""
    block, state = plan.block_size * plan.kv_per_token, plan.kept_state
    share = int(plan.kv_pool * SHARE_OF_POOL) // state
    num_spare = max(0, min(max(min_states, share), (budget - plan.kv_pool) // state))
    least = max(min(min_states, plan.num_slots), share)
    num_more = max(0, min(least - num_spare, plan.kv_pool // 4 // state))
    num_blocks = plan.num_blocks - -(-num_more * state // block)
    if num_blocks < MIN_BLOCKS:
        num_blocks, num_more = plan.num_blocks, 0
    return replace(plan, num_blocks=num_blocks, num_states=num_spare + num_more)


def _with_host_tier(plan: MemoryPlan, num_bytes: int) -> MemoryPlan:
    """Host memory in the proportions of the device's."""
    num_states = int(num_bytes * SHARE_OF_POOL) // plan.kept_state if plan.num_states else 0
    num_bytes -= num_states * plan.kept_state
    num_blocks = num_bytes // (plan.block_size * plan.kv_per_token)
    return replace(plan, num_host_blocks=num_blocks, num_host_states=num_states)


def _check_weights(fixed: MemoryPlan, left: int, given: int | None) -> None:
    """``left``: bytes beside the weights. ``given``: that the operator named."""
    if left <= 0:
        needed = fixed.weights + fixed.head + fixed.workspace
        process = f" (of the {_size(given)} of memory the process takes {_size(fixed.process)})" if given else ""
        more = "give more memory, or " if given else ""
        raise ConfigError(
            f"the weights and the workspace of a step take {_size(needed)}, but {_size(needed + left)} are free"
            f"{process}: {more}take a model with fewer weights or with fewer bits a weight"
        )


def _check_room(plan: MemoryPlan, budget: int, free: int) -> None:
    if plan.num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"{_size(budget)} are left for KV, but the minimum is {MIN_BLOCKS} blocks of {plan.block_size} "
            f"tokens, {_size(MIN_BLOCKS * plan.block_size * plan.kv_per_token)}: give more kv_memory or allow fewer "
            "max_streams"
        )
    if plan.caches > free:
        raise ConfigError(
            f"{_size(plan.caches)} are asked for KV and states, but beside the weights only {_size(free)} are "
            "free: give less kv_memory or allow fewer max_streams"
        )


def _check_host(plan: MemoryPlan, engine: EngineConfig, free: int) -> None:
    """What the operator named: where nobody did, less is taken."""
    if engine.cache_host is not None and plan.host_tier > free:
        raise ConfigError(
            f"{_size(plan.host_tier)} of host memory are asked for the prefix cache, but {_size(free)} are free: give "
            "less cache_host"
        )


def _size(num_bytes: int) -> str:
    """Also of what is not meant: `--memory 24` is 24 bytes."""
    if num_bytes < 1e5:
        return f"{max(num_bytes, 0)} B"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def limit_memory(device: torch.device, num_bytes: int) -> None:
    """PyTorch's tensors on that GPU, and what is not theirs, take no more: an allocation beyond it fails."""
    index = torch.cuda.current_device() if device.index is None else device.index  # PyTorch takes no plain "cuda" here
    share = max(0, num_bytes - CUDA_PROCESS) / torch.cuda.mem_get_info(index)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), index)


def trim_heap() -> None:
    """Gives back what was allocated and freed while loading; only glibc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def step_traffic(model: OpenedModel, platform: Platform) -> StepTraffic:
    spec, target = model.spec, model.checkpoint
    table, skipped = (EMBEDDING, OUTPUT) if spec.tied else (OUTPUT, EMBEDDING)
    names = [name for name in target.names() if not model.spec.head.owns(name) and name != skipped]
    head = [name for name in model.head.names() if model.spec.head.owns(name)] if model.head else []
    return StepTraffic(
        *_dense_and_experts(target, names, platform.form),
        *_dense_and_experts(model.head or target, head, platform.head_form),
        _draft_output_bytes(platform, target, table),
        kv_per_token(model, platform.kv_dtype),
        _read_states(spec, platform),
        spec.moe.num_active / spec.moe.num_experts if spec.moe else 1.0,
    )


def _read_states(spec: ModelSpec, platform: Platform) -> int:
    """Without windows and rings: they are small."""
    if spec.gdn is None:
        return 0
    numbers = spec.num_gdn_layers * spec.gdn.num_v_heads * spec.gdn.k_dim * spec.gdn.v_dim
    return numbers * platform.state_dtype.itemsize


def _dense_and_experts(checkpoint: Checkpoint, names: list[str], form: LinearFormat) -> tuple[int, int]:
    sizes = {name: form.of(name).stored_bytes(checkpoint.dtype(name), checkpoint.shape(name)) for name in names}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()) - experts, experts


def _draft_output_bytes(platform: Platform, target: Checkpoint, table: str) -> int:
    vocab, hidden = target.shape(table)
    own = platform.head_form.draft_bytes(platform.draft_vocab, (vocab, hidden))
    whole = platform.form.of(table).stored_bytes(target.dtype(table), (vocab, hidden))
    return own or whole * platform.draft_vocab // vocab
