"""Where a model lives and in what form: device, operations, storage format of matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from slipstream.config import RunnerConfig
from slipstream.errors import ConfigError
from slipstream.load.spec import ModelSpec
from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.bindings import load as load_kernels
from slipstream.runners.cpu.ops import CpuOps, PackedFormat
from slipstream.runners.torch.caches import CONV_KERNEL
from slipstream.runners.torch.models.layers import DecoderLayer, InTurn, Layers
from slipstream.runners.torch.ops import Ops, TorchOps
from slipstream.runners.torch.weights import DenseFormat, LinearFormat

PROMPT_TOKENS = 2048  # of prompts a step: enough to be bound by arithmetic
LARGE_DRAFT_VOCAB = 65536  # on a GPU, where a vocabulary is much larger than that
ROUNDED = ("int8", "int4", "fp8")  # matrices stored in fewer bits than any activations
SMALL_DRAFT_VOCAB = 24576  # on a CPU a draft pass reads little else than the output matrix


@dataclass(frozen=True, slots=True)
class Placement:
    ops: Ops
    form: LinearFormat
    head_form: LinearFormat
    note: str  # one line for people: what runs where
    draft_vocab: int  # the head drafts among the first so many tokens
    resident: bool = False  # rows live on the device, and the host is one step behind
    prompt_tokens: int = 0  # read in one step where no stream decodes, if more than the engine allows
    stack: Callable[[Sequence[DecoderLayer]], Layers] = InTurn  # how layers are joined

    @property
    def device(self) -> torch.device:
        return self.ops.device


def choose_device(name: str, present: bool = True) -> torch.device:
    """``present`` False: a device to plan for, which need not be in this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the torch runner knows the devices cpu and cuda, not {name!r}")
    if present and device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but PyTorch sees no CUDA GPU")
    return device


def place(config: RunnerConfig, spec: ModelSpec, present: bool = True) -> Placement:
    device = choose_device(config.device, present)
    if device.type == "cuda":
        return _on_gpu(device, config, spec)
    kernels = _cpu_kernels(config, spec)
    if isinstance(kernels, str):
        return _dense(device, config, spec, f"plain PyTorch operations: {kernels}")
    as_stored = "FP8 matrices in 8-bit blocks" if spec.fp8 else "matrices as stored"
    stored = as_stored if config.dtype == "auto" else f"matrices in {config.dtype}"
    note = f"cpu, {stored}, {kernels.isa} kernels on {kernels.num_threads} threads"
    # The head decides nothing, so it may be rounded: 8 bits make a draft cheaper.
    head = PackedFormat(kernels, "int8") if config.dtype == "auto" else PackedFormat(kernels, config.dtype)
    ops = CpuOps(kernels)
    vocab = _draft_vocab(config, spec, SMALL_DRAFT_VOCAB)
    return Placement(ops, PackedFormat(kernels, config.dtype), head, note, vocab, stack=ops.stack)


def _on_gpu(device: torch.device, config: RunnerConfig, spec: ModelSpec) -> Placement:
    why = _no_triton(config, spec)
    if why is not None:
        return _dense(device, config, spec, f"plain PyTorch operations: {why}")
    return resident(device, config, spec)


def resident(device: torch.device, config: RunnerConfig, spec: ModelSpec) -> Placement:
    """Triton kernels and rows on the device; on a CPU tensor they run in Triton's interpreter, for tests."""
    from slipstream.runners.cuda.fused_layers import stack  # Triton is not everywhere
    from slipstream.runners.cuda.linear import CudaFormat
    from slipstream.runners.cuda.ops import CudaOps
    from slipstream.runners.cuda.quantized import CudaStoredFormat, rounded_format

    rounded, as_stored = config.dtype in ROUNDED, config.dtype == "auto"
    name = _half(device) if rounded else "bfloat16" if as_stored else config.dtype
    ops = CudaOps(device, getattr(torch, name))
    if rounded:
        form: CudaFormat = rounded_format(ops, config.dtype)
    else:
        form = CudaStoredFormat(ops, unpacks=spec.fp8) if as_stored else CudaFormat(ops)
    few_bits = config.dtype if rounded else "fp8" if as_stored and spec.fp8 else ""
    stored = f", matrices {_rounded_note(few_bits, name)}" if few_bits else ""
    note = f"{device.type}, {name}{stored}, Triton kernels in captured steps"
    vocab = _draft_vocab(config, spec, _gpu_draft_vocab(spec))
    return Placement(ops, form, form, note, vocab, resident=True, prompt_tokens=2048, stack=stack)


def _rounded_note(dtype: str, kept: str) -> str:
    """What is stored how, the exception in brackets."""
    vocabulary = {"int4": "int8", "fp8": kept}.get(dtype)
    return f"{dtype} (vocabulary {vocabulary})" if vocabulary else dtype


def _half(device: torch.device) -> str:
    """The type of activations beside rounded matrices: float16 only where a GPU that is here knows no bfloat16."""
    here = device.type == "cuda" and torch.cuda.is_available()
    return "float16" if here and torch.cuda.get_device_capability(device) < (8, 0) else "bfloat16"


def _gpu_draft_vocab(spec: ModelSpec) -> int:
    """A draft pass over all of a large vocabulary reads mostly the output matrix."""
    return LARGE_DRAFT_VOCAB if spec.vocab_size > 2 * LARGE_DRAFT_VOCAB else 0


def _no_triton(config: RunnerConfig, spec: ModelSpec) -> str | None:
    if not config.kernels:
        return "kernels are switched off"
    if config.dtype not in ("auto", "float32", "bfloat16", "float16", *ROUNDED):
        return f"the kernels do not compute in {config.dtype}"
    if spec.gdn is not None and spec.gdn.conv_kernel != CONV_KERNEL:
        return f"the kernels do not take a conv over {spec.gdn.conv_kernel}"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install slipstream[cuda])"
    return None


def _cpu_kernels(config: RunnerConfig, spec: ModelSpec) -> Kernels | str:
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


def _draft_vocab(config: RunnerConfig, spec: ModelSpec, default: int) -> int:
    asked = default if config.draft_vocab is None else config.draft_vocab
    return min(asked or spec.vocab_size, spec.vocab_size)


def _dense(device: torch.device, config: RunnerConfig, spec: ModelSpec, why: str) -> Placement:
    default = "float32" if device.type == "cpu" else "bfloat16"
    name = default if config.dtype == "auto" else config.dtype
    if name in ROUNDED:
        ours = "CPU" if device.type == "cpu" and name == "int8" else "Triton"
        raise ConfigError(f"dtype {name} needs the {ours} kernels, but here there are only {why}")
    ops = TorchOps(device, getattr(torch, name))
    form = DenseFormat(ops)
    return Placement(ops, form, form, f"{device.type}, {name}, {why}", _draft_vocab(config, spec, 0))
