"""Data types: one object for each, whose equality is strict. NumPy takes them wherever it takes a dtype.

Bfloat16 is stored in 2 bytes, and is a float32 without its last 16 bits. NumPy knows it from ml_dtypes.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


class DType:
    """A type of items. There is one object for each type, so that `is` compares them.

    It is equal to NumPy's dtype and scalar type of the same name too, and to nothing else.
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
        if self is other or other is self.numpy.type:
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
HALF_PRECISION = (bfloat16, float16)  # stored only: they are computed in float32, and rounded once at the end
FLOATING, COMPLEX = (*HALF_PRECISION, float32, float64), (complex64, complex128)
ALL = (bool_, *SIGNED, *UNSIGNED, *FLOATING, *COMPLEX)
_BY_NUMPY = {dtype.numpy: dtype for dtype in ALL}
_BY_NAME = {dtype.name: dtype for dtype in ALL}


def checked(dtype: Any) -> DType:
    """A dtype from NumPy's, from a scalar type or from a name, or a TypeError that lists them."""
    if isinstance(dtype, DType):
        return dtype
    try:
        if dtype is not None:
            known = np.dtype(dtype)
            return _BY_NUMPY.get(known) or _BY_NAME[known.name]  # in another order of bytes, it has the name
    except (TypeError, KeyError):
        pass
    raise TypeError(f"{dtype!r} is no dtype of Penstock; there are {', '.join(_BY_NAME)}")


def limits(dtype: DType) -> Any:
    """What `np.finfo` says, of bfloat16 too."""
    return ml_dtypes.finfo(np.dtype(dtype))  # type: ignore[no-untyped-call]
