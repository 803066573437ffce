"""Operands of expressions: tensors, Python numbers, NumPy scalars and NumPy arrays.

A NumPy scalar counts as a Python number: it does not change a tensor's dtype to a wider one. A NumPy array
is converted to a tensor of the same dtype on the other operand's device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.graph import elementwise
from penstock.graph.example import NUMBER
from penstock.graph.node import DType, Node, Shape
from penstock.runtime import Device
from penstock.tensor import core, dtypes
from penstock.tensor.broadcasting import broadcast_node, common_shape
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, from_numpy, note_used, record, scalar

Array: TypeAlias = Tensor | npt.NDArray[Any]  # the arguments of functions of several tensors
NUMBERS = (bool, int, float, complex)
OPERANDS = (Tensor, *NUMBERS, np.ndarray, np.generic)
_PYTHON = {"b": bool, "i": int, "u": int, "f": float, "c": complex}
_HELD = 1 << 24  # float32 holds all integers up to this
FITS = {float: "fc", int: "iufc"}  # by type of a number, the kinds of dtypes that it does not change


def operands(*values: Any, name: str) -> list[Tensor]:
    """Tensors, numbers and arrays as tensors of the same shape, dtype and device."""
    if len(values) == 2 and (pair := alike(*values)) is not None:
        return pair
    note_used(
        *(value for value in values if isinstance(value, Tensor))
    )  # first: arrays may change between a capture and a replay
    device = device_of(name, *values)
    values = tuple(operand(value, device, name) for value in values)
    tensors = [value for value in values if isinstance(value, Tensor)]
    dtype = dtypes.promote(*(tensor.dtype for tensor in tensors))
    for value in values:
        if not isinstance(value, Tensor):
            dtype = dtypes.promote(dtype, dtypes.of_scalar(value, dtype))
    shape = common_shape(*(tensor.shape for tensor in tensors))
    converted = [v if isinstance(v, Tensor) else scalar(v, dtype, device) for v in values]
    return [record(broadcast_node(elementwise.cast(t._node, dtype), shape), t) for t in converted]


def as_tensors(name: str, *values: Any) -> list[Tensor]:
    """Tensors of one device and NumPy arrays, at least one of them a tensor, as tensors on its device."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, np.ndarray):
            value = constant(value, device_of(name, *values))
        elif not isinstance(value, Tensor):
            device_of(name, *values)  # its error comes first
            raise TypeError(f"{name} takes tensors and NumPy arrays, and {type(value).__name__} was given")
        tensors.append(value)
    for tensor in tensors:
        if tensor.device is not tensors[0].device:
            names = f"{tensors[0].device.name} and {tensor.device.name}"
            raise ValueError(f"{name}: tensors are on {names}; use to_device first")
    return tensors


def as_number(value: Any) -> Any:
    """A NumPy scalar as a Python number; other values unchanged."""
    if isinstance(value, np.generic):
        return _PYTHON[dtypes.checked(value.dtype).kind](value)
    return value


def fitted(number: Any, dtype: DType, name: str) -> Any:
    """A number converted for a dtype; a TypeError, ValueError or OverflowError if it does not fit."""
    number = as_number(number)
    if not isinstance(number, NUMBERS):
        raise TypeError(f"{name} takes a number, and {type(number).__name__} was given")
    if isinstance(number, complex) and dtype.kind != "c":
        raise TypeError(f"{name}: {number} cannot become {dtype}, which has no imaginary part")
    if isinstance(number, float) and dtype.kind in "iu":
        if not math.isfinite(number):
            raise ValueError(f"{name}: {number} cannot become {dtype}")
        number = int(number)
    if type(number) is int:
        elementwise.check_range(number, dtype)
    return number


def constant(array: npt.NDArray[Any], device: Device) -> Tensor:
    """A tensor with the values of a NumPy array."""
    note_constant(array)
    return from_numpy(array, device)


def note_constant(array: npt.NDArray[Any]) -> None:
    """Make a capture depend on the values of an array: a call after a change captures anew."""
    if isinstance(array, (np.ma.MaskedArray, np.matrix)):
        kind = type(array).__name__
        raise TypeError(f"a tensor does not keep what {kind} means; give np.asarray of it")
    capturing = capture.get()
    if capturing is not None:
        capturing.assume(_same_values(array))


def _same_values(array: npt.NDArray[Any]) -> Callable[[], bool]:
    """A check whether an array still has its present values. An array that was freed cannot have changed."""
    before = array.tobytes()
    if array.base is not None:  # a view: its memory may change through another array
        return lambda: array.tobytes() == before
    reference = weakref.ref(array)

    def same() -> bool:
        alive = reference()
        return alive is None or alive.tobytes() == before

    return same


