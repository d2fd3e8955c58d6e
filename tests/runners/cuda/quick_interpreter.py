"""Triton's interpreter, twice as fast for kernels that call many small functions.

It prepares the whole language again for each call of a function inside a kernel, though the launch has done so, and
computes every sum and product of whole numbers a second time in 64 bits, to look for overflow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_prepare = getattr(interpreter, "_patch_lang", None)  # no public interface: another version may have none of this
_own_is_ready = False  # the modules of Triton's own functions, which are not put back after a launch


def _call(function: interpreter.InterpretedFunction, *args: Any, **named: Any) -> Any:
    global _own_is_ready
    if not _own_is_ready and function.fn.__module__.startswith(tl.__name__):
        _prepare(function.fn)
        _own_is_ready = True
    return function.rewrite()(*args, **named)


def quicken() -> None:
    if _prepare is None:
        return
    interpreter.InterpretedFunction.__call__ = _call
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
