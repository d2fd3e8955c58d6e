"""The PTX that our kernels contain, run on a CPU: each instruction in numpy, for all threads at once.

Triton's interpreter has no inline assembly; with ``create_inline_asm`` in its place (quick_interpreter.py) kernels run
there with the very instructions that a GPU gets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Register = NDArray[Any]  # uint32 of all threads, or uint64: an address
Load = Callable[[Register], Register]  # 32 bits from each address


def run(text: str, inputs: Mapping[int, Register], num_outputs: int, load: Load | None = None) -> list[Register]:
    """``inputs``: by the number of an operand. The outputs, which come first."""
    registers = {f"${at}": value for at, value in inputs.items()}
    for operation, targets, sources in instructions(text):
        values = [registers[name] if name in registers else np.uint32(int(name, 0)) for name in sources]
        if operation.startswith("ld.global"):
            assert load is not None
            made = [load(values[0] + np.uint64(4 * at)) for at in range(len(targets))]
        elif operation.startswith("mma.sync"):
            made = multiplied(*values)
        elif operation == "mov.b32" and len(targets) == 2:
            made = [values[0] & 0xFFFF, values[0] >> 16]
        elif operation == "mov.b32" and len(sources) == 2:
            made = [values[0] | values[1] << 16]
        else:
            made = [OPERATIONS[operation](*values)]
        registers.update(zip(targets, made, strict=True))
    return [registers[f"${at}"] for at in range(num_outputs)]


@cache
def instructions(text: str) -> list[tuple[str, list[str], list[str]]]:
    """Operation, targets, sources."""
    found = []
    for line in filter(None, map(str.strip, re.sub(r"^\{|\}\s*$", "", text.strip()).split(";"))):
        operation, rest = line.split(None, 1)
        if operation == ".reg":
            continue
        target, *sources = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
        found.append((operation, names(target), [name for source in sources for name in names(source)]))
    return found


def names(operand: str) -> list[str]:
    return re.findall(r"[^\s,{}\[\]]+", operand)


def looked_up(a: Register, b: Register, c: Register, table: Register) -> Register:
    assert table == 0xEA, "another function of three bits"
    return a & b | c


def permuted(a: Register, b: Register, selectors: Register) -> Register:
    """Four of the eight bytes of a and b, by the four lowest nibbles of ``selectors``."""
    both = np.stack(np.broadcast_arrays(a, b, selectors)[:2], axis=-1).view(np.uint8)  # [threads, 8]
    which = selectors[..., None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    assert (which < 8).all(), "that would spread a sign"
    return np.take_along_axis(both, np.broadcast_to(which, (*both.shape[:-1], 4)), -1).view(np.uint32)[..., 0]


def multiplied(*operands: Register) -> list[Register]:
    """mma.m16n8k32 of unsigned and signed bytes: thread 4 g + q of 32 has bytes 4 q to 4 q + 3, and 16 further, of rows
    g and g + 8 and of column g, and of the result rows g and g + 8 of columns 2 q and 2 q + 1."""
    a0, a1, a2, a3, b0, b1, *c = (np.ascontiguousarray(np.atleast_1d(each)) for each in operands)

    def of_eight(first: Register, second: Register, dtype: type) -> NDArray[Any]:
        """[warps, 8, 32], float32: sums stay far below 2^24."""
        near, far = (each.view(dtype).reshape(-1, 8, 16) for each in (first, second))
        return np.concatenate((near, far), axis=2).astype(np.float32)

    columns = of_eight(b0, b1, np.int8).transpose(0, 2, 1)
    rows = (of_eight(a0, a2, np.uint8), of_eight(a1, a3, np.uint8))
    sums = [(each @ columns).astype(np.int32).reshape(-1, 2)[:, at] for each in rows for at in (0, 1)]
    return [before + each.view(np.uint32) for before, each in zip(c, sums, strict=True)]


def rounded_to_bfloat16(x: NDArray[Any]) -> Register:
    """To the nearest, of two the even one: its bits, in the low half. x: float64"""
    unit = np.maximum(np.frexp(x)[1] - 8, -133)
    with np.errstate(over="ignore"):
        made = np.ldexp(np.rint(np.ldexp(x, -unit)), unit).astype(np.float32)
    return made.view(np.uint32) >> np.uint32(16)


def bfloat16(bits: Register) -> NDArray[Any]:
    """Of the low half, as float64."""
    return (bits << np.uint32(16)).astype(np.uint32).view(np.float32).astype(np.float64)


def float16(bits: Register) -> NDArray[Any]:
    return (bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float64)


def rounded_to_float16(x: NDArray[Any]) -> Register:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def multiply_add(
    read: Callable[[Register], NDArray[Any]], rounded: Callable[[NDArray[Any]], Register]
) -> Callable[..., Register]:
    def both_halves(*operands: Register) -> Register:
        operands = tuple(map(np.atleast_1d, operands))
        low, high = (
            rounded(x * y + z)
            for x, y, z in ((read(each >> np.uint32(shift)) for each in operands) for shift in (0, 16))
        )
        return low | high << np.uint32(16)

    return both_halves


def subtracted(a: Register, b: Register) -> Register:
    with np.errstate(invalid="ignore"):
        return (a.view(np.float32) - b.view(np.float32)).view(np.uint32)


def converted(upper: Register, lower: Register) -> Register:
    low, high = (rounded_to_bfloat16(each.view(np.float32).astype(np.float64)) for each in (lower, upper))
    return low | high << np.uint32(16)


OPERATIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": looked_up,
    "prmt.b32": permuted,
    "fma.rn.bf16x2": multiply_add(bfloat16, rounded_to_bfloat16),
    "fma.rn.f16x2": multiply_add(float16, rounded_to_float16),
    "sub.rn.f32": subtracted,
    "cvt.rn.bf16x2.f32": converted,
}


def in_registers(data: NDArray[Any], pack: int) -> list[Register]:
    """Elements as a thread has them that works on ``pack`` of them at once: two of 16 bits share a register."""
    flat = np.ascontiguousarray(data).reshape(-1)
    if flat.itemsize == 8:
        return [flat]
    if flat.itemsize == 2:
        assert pack == 2
        return [flat.view(np.uint32)]
    return [flat.view(np.uint32)[at::pack] for at in range(pack)]


def from_registers(registers: Sequence[Register], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """``registers``: of one result."""
    whole = np.stack(registers, axis=-1).astype(np.uint32)
    return whole.view(dtype).reshape(shape)
