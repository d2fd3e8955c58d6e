"""Rotary frequencies: what a GGUF's metadata and its rope_freqs say of them."""

from __future__ import annotations

import math

import numpy as np

from slipstream.errors import CorruptFile, UnknownModel
from slipstream.load.fields import Fields
from slipstream.load.gguf.header import GgufHeader
from slipstream.load.spec import RopeSpec, YarnSpec, yarn_scale

ROPE_FREQS = "rope_freqs.weight"  # read here: it becomes a part of the spec
SCALING = "rope.scaling."
# What else a scaling can have, and the value at which it has none of it.
PLAIN = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}


def read_rope(header: GgufHeader, arch: Fields, head_dim: int, hybrid: bool) -> RopeSpec:
    theta = short_float(arch.number("rope.freq_base", 10000.0))
    rotary_dim = arch.size("rope.dimension_count", head_dim // 4 if hybrid else head_dim)
    if hybrid and (rotary_dim % 2 or rotary_dim > head_dim):
        raise CorruptFile(f"{header.path}: {rotary_dim} rotary dimensions of a head of {head_dim} cannot be.")
    if rotary_dim != head_dim and not hybrid:
        raise UnknownModel(
            f"{header.path} rotates {rotary_dim} of {head_dim} head dimensions: take a model that rotates all of them."
        )
    yarn = _yarn(arch)
    if ROPE_FREQS not in header.tensors:
        return RopeSpec(theta, rotary_dim, yarn=yarn)
    if yarn is not None:
        raise UnknownModel(
            f"{header.path} scales frequencies by {ROPE_FREQS} and by YaRN: take a file with one of them."
        )
    return _from_freqs(header, theta, rotary_dim)


def _yarn(arch: Fields) -> YarnSpec | None:
    """None: nothing is scaled. llama.cpp takes a factor without a type as linear."""
    kind = arch.text(f"{SCALING}type", "linear")
    factor = arch.raw(f"{SCALING}factor") or arch.raw("rope.scale_linear") or 1.0
    odd = [key for key, plain in PLAIN.items() if arch.raw(SCALING + key) not in (None, plain)]
    if odd or (kind not in ("none", "yarn") and (kind, factor) != ("linear", 1.0)):
        what = f"{SCALING}{odd[0]}" if odd else f"type {kind!r}"
        raise UnknownModel(
            f"{arch.where}: rotary scaling with {what} is not supported: take a file with plain YaRN, or with none."
        )
    if kind != "yarn":
        return None
    factor = short_float(arch.number(f"{SCALING}factor"))
    return YarnSpec(
        factor=factor,
        original_context=arch.context(f"{SCALING}original_context_length", arch.size("context_length")),
        fast_turns=short_float(arch.number(f"{SCALING}yarn_beta_fast", 32.0)),
        slow_turns=short_float(arch.number(f"{SCALING}yarn_beta_slow", 1.0)),
        rotary_scale=yarn_scale(factor),
    )


def _from_freqs(header: GgufHeader, theta: float, rotary_dim: int) -> RopeSpec:
    """Llama 3.1 files carry the divisor of each frequency instead of the parameters it comes from."""
    tensor = header.tensors[ROPE_FREQS]
    if tensor.dtype != "F32" or tensor.shape != (rotary_dim // 2,):
        raise CorruptFile(f"{header.path}: {ROPE_FREQS} should be F32 [{rotary_dim // 2}], it is {list(tensor.shape)}.")
    # [rotary_dim / 2]
    found = tensor.data.view("<f4")
    rope = RopeSpec(theta, rotary_dim, llama3_factor=float(found.max()))
    if not np.allclose(found, llama3_divisors(rope), rtol=1e-4):
        raise UnknownModel(
            f"{header.path}: {ROPE_FREQS} is not Llama 3.1's rescaling, and no other is supported: take a model with "
            "that, with YaRN or with none."
        )
    return rope


def llama3_divisors(rope: RopeSpec) -> np.ndarray:
    """The divisor of each rotary frequency in Llama 3.1's rescaling."""
    assert rope.llama3_factor is not None
    # [rotary_dim / 2]
    frequency = rope.theta ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    turns = rope.llama3_original_context * frequency / (2 * math.pi)
    smooth = (turns - rope.llama3_low_freq) / (rope.llama3_high_freq - rope.llama3_low_freq)
    smooth = np.clip(smooth, 0.0, 1.0)
    divisors: np.ndarray = 1.0 / ((1.0 - smooth) / rope.llama3_factor + smooth)
    return divisors


def short_float(value: float) -> float:
    """Metadata is float32: 1e-5 comes back as 9.999999747e-06. The shortest decimal is meant."""
    return float(str(np.float32(value)))
