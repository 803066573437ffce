"""What there is: dtypes, their limits, and the standard's inspection of the namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.graph.node import DType
from penstock.registry import default_device, devices
from penstock.runtime import Device
from penstock.tensor import dtypes
from penstock.tensor.core import Tensor


@dataclass(frozen=True)
class FloatInfo:
    """The limits of a floating-point type."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class IntegerInfo:
    """The limits of an integer type."""

    bits: int
    max: int
    min: int
    dtype: DType


def _dtype(type: Any) -> DType:
    return type.dtype if isinstance(type, Tensor) else dtypes.checked(type)


def finfo(type: Any, /) -> FloatInfo:
    """The limits of a floating-point type, or of a tensor's."""
    dtype = _dtype(type)
    if dtype.kind not in "fc":
        raise ValueError(f"finfo is for floating-point dtypes, and {dtype} was given")
    found = dtypes.limits(dtype)
    return FloatInfo(
        bits=found.bits,
        eps=float(found.eps),
        max=float(found.max),
        min=float(found.min),
        smallest_normal=float(found.smallest_normal),
        dtype=dtypes.checked(found.dtype),
    )


def iinfo(type: Any, /) -> IntegerInfo:
    """The limits of an integer type, or of a tensor's."""
    dtype = _dtype(type)
    if dtype.kind not in "iu":
        raise ValueError(f"iinfo is for integer dtypes, and {dtype} was given")
    found = np.iinfo(dtype)
    return IntegerInfo(found.bits, int(found.max), int(found.min), dtype)


def isdtype(dtype: DType, kind: Any) -> bool:
    """Whether a dtype is of a kind: another dtype, a kind's name, or a tuple of such."""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, one) for one in kind)
    if isinstance(kind, str):
        if kind not in dtypes.KINDS:
            raise ValueError(f"{kind!r} is no kind of dtype; there are {', '.join(dtypes.KINDS)}")
        return dtype in dtypes.KINDS[kind]
    return dtype == dtypes.checked(kind)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The dtype of a result of all these tensors, dtypes and Python numbers together."""
    numbers = [one for one in arrays_and_dtypes if isinstance(one, (bool, int, float, complex))]
    rest = [_dtype(one) for one in arrays_and_dtypes if not isinstance(one, (bool, int, float, complex))]
    if not rest:
        raise ValueError("result_type needs a tensor or a dtype")
    result = dtypes.promote(*rest)
    for number in numbers:
        result = dtypes.promote(result, dtypes.of_scalar(number, result))
    return result


def can_cast(from_: Any, to: DType, /) -> bool:
    """Whether every value of one dtype is one of the other."""
    return np.can_cast(_dtype(from_).numpy, dtypes.checked(to).numpy)


class NamespaceInfo:
    """The standard's inspection: what this namespace has and by what it goes."""

    def capabilities(self) -> dict[str, Any]:
        """What is there beyond the minimum."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> Device:
        """Where tensors are made if nothing else is said."""
        return default_device()

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        """The dtypes that Python numbers take."""
        return dict(dtypes.DEFAULTS)

    def devices(self) -> list[Device]:
        """All devices."""
        return devices()

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        """The standard's dtypes by name, or those of a kind. float16 and bfloat16 are there beyond it."""
        standard = [dtype for dtype in dtypes.ALL if dtype not in dtypes.HALF_PRECISION]
        return {str(dtype): dtype for dtype in standard if kind is None or isdtype(dtype, kind)}


def __array_namespace_info__() -> NamespaceInfo:  # noqa: N807 - the standard's name
    """The standard's inspection of this namespace."""
    return NamespaceInfo()
