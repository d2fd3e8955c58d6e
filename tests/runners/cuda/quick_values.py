"""What Triton's interpreter works out anew for each value, remembered: shapes, types, which type two operands share.

Most of its time goes there, since a kernel's blocks are small here. Nothing is decided in this module: every answer is
one that Triton gave before to the same question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

core = tl.core
MOST_KEPT = 4096  # elements of a constant
PLAIN = (core.tensor, int, float, bool, str, type(None))  # holds no constant

_init_block, _init_tensor, _unwrap = core.block_type.__init__, core.tensor.__init__, core._unwrap_if_constexpr
_np_dtype, _fits = interpreter._get_np_dtype, interpreter._validate_np_data_size


@dataclass(frozen=True, eq=False)
class _Shape:
    sizes: Any  # as a type has them
    numel: int
    names: dict[str, str]  # of a type, by its elements
    constants: Any  # as a value has them
    constant_numel: Any


_shapes: dict[tuple[int, ...], _Shape] = {}
_one = core.tensor(None, tl.int32)
_np_dtypes: dict[str, np.dtype[Any]] = {}
_fitting: dict[tuple[int, str], bool] = {}  # bytes of an element, and a type


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    assert isinstance(shape, list | core.tuple)
    given = shape.values if type(shape) is core.tuple else shape
    sizes = tuple([size.value if type(size) is core.constexpr else size for size in given])
    if sizes not in _shapes:
        _init_block(self, element_ty, shape)
        value = _remembered_nothing(self)
        _shapes[sizes] = _Shape(self.shape, self.numel, {}, value.shape, value.numel)
    known = self.known = _shapes[sizes]
    self.element_ty, self.shape, self.numel = element_ty, known.sizes, known.numel
    name = known.names.get(element_ty.name)
    if name is None:
        name = known.names[element_ty.name] = f"<{known.sizes}, {element_ty}>"
    self.name = name


def _remembered_nothing(block: Any) -> Any:
    value = core.tensor.__new__(core.tensor)
    _init_tensor(value, None, block)
    return value


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type = handle, type
    if type.__class__ is core.block_type:
        known = type.known
        self.dtype, self.shape, self.numel = type.element_ty, known.constants, known.constant_numel
    else:
        self.dtype, self.shape, self.numel = type.scalar, _one.shape, _one.numel


def _unwrap_if_constexpr(value: Any) -> Any:
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in PLAIN else _unwrap(value)


def _same_first(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def _get_np_dtype(dtype: Any) -> np.dtype[Any]:
    found = _np_dtypes.get(dtype.name)
    if found is None:
        found = _np_dtypes[dtype.name] = _np_dtype(dtype)
    return found


def _validate_np_data_size(array: Any, dtype: Any) -> bool:
    key = array.itemsize, dtype.name
    if key not in _fitting:
        _fitting[key] = _fits(array, dtype)
    return _fitting[key]


def _question(operand: Any) -> object:
    """What an operand's treatment depends on."""
    kind = type(operand)
    if kind is core.tensor:
        return operand.type.name
    return (kind, repr(operand)) if kind in (int, float, bool) else None


def _remembering(paired: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Two operands as they are computed with: themselves, or the same constants as the last time."""
    known: dict[object, tuple[Any, Any]] = {}

    def quick(lhs: Any, rhs: Any, *flags: bool, **named: bool) -> tuple[Any, Any]:
        left, right = _question(lhs), _question(rhs)
        key = left, right, flags, *named.items()
        if key in known:
            one, other = known[key]
            return lhs if one is None else one, rhs if other is None else other
        found = paired(lhs, rhs, *flags, **named)
        if left is not None and right is not None and all(map(_stays, (lhs, rhs), found)):
            known[key] = (None if found[0] is lhs else found[0], None if found[1] is rhs else found[1])
        return found

    return quick


def _stays(given: Any, found: Any) -> bool:
    """A value that was left as it is, or a small constant, which nobody may write to from now on."""
    if found is given:
        return True
    data = found.handle.data
    if type(given) is core.tensor or data.size > MOST_KEPT:
        return False
    data.flags.writeable = False
    return True


def _same_shape(semantic: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Two operands in one shape."""
    broadcast, builder = semantic.broadcast_impl_value, semantic.builder
    known: dict[tuple[Any, Any], tuple[Any, Any]] = {}  # the shapes of operands -> those that they take

    def quick(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = (each.type.known if each.type.is_block() else None for each in (lhs, rhs))
        if left is right:
            return lhs, rhs
        if (left, right) in known:
            return tuple(map(taken, (lhs, rhs), known[left, right]))
        found = broadcast(lhs, rhs)
        known[left, right] = tuple(None if new is old else new.type.shape for new, old in zip(found, (lhs, rhs)))
        return found

    def taken(operand: Any, sizes: Any) -> Any:
        if sizes is None:
            return operand
        new = core.block_type(operand.dtype, sizes)
        if operand.type.is_block():
            return core.tensor(builder.create_broadcast(operand.handle, sizes), new)
        return core.tensor(builder.create_splat(new, operand.handle), new)

    return quick


def _patched(semantic: Any) -> Callable[..., None]:
    checked = core.builtin(len).__code__  # of what is around each function of the language
    made: dict[Any, Any] = {}

    def patch_attr(obj: object, name: str, member: Any, builder: Any, scope: Any) -> None:
        if member not in made:
            inner = member.__wrapped__ if getattr(member, "__code__", None) is checked else member
            made[member] = _with_semantic(inner, semantic)
        scope.set_attr(obj, name, made[member])

    return patch_attr


def _with_semantic(function: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*args, **named)

    return call


def remember() -> None:
    semantic = interpreter.interpreter_semantic
    core.block_type.__init__, core.tensor.__init__ = _block_type, _tensor
    core._unwrap_if_constexpr = _unwrap_if_constexpr
    for kind in (core.dtype, core.block_type, core.pointer_type):
        hashed = kind.__hash__
        kind.__eq__ = _same_first(kind.__eq__)
        kind.__hash__ = hashed
    interpreter._get_np_dtype, interpreter._validate_np_data_size = _get_np_dtype, _validate_np_data_size
    semantic.broadcast_impl_value = _same_shape(semantic)
    semantic.binary_op_type_checking_impl = _remembering(semantic.binary_op_type_checking_impl)
    interpreter._patch_attr = _patched(semantic)
