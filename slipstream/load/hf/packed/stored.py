"""What a family of tensors is: decided by its suffixes, types and shapes."""

from __future__ import annotations

from dataclasses import replace

from slipstream.errors import CorruptFile, UnknownModel
from slipstream.load.hf.instead import AGAIN, OTHER_TYPES
from slipstream.load.hf.packed.family import BITSANDBYTES, Family
from slipstream.load.hf.packed.floats import GLOBAL, fp4, fp8
from slipstream.load.hf.packed.integers import Stored, gptq_or_awq, int_quantized, pack_quantized
from slipstream.load.hf.safetensors import check_type
from slipstream.load.tensor import FP8, RawTensor


def stored(family: Family) -> Stored:
    """Raises LoadError for what cannot be read, from the headers alone but for zero points and shapes."""
    _refuse_foreign(family)
    made = _by_name(family)
    whole = next((role for role in GLOBAL if role in family), None)
    if whole is not None and not made.dtype.startswith("FP4"):
        raise family.unreadable(f"is stored as {made.dtype} with a scale of its scales, {family.label(whole)!r}")
    return made


def _by_name(family: Family) -> Stored:
    if family.main == "weight":
        return _by_type(family)
    if family.main == "qweight":
        return gptq_or_awq(family)
    if family.entry("weight_packed").dtype == "U8":
        return fp4(family, "weight_packed")
    return pack_quantized(family)


def _by_type(family: Family) -> Stored:
    entry = family.entry("weight")
    if entry.dtype == FP8:
        return fp8(family)
    if entry.dtype == "I8":
        return int_quantized(family)
    if entry.dtype == "U8" and "weight_scale" in family:
        return fp4(family, "weight")
    check_type(family.where, family.name, entry)
    for role in ("weight_scale_inv", "weight_scale"):
        if role in family:
            kind = "FP8 scales" if role == "weight_scale_inv" else f"scales, {family.label(role)!r},"
            raise CorruptFile(
                f"{family.where}: {family.name} is stored as {entry.dtype}, but has {kind} beside it: {AGAIN}."
            )
    return Stored(entry.dtype, entry.shape, lambda: _plain(family))


def _plain(family: Family) -> RawTensor:
    return replace(family.store.get(family.on_disk["weight"]), name=family.name)


def _refuse_foreign(family: Family) -> None:
    if any(role in family for role in (*BITSANDBYTES, "SCB", "quant_state")):
        raise family.unreadable("is stored by bitsandbytes")
    if family.main == "weight" and "scales" in family:
        raise UnknownModel(
            f"{family.where}: {family.name} is stored in MLX's layout: use --runner mlx, or {OTHER_TYPES}."
        )
    if "meta" in family:
        raise family.unreadable("is stored in a sparse layout (marlin-24)")
