"""What a model runs on where Triton does: kernels in captured steps, matrices in 16 bits or in fewer."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from slipstream.config import RunnerConfig
from slipstream.errors import ConfigError
from slipstream.load.spec import ModelSpec
from slipstream.runners.torch.caches import CONV_KERNEL
from slipstream.runners.torch.platform import QUANTIZED, Platform, PromptSteps, draft_vocab

# 2048 tokens of prompts are bound by arithmetic, and 1024 nearly as much. Steps of more than 512 take long enough to be
# launched as they are, but those of small models.
PROMPT_STEPS = (PromptSteps(2048, captured=2048), PromptSteps(1024, captured=512))
GDN_CHUNK = 32  # as in kernels/recurrent/gdn_chunks.py
FP8_CAPABILITY = (8, 9)  # the first with FP8 tensor cores
DRAFT_VOCAB = 65536  # where a vocabulary is much larger than that


def cuda_platform(device: torch.device, config: RunnerConfig, spec: ModelSpec) -> Platform:
    """Triton kernels and rows on the device; on a CPU tensor they run in Triton's interpreter, for tests."""
    from slipstream.runners.cuda.layout import TOKEN_BUCKETS  # Triton is not everywhere
    from slipstream.runners.cuda.model.fp8 import Fp8QuantizingFormat, Fp8StoredFormat
    from slipstream.runners.cuda.model.fused_layers import stack
    from slipstream.runners.cuda.model.linear import CudaFormat
    from slipstream.runners.cuda.model.ops import CudaOps
    from slipstream.runners.cuda.model.quantized import CudaStoredFormat, quantized_format

    quantized, as_stored = config.dtype in QUANTIZED, config.dtype == "auto"
    name = _activation_dtype(device) if quantized else "bfloat16" if as_stored else config.dtype
    ops = CudaOps(device, getattr(torch, name))
    rounds = config.fp8_activations
    if rounds and (why := why_no_fp8_products(device, config, spec)):
        raise ConfigError(f"fp8_activations is on, but {why}")
    form: CudaFormat
    if rounds:
        form = Fp8QuantizingFormat(ops) if quantized else Fp8StoredFormat(ops)
    elif quantized:
        form = quantized_format(ops, config.dtype)
    else:
        form = CudaStoredFormat(ops, unpacks=spec.fp8) if as_stored else CudaFormat(ops)
    few_bits = config.dtype if quantized else "fp8" if as_stored and spec.fp8 else ""
    stored = f", matrices {_quantized_note(few_bits, name)}" if few_bits else ""
    stored += ", activations in fp8 where faster" if rounds else ""
    note = f"{device.type}, {name}{stored}, Triton kernels in captured steps"
    vocab = draft_vocab(config, spec, _default_draft_vocab(spec))
    if config.state_dtype != "float32" and spec.gdn is None:
        raise ConfigError(f"state_dtype is {config.state_dtype}, but this model has no recurrent states")
    platform = Platform(
        ops,
        form,
        form,
        note,
        vocab,
        device_resident=True,
        stack=stack,
        chunk=GDN_CHUNK,
        step_sizes=TOKEN_BUCKETS,
        prompt_steps=PROMPT_STEPS,
    )
    return platform if config.state_dtype == "float32" else platform.with_states(getattr(torch, config.state_dtype))


def why_no_triton(config: RunnerConfig, spec: ModelSpec) -> str | None:
    """One sentence; None: the kernels run this model."""
    if not config.kernels:
        return "kernels are switched off"
    if config.dtype not in ("auto", "float32", "bfloat16", "float16", *QUANTIZED):
        return f"the kernels do not compute in {config.dtype}"
    if spec.gdn is not None and spec.gdn.conv_kernel != CONV_KERNEL:
        return f"the kernels do not take a conv over {spec.gdn.conv_kernel}"
    if find_spec("triton") is None:
        return "Triton is not installed (in the repository, pip install '.[cuda]')"
    return None


def why_no_fp8_products(device: torch.device, config: RunnerConfig, spec: ModelSpec) -> str | None:
    """One sentence; None: the FP8 tensor cores can multiply this model's matrices, as far as the GPU is here to ask."""
    if config.dtype != "fp8" and not (config.dtype == "auto" and spec.fp8):
        return "no matrices are in FP8: that takes a model stored in FP8, or dtype fp8"
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        number, needed = (f"{major}.{minor}" for major, minor in (capability, FP8_CAPABILITY))
        return f"this GPU has no FP8 tensor cores: its compute capability is {number}, they came with {needed}"
    return None


def _quantized_note(dtype: str, kept: str) -> str:
    """What is stored how, the exception in brackets."""
    vocabulary = {"int4": "int8", "fp8": kept}.get(dtype)
    return f"{dtype} (vocabulary {vocabulary})" if vocabulary else dtype


def _activation_dtype(device: torch.device) -> str:
    """Beside quantized matrices: float16 only where a GPU that is here knows no bfloat16."""
    here = device.type == "cuda" and torch.cuda.is_available()
    return "float16" if here and torch.cuda.get_device_capability(device) < (8, 0) else "bfloat16"


def _default_draft_vocab(spec: ModelSpec) -> int:
    """A draft pass over all of a large vocabulary reads mostly the output matrix."""
    return DRAFT_VOCAB if spec.vocab_size > 2 * DRAFT_VOCAB else 0
