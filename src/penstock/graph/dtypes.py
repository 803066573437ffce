"""Data types, a single object for each. NumPy accepts them wherever it accepts a dtype.

bfloat16 is a float32 without its last 16 bits. NumPy knows it from ml_dtypes.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


class DType:
    """The type of a tensor's items. There is a single object for each type, so `is` compares them.

    It also equals NumPy's dtype and scalar type of the same name, and nothing else.
    """

    __slots__ = ("_hash", "itemsize", "kind", "name", "numpy")

    def __init__(self, scalar: type) -> None:
        self.numpy: np.dtype[Any] = np.dtype(scalar)
        self.name: str = self.numpy.name
        self.kind: str = "f" if scalar is ml_dtypes.bfloat16 else self.numpy.kind
        self.itemsize: int = self.numpy.itemsize
        self._hash = hash(self.numpy)

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype, where NumPy looks for it."""
        return self.numpy

    __numpy_dtype__ = dtype  # where NumPy 2.4 looks first

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self is other
        if other is self.numpy.type:
            return True
        return bool(other == self.numpy) if isinstance(other, np.dtype) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return checked, (self.name,)  # a copy is the object itself

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"penstock.{self.name}"


bool_ = DType(np.bool_)
int8, int16, int32, int64 = DType(np.int8), DType(np.int16), DType(np.int32), DType(np.int64)
uint8, uint16, uint32, uint64 = DType(np.uint8), DType(np.uint16), DType(np.uint32), DType(np.uint64)
bfloat16, float16 = DType(ml_dtypes.bfloat16), DType(np.float16)
float32, float64 = DType(np.float32), DType(np.float64)
complex64, complex128 = DType(np.complex64), DType(np.complex128)

SIGNED, UNSIGNED = (int8, int16, int32, int64), (uint8, uint16, uint32, uint64)
HALF_PRECISION = (bfloat16, float16)  # computed in float32, and rounded once when they are stored
FLOATING, COMPLEX = (*HALF_PRECISION, float32, float64), (complex64, complex128)
ALL = (bool_, *SIGNED, *UNSIGNED, *FLOATING, *COMPLEX)
_BY_NUMPY = {dtype.numpy: dtype for dtype in ALL}
_BY_NAME = {dtype.name: dtype for dtype in ALL}


def checked(dtype: Any) -> DType:
    """The dtype for a NumPy dtype, a scalar type or a name; for others, a TypeError that lists all dtypes."""
    if isinstance(dtype, DType):
        return dtype
    try:
        if dtype is not None:
            known = np.dtype(dtype)
            return _BY_NUMPY.get(known) or _BY_NAME[known.name]  # by name: the byte order may be another
    except (TypeError, KeyError):
        pass
    raise TypeError(f"{dtype!r} is no dtype of Penstock; there are {', '.join(_BY_NAME)}")


def limits(dtype: DType) -> Any:
    """`np.finfo` of a dtype, also for bfloat16."""
    return ml_dtypes.finfo(np.dtype(dtype))  # type: ignore[no-untyped-call]
