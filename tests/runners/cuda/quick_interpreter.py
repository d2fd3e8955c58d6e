"""Triton's interpreter, several times as fast for kernels that call many small functions, and closer to a GPU.

It prepares the whole language again for each call of a function inside a kernel, though the launch has done so, and
computes every sum and product of whole numbers a second time in 64 bits, to look for overflow. It truncates where a GPU
rounds to bfloat16, and knows no inline assembly: here it rounds, and runs the PTX (ptx.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from ptx import from_registers, in_registers, run
from triton._C.libtriton import interpreter as memory
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

REMEMBERED = triton.__version__.startswith("3.9.")  # quick_values.py replaces functions of this one
_prepare = getattr(interpreter, "_patch_lang", None)  # no public interface: another version may have none of this
_own_is_ready = False  # the modules of Triton's own functions, which are not put back after a launch
_cast = interpreter.InterpreterBuilder.cast_impl


def _call(function: interpreter.InterpretedFunction, *args: Any, **named: Any) -> Any:
    global _own_is_ready
    if not _own_is_ready and function.fn.__module__.startswith(tl.__name__):
        _prepare(function.fn)
        _own_is_ready = True
    return function.rewrite()(*args, **named)


class _Results(list[TensorHandle]):
    get_result = list[TensorHandle].__getitem__


def _inline_asm(
    builder: Any, text: str, constraints: str, values: list[TensorHandle], types: list[Any], is_pure: bool, pack: int
) -> _Results:
    """Elements are taken as they follow each other, whatever thread of a GPU would have them."""
    num_outputs = constraints.count("=")
    operands = [register for value in values for register in in_registers(value.data, pack)]
    inputs = dict(enumerate(operands, num_outputs))
    found = run(text, inputs, num_outputs, _load)
    results, first, shape = _Results(), 0, values[0].data.shape
    for dtype in types:
        element = getattr(dtype, "scalar", dtype)
        count = pack * element.primitive_bitwidth // 32
        data = from_registers(found[first : first + count], interpreter._get_np_dtype(element), shape)
        results.append(TensorHandle(data, element))
        first += count
    return results


def _load(addresses: NDArray[Any]) -> NDArray[Any]:
    everywhere, nothing = np.ones(addresses.shape, bool), np.zeros(addresses.shape, np.uint32)
    found: NDArray[Any] = memory.load(addresses, everywhere, nothing, nothing.dtype)
    return found


def _rounding_cast(builder: Any, source: TensorHandle, target: Any) -> TensorHandle:
    pair = source.dtype.scalar, target.scalar
    if pair == (tl.bfloat16, tl.float32):
        return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    if pair == (tl.float32, tl.bfloat16):
        bits = source.data.view(np.uint32)
        rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16  # to the nearest, of two the even one
        made = np.where(np.isnan(source.data), 0x7FFF, rounded).astype(np.uint16)
        return TensorHandle(made, tl.bfloat16)
    return _cast(builder, source, target)


def quicken() -> None:
    builder = interpreter.InterpreterBuilder
    builder.create_inline_asm, builder.cast_impl = _inline_asm, _rounding_cast
    if _prepare is None:
        return
    interpreter.InterpretedFunction.__call__ = _call
    one = interpreter.interpreter_builder
    one.options = replace(one.options, sanitize_overflow=False)
    if REMEMBERED:
        from quick_values import remember

        remember()
