"""What a model runs on: operations on a device, storage formats of its matrices, and how its layers are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from slipstream.config import RunnerConfig
from slipstream.errors import ConfigError
from slipstream.load.spec import ModelSpec
from slipstream.runners.torch.caches import FP8
from slipstream.runners.torch.models.layers import DecoderLayer, Layers, Sequential
from slipstream.runners.torch.ops import Ops, TorchOps
from slipstream.runners.torch.weights import DenseFormat, LinearFormat

QUANTIZED = ("int8", "int4", "fp8")  # matrices stored in fewer bits than any activations


@dataclass(frozen=True, slots=True)
class PromptSteps:
    """Where rows live on the device. Captured steps keep their activations, beside those of one that runs as it is."""

    largest: int  # tokens read in one step where no stream decodes, if more than the engine allows
    captured: int  # steps that read prompts are captured up to so many tokens


@dataclass(frozen=True, slots=True)
class Platform:
    ops: Ops
    form: LinearFormat
    head_form: LinearFormat
    note: str  # one line for people: what runs where
    draft_vocab: int  # the head drafts among the first so many tokens
    device_resident: bool = False  # rows live on the device, and the host is one step late
    chunk: int = 1  # tokens of a prompt that recurrent layers take together: states are known only between them
    step_sizes: tuple[int, ...] = ()  # numbers of tokens to which steps are padded; (): they are not
    prompt_steps: tuple[PromptSteps, ...] = ()  # the first that memory has room for is taken; (): the engine's
    stack: Callable[[Sequence[DecoderLayer]], Layers] = Sequential  # how layers are joined
    coded_kv: bool = False  # keys and values are cached in FP8, not in the type of activations
    narrow_states: torch.dtype | None = None  # in which recurrent states are stored; None: float32, or wider

    @property
    def device(self) -> torch.device:
        return self.ops.device

    @property
    def kv_dtype(self) -> torch.dtype:
        return FP8 if self.coded_kv else self.ops.dtype

    @property
    def kv_name(self) -> str:
        return "fp8" if self.coded_kv else type_name(self.ops.dtype)

    def with_coded_kv(self) -> Platform:
        """The note tells: it is part of what caches on disk are known by."""
        return replace(self, coded_kv=True, note=f"{self.note}, KV in fp8")

    @property
    def state_dtype(self) -> torch.dtype:
        return self.narrow_states or torch.promote_types(self.ops.dtype, torch.float32)

    def with_states(self, dtype: torch.dtype) -> Platform:
        """The note tells, for the same reason."""
        return replace(self, narrow_states=dtype, note=f"{self.note}, states in {type_name(dtype)}")


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plain_platform(device: torch.device, config: RunnerConfig, spec: ModelSpec, why: str) -> Platform:
    """PyTorch's own operations. ``why``: there are no kernels."""
    default = "float32" if device.type == "cpu" else "bfloat16"
    name = default if config.dtype == "auto" else config.dtype
    if name in QUANTIZED:
        ours = "CPU" if device.type == "cpu" and name == "int8" else "Triton"
        raise ConfigError(f"dtype {name} needs the {ours} kernels, but here there are only {why}")
    ops = TorchOps(device, getattr(torch, name))
    form = DenseFormat(ops)
    return Platform(ops, form, form, f"{device.type}, {name}, {why}", draft_vocab(config, spec, 0))


def draft_vocab(config: RunnerConfig, spec: ModelSpec, default: int) -> int:
    """``default``: where the operator did not choose; 0: all tokens."""
    chosen = default if config.draft_vocab is None else config.draft_vocab
    return min(chosen or spec.vocab_size, spec.vocab_size)
