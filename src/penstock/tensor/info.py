"""The limits and kinds of dtypes, and the array API standard's inspection of the namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.execution.realize import explain as explain_nodes
from penstock.graph.node import DType
from penstock.registry import default_device, devices
from penstock.runtime import Device
from penstock.tensor import dtypes
from penstock.tensor.core import Tensor
from penstock.tensor.operands import NUMBERS


@dataclass(frozen=True)
class FloatInfo:
    """The limits of a floating-point dtype."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class IntegerInfo:
    """The limits of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: DType


def _dtype(type: Any) -> DType:
    return type.dtype if isinstance(type, Tensor) else dtypes.checked(type)


def finfo(type: Any, /) -> FloatInfo:
    """The limits of a floating-point dtype, or of that of a tensor.

    >>> ps.finfo(ps.float32).bits
    32
    """
    dtype = _dtype(type)
    if dtype.kind not in "fc":
        raise ValueError(f"finfo is for floating-point dtypes, and {dtype} was given")
    limits = dtypes.limits(dtype)
    return FloatInfo(
        bits=limits.bits,
        eps=float(limits.eps),
        max=float(limits.max),
        min=float(limits.min),
        smallest_normal=float(limits.smallest_normal),
        dtype=dtypes.checked(limits.dtype),
    )


def iinfo(type: Any, /) -> IntegerInfo:
    """The limits of an integer dtype, or of that of a tensor.

    >>> ps.iinfo(ps.int8).max
    127
    """
    dtype = _dtype(type)
    if dtype.kind not in "iu":
        raise ValueError(f"iinfo is for integer dtypes, and {dtype} was given")
    limits = np.iinfo(dtype)
    return IntegerInfo(limits.bits, int(limits.max), int(limits.min), dtype)


def isdtype(dtype: DType, kind: Any) -> bool:
    """Whether a dtype is of a kind: a dtype, the name of a kind, or a tuple of these.

    >>> ps.isdtype(ps.int32, "integral")
    True
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, part) for part in kind)
    if isinstance(kind, str):
        if kind not in dtypes.KINDS:
            raise ValueError(f"{kind!r} is no kind of dtype; there are {', '.join(dtypes.KINDS)}")
        return dtype in dtypes.KINDS[kind]
    return dtype == dtypes.checked(kind)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The dtype to which tensors, dtypes and Python numbers promote; at least one is a tensor or dtype.

    >>> ps.result_type(ps.int32, ps.float32)
    penstock.float32
    """
    numbers = [item for item in arrays_and_dtypes if isinstance(item, NUMBERS)]
    rest = [_dtype(item) for item in arrays_and_dtypes if not isinstance(item, NUMBERS)]
    if not rest:
        raise ValueError("result_type needs a tensor or a dtype")
    result = dtypes.promote(*rest)
    for number in numbers:
        result = dtypes.promote(result, dtypes.of_scalar(number, result))
    return result


def can_cast(from_: Any, to: DType, /) -> bool:
    """Whether a dtype, or that of a tensor, can be cast to another safely, as by `numpy.can_cast`.

    >>> ps.can_cast(ps.int32, ps.int64)
    True
    """
    return np.can_cast(_dtype(from_).numpy, dtypes.checked(to).numpy)


class NamespaceInfo:
    """The array API standard's inspection of a namespace."""

    def capabilities(self) -> dict[str, Any]:
        """The optional features of the standard."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> Device:
        """The device of new tensors by default."""
        return default_device()

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        """The default dtypes by kind."""
        return dict(dtypes.DEFAULTS)

    def devices(self) -> list[Device]:
        """All devices."""
        return devices()

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        """The standard's dtypes by name, or those of a kind; without float16 and bfloat16."""
        standard = [dtype for dtype in dtypes.ALL if dtype not in dtypes.HALF_PRECISION]
        return {str(dtype): dtype for dtype in standard if kind is None or isdtype(dtype, kind)}


def __array_namespace_info__() -> NamespaceInfo:  # noqa: N807 - the standard's name
    """The array API standard's inspection of this namespace.

    >>> ps.__array_namespace_info__().default_device()
    <Device host: NumPy>
    """
    return NamespaceInfo()


def explain(*tensors: Tensor) -> str:
    """How these tensors would be computed, step by step, with the bytes that each step moves.

    >>> "add" in ps.explain(ps.ones(4) + 1)
    True
    """
    if not tensors:
        raise ValueError("explain needs a tensor")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"explain takes tensors, and {type(tensor).__name__} was given; give what a function returns"
            )
    if len(names := sorted({tensor.device.name for tensor in tensors})) > 1:
        raise ValueError(f"explain takes tensors of one device, and those of {names} were given")
    return explain_nodes([tensor._node for tensor in tensors], tensors[0].device)
