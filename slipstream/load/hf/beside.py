"""Tensors beside those that a model reads: one that would change what the model computes is refused by name.

Such a one is part of a module that is read, or a module of its own in a layer that is read. Scales that are left out
are known to packed/family.py. What is in no such layer (a vision tower, layers that the model does not have) stays
unread, as do rotary buffers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from slipstream.errors import UnknownModel
from slipstream.load.hf.instead import OTHER_MODEL, OTHER_TYPES
from slipstream.load.hf.packed.family import STACKS, Family

SMOOTHING = "pre_quant_scale"  # ModelOpt's AWQ, where it was not folded into the weights
OBSERVED = "_amax"  # the largest value that a quantiser met
CACHE_QUANTISER = "_bmm_quantizer."  # ModelOpt's, of queries, keys and values
ROTARY = ("inv_freq", "cos_cached", "sin_cached")  # buffers that follow from config.json
LAYER = re.compile(r"(?:.*?\.)?layers\.\d+(?=\.)")


def check_beside(families: Mapping[str, Family], read: Iterable[str]) -> None:
    """`read`: the names of the tensors that the model reads. Raises UnknownModel for the first one that does harm."""
    known = set(read)
    modules = {name.removesuffix(".weight") for name in known}
    layers = {_layer_of(name) for name in known} - {None}
    for name, family in families.items():
        if name in known:
            continue
        module = next((each for each in _modules_of(name) if each in modules), None)
        if (module is not None or _layer_of(name) in layers) and not _is_harmless(family):
            raise UnknownModel(f"{family.where}: {_what_is_wrong(family, module)}.")


def _layer_of(name: str) -> str | None:
    found = LAYER.match(name)
    return found and found[0]


def _modules_of(name: str) -> Iterator[str]:
    """Those that a tensor may be a part of, the innermost first."""
    module, _, last = name.rpartition(".")
    yield from (f"{module}.{stack}" for stack in STACKS if last.startswith(f"{stack}_"))
    while module:
        yield module
        module = module.rpartition(".")[0]


def _is_harmless(family: Family) -> bool:
    """A bias of zeros, as tools for GPTQ write one for every matrix, factors of one, notes of a quantiser, buffers."""
    if family.name.endswith((OBSERVED, *ROTARY)) or CACHE_QUANTISER in family.name:
        return True
    if family.name.endswith("bias"):
        return not family.floats("weight").any()
    return family.name.endswith(SMOOTHING) and bool((family.floats("weight") == 1).all())


def _what_is_wrong(family: Family, module: str | None) -> str:
    """`module`: the one of the model that the tensor is a part of, if any."""
    name, stored = family.name, family.on_disk[family.main]
    if name.endswith("bias"):
        return (
            f"{stored} is a bias, which this model does not have by its config.json: take the folder as its makers "
            "published it, or a GGUF of it"
        )
    if name.endswith(SMOOTHING):
        return (
            f"{stored} has factors for the inputs of a matrix, which cannot be multiplied in: take the model quantised "
            "without smoothing, in FP8, NVFP4 or BF16, or as a GGUF"
        )
    if ".lora_" in name:
        return (
            f"{stored} is part of an adapter, which is not computed: merge it into the weights, as PEFT's "
            "merge_and_unload does, and take that folder"
        )
    if module is None:
        return f"{stored} is of a module that this model does not have by its config.json: {OTHER_MODEL}"
    return f"{stored} would change what {module} computes, but is not known: {OTHER_TYPES}"
