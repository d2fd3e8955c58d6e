"""Which type each tensor has in a quantised file of a kind: llama.cpp's and unsloth's mixes, and one type for all."""

from __future__ import annotations

import re
from collections.abc import Callable

from slipstream.errors import LoadError
from slipstream.load.quantized.gguf_blocks import BLOCK_TYPES
from slipstream.load.quantized.types import container_of
from slipstream.load.spec import ModelSpec

VOCABULARY = ("embed_tokens", "lm_head")
FLOATS = ("gate", "shared_expert_gate", "conv1d")  # routers, and what is no matrix
SMALL = ("in_proj_a", "in_proj_b")
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}  # where 256 columns do not fit


def _q4_k_m(part: str, more_bits: bool) -> str:
    if part in VOCABULARY:
        return "Q6_K"
    if part in SMALL:
        return "Q8_0"
    if part == "in_proj_qkv":
        return "Q5_K"
    return "Q6_K" if more_bits and part in ("v_proj", "down_proj") else "Q4_K"


def _ud_q4_k_xl(part: str, more_bits: bool) -> str:
    """As llama.cpp's, with more bits for attention and recurrence, and the head's projection in eight."""
    if part == "fc" or part in SMALL:
        return "Q8_0"
    if part in ("q_proj", "k_proj", "v_proj", "in_proj_z", "out_proj", "o_proj"):
        return "Q5_K"
    return _q4_k_m(part, more_bits)


def _iq4_xs(part: str, more_bits: bool) -> str:
    return "Q6_K" if part in VOCABULARY else "Q8_0" if part in SMALL else "IQ4_XS"


MIXES: dict[str, Callable[[str, bool], str]] = {"Q4_K_M": _q4_k_m, "UD-Q4_K_XL": _ud_q4_k_xl, "IQ4_XS": _iq4_xs}
STORED_AS = (*MIXES, "Q8_0", "Q4_0", "INT4_32", "INT4_128", "INT4_128_ZERO", "FP4_16", "FP4_32", "INT8_128")


def stored_type(stored_as: str, name: str, shape: tuple[int, ...], spec: ModelSpec) -> str:
    if stored_as not in STORED_AS:
        raise LoadError(f"{stored_as!r} is not one of {', '.join(STORED_AS)}.")
    part = name.removesuffix(".weight").rpartition(".")[2]
    if len(shape) < 2 or part in FLOATS:
        return "F32"
    dtype = MIXES[stored_as](part, _has_more_bits(name, spec.num_layers)) if stored_as in MIXES else stored_as
    if dtype in BLOCK_TYPES:
        return dtype if shape[-1] % BLOCK_TYPES[dtype].columns == 0 else NARROW[dtype]
    container = container_of(dtype)
    assert container is not None
    return dtype if shape[-1] % container.group == 0 and part not in (*VOCABULARY, *SMALL) else "BF16"


def _has_more_bits(name: str, num_layers: int) -> bool:
    """llama.cpp's choice of layers: the first and last eighth, and every third between."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    if match is None:
        return True
    layer, eighth = int(match[1]), num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
