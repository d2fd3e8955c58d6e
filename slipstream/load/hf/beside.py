"""Tensors beside those that a model reads: one that would change what the model computes is refused by name.

Scales that are left out are known to packed/family.py. Tensors of other modules (a vision tower, rotary buffers, layers
that the model does not have) lie beside nothing that is read, and stay unread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from slipstream.errors import UnknownModel
from slipstream.load.hf.instead import OTHER_TYPES
from slipstream.load.hf.packed.family import STACKS, Family

SMOOTHING = "pre_quant_scale"  # ModelOpt's AWQ, where it was not folded into the weights
OBSERVED = "_amax"  # the largest value that a quantiser met


def check_beside(families: Mapping[str, Family], read: Iterable[str]) -> None:
    """`read`: the names of the tensors that the model reads. Raises UnknownModel for the first one that does harm."""
    known = set(read)
    modules = {name.removesuffix(".weight") for name in known}
    for name, family in families.items():
        if name in known:
            continue
        module = next((each for each in _modules_of(name) if each in modules), None)
        if module is not None and not _is_harmless(family):
            raise UnknownModel(f"{family.where}: {_what_is_wrong(family, module)}.")


def _modules_of(name: str) -> Iterator[str]:
    """Those that a tensor may be a part of, the innermost first."""
    module, _, last = name.rpartition(".")
    yield from (f"{module}.{stack}" for stack in STACKS if last.startswith(f"{stack}_"))
    while module:
        yield module
        module = module.rpartition(".")[0]


def _is_harmless(family: Family) -> bool:
    """A bias of zeros, as tools for GPTQ write one for every matrix, factors of one, what a quantiser noted."""
    if family.name.endswith(OBSERVED):
        return True
    if family.name.endswith("bias"):
        return not family.floats("weight").any()
    return family.name.endswith(SMOOTHING) and bool((family.floats("weight") == 1).all())


def _what_is_wrong(family: Family, module: str) -> str:
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
    return f"{stored} would change what {module} computes, but is not known: {OTHER_TYPES}"