def device_of(name: str, *values: Any) -> Device:
    """The device of the first tensor; a TypeError if there is none."""
    for value in values:
        if isinstance(value, Tensor):
            return value.device
    raise TypeError(
        f"{name} needs a tensor, and {[type(v).__name__ for v in values]} were given; ps.asarray makes one"
    )


def operand(value: Any, device: Device, name: str) -> Any:
    """An operand as a tensor or a Python number."""
    if isinstance(value, Tensor) or type(value) in _PYTHON.values():
        return value
    if isinstance(value, np.ndarray):
        return constant(value, device)
    if not isinstance(value, (*NUMBERS, np.generic)):
        raise TypeError(f"{name} takes tensors, NumPy arrays and numbers, not {type(value).__name__}")
    return as_number(value)


def plain(x: Any, y: Any) -> tuple[Node, Node, Device, bool] | None:
    """The fast path: the nodes of two operands that need no conversion.

    With their device, and whether one of them requires a gradient. None if a conversion or a capture needs
    the general path.
    """
    if core._captures:
        return None
    if not isinstance(x, Tensor):
        if not isinstance(y, Tensor):
            return None
        node = y._actual_node
        if node.dtype.kind not in FITS.get(type(x), ""):
            return None
        return constant_like(node, x), node, y.device, y._actual_requires_grad
    node = x._actual_node
    if not isinstance(y, Tensor):
        if node.dtype.kind not in FITS.get(type(y), ""):
            return None
        return node, constant_like(node, y), x.device, x._actual_requires_grad
    other, gradient = y._actual_node, x._actual_requires_grad or y._actual_requires_grad
    if node.dtype is not other.dtype or x.device is not y.device:
        return None
    if node.shape != other.shape:
        if not gradient or not _is_row(other, node):
            return None
        other = broadcast_node(other, node.shape)
    return node, other, x.device, gradient


def values_only(x: Any, y: Any) -> bool:
    """Whether operands are two tensors without gradients, outside of any capture."""
    if core._captures or not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return False
    return not (x._actual_requires_grad or y._actual_requires_grad)


def _is_row(node: Node, matrix: Node) -> bool:
    """Whether a node broadcasts along the leading axes of another, such as a bias."""
    count = len(node.shape)
    return 0 < count < len(matrix.shape) and matrix.shape[-count:] == node.shape


def constant_like(node: Node, number: float) -> Node:
    """A constant in the shape and dtype of a node; equal constants share a node."""
    return _filled(node.shape, node.dtype.name, number, math.copysign(1.0, number) if not number else 1.0)


def number_in(number: Any, dtype: DType, device: Device) -> Tensor | None:
    """A Python number as a tensor without axes, where a dtype holds it; else None.

    One program serves all numbers, and what it computes is like what was computed of other numbers.
    """
    is_real = dtype.kind == "f" and type(number) in (int, float)
    is_whole = dtype.kind == "i" and type(number) is int
    if not (is_real or is_whole) or dtype.itemsize < 4 or not -_HELD <= number <= _HELD:
        return None
    sign = math.copysign(1.0, number) if not number else 1.0
    return Tensor(_filled((), dtype.name, number, sign), device)


@lru_cache(1 << 10, typed=True)
def _filled(shape: Shape, dtype: str, number: float, sign: float) -> Node:
    """`sign` separates the cache entries of 0.0 and -0.0, which are equal."""
    node = elementwise.full(shape, dtypes.checked(dtype), number)
    node.like = NUMBER
    return node


def alike(x: Any, y: Any) -> list[Tensor] | None:
    """Two operands as tensors of the same shape and dtype, if that needs at most a broadcast; else None."""
    if isinstance(x, Tensor):
        node = x._node
        if isinstance(y, Tensor):
            other = y._node
            if node.dtype is not other.dtype:
                return None
            if node.shape == other.shape:
                return [x, y]
            if _is_row(other, node) and x.device is y.device and (x.requires_grad or y.requires_grad):
                return [x, record(broadcast_node(other, node.shape), y)]
            return None
        if node.dtype.kind in FITS.get(type(y), ""):
            return [x, Tensor(constant_like(node, y), x.device)]
    elif isinstance(y, Tensor):
        node = y._node
        if node.dtype.kind in FITS.get(type(x), ""):
            return [Tensor(constant_like(node, x), y.device), y]
    return None
