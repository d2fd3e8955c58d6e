"""What the interpreter remembers is what Triton answers: types, shapes and values, the first time and later."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from quick_interpreter import REMEMBERED
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not REMEMBERED, reason="the interpreter of Triton 3.9 is not in use"
)

TYPES = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32]
SHAPES = [(), (8,), (1, 8), (4, 1), (4, 8)]
NUMBERS = [0, 1, True, 1.0, 0.0, -0.0, 7, float("inf"), 70_000]
POINTER = tl.pointer_type(tl.float32)


def value(dtype: tl.dtype, shape: tuple[int, ...]) -> Any:
    data = np.arange(1, 1 + int(np.prod(shape, dtype=int))).reshape(shape or (1,))
    return tl.tensor(
        TensorHandle(data.astype(interpreter._get_np_dtype(dtype)), dtype),
        tl.block_type(dtype, list(shape)) if shape else dtype,
    )


def shown(found: tuple[Any, Any]) -> list[object]:
    return [
        (each.type, each.dtype, str(each.shape), each.numel.value, each.handle.data.tolist(), str(each.handle.data))
        for each in found
    ]


def own(semantic: Any) -> Any:
    """Triton's own, without anything remembered."""
    return TritonSemantic(semantic.builder)


def both(method: str, *arguments: object) -> tuple[object, object]:
    """What is answered by Triton, and by what remembers."""
    semantic = interpreter.interpreter_semantic

    def answer(by: Any) -> object:
        try:
            return shown(getattr(by, method)(*arguments))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    wanted, got = answer(own(semantic)), [answer(semantic) for _ in range(2)]
    assert got[0] == got[1]
    return wanted, got[0]


@pytest.mark.parametrize("shapes", list(itertools.product(SHAPES, SHAPES)), ids=str)
def test_two_values(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    for left, right in itertools.product([*TYPES, POINTER], TYPES):
        for flags in [(), (True, True), (False, False, False), (False, False, True, True)]:
            one, other = value(left, shapes[0]), value(right, shapes[1])
            wanted, got = both("binary_op_type_checking_impl", one, other, *flags)
            assert got == wanted, (left, right, flags)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_value_and_a_number(shape: tuple[int, ...]) -> None:
    for dtype, number in itertools.product([*TYPES, POINTER], NUMBERS):
        for arguments in [(value(dtype, shape), number), (number, value(dtype, shape))]:
            wanted, got = both("binary_op_type_checking_impl", *arguments, True, True)
            assert got == wanted, (dtype, number)


def test_what_is_remembered_cannot_be_written_to() -> None:
    semantic = interpreter.interpreter_semantic
    for _ in range(2):
        _, constant = semantic.binary_op_type_checking_impl(value(tl.float32, (8,)), 2.0)
        with pytest.raises(ValueError, match="read-only"):
            constant.handle.data[0] = 3.0


def test_types_of_blocks() -> None:
    block = tl.block_type(tl.float32, [4, tl.constexpr(8)])
    assert block == tl.block_type(tl.float32, [4, 8]) == block
    assert block != tl.block_type(tl.float32, [8, 4])
    assert block != tl.block_type(tl.float16, [4, 8])
    assert str(block) == "<['4', '8'], fp32>"
    assert block.numel == 32
    assert [tl.float32, tl.bfloat16].index(tl.bfloat16) == 1
    for shape, error in [([3], ValueError), ([], TypeError), ((4, 8), AssertionError)] * 2:
        with pytest.raises(error):
            tl.block_type(tl.float32, shape)


def test_an_array_must_fit_its_type() -> None:
    for _ in range(2):
        TensorHandle(np.zeros(4, np.int16), tl.bfloat16)
        with pytest.raises(ValueError, match="exceeds"):
            TensorHandle(np.zeros(4, np.int64), tl.int32)
