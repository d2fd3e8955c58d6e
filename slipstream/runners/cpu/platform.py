"""What a model runs on where the C kernels do: matrices as they are stored, or in few bits."""

from __future__ import annotations

from slipstream.config import RunnerConfig
from slipstream.load.spec import ModelSpec
from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.bindings import load as load_kernels
from slipstream.runners.cpu.formats import PackedFormat
from slipstream.runners.cpu.ops import CpuOps
from slipstream.runners.torch.platform import Platform, draft_vocab

DRAFT_VOCAB = 24576  # a draft pass reads little else than the output matrix


def cpu_platform(kernels: Kernels, config: RunnerConfig, spec: ModelSpec) -> Platform:
    as_stored = "FP8 matrices in 8-bit blocks" if spec.fp8 else "matrices as stored"
    stored = as_stored if config.dtype == "auto" else f"matrices in {config.dtype}"
    note = f"cpu, {stored}, {kernels.isa} kernels on {kernels.num_threads} threads"
    # The head decides nothing, so its floats may be quantized: 8 bits make a draft cheaper.
    head = PackedFormat(kernels, config.dtype, floats="int8")
    ops = CpuOps(kernels)
    vocab = draft_vocab(config, spec, DRAFT_VOCAB)
    return Platform(ops, PackedFormat(kernels, config.dtype), head, note, vocab, stack=ops.stack)


def find_kernels(config: RunnerConfig, spec: ModelSpec) -> Kernels | str:
    """The kernels for this machine and model, or one sentence saying why there are none."""
    if not config.kernels:
        return "kernels are switched off"
    if config.dtype in ("int4", "fp8"):
        bits = "4 bits" if config.dtype == "int4" else "FP8"
        return f"the CPU's kernels do not round to {bits}; take --dtype int8, or a CUDA GPU"
    if config.dtype not in ("auto", "float32", "bfloat16", "int8"):
        return f"the kernels do not compute in {config.dtype}"
    if spec.head_dim % 16 or spec.head_dim > 256:
        return f"the kernels do not take heads of {spec.head_dim}"
    return load_kernels()
