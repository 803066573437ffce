"""Data types and their promotion, as the array API standard has them, and as PyTorch has them beyond it."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.graph.node import DType

bool_ = np.dtype(np.bool_)
int8, int16, int32, int64 = (np.dtype(f"int{bits}") for bits in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64))
float16, float32, float64 = (np.dtype(f"float{bits}") for bits in (16, 32, 64))
complex64, complex128 = np.dtype(np.complex64), np.dtype(np.complex128)

DEFAULTS = {
    "real floating": float32,
    "complex floating": complex64,
    "integral": int64,
    "indexing": int64,
}
KINDS = {
    "bool": (bool_,),
    "signed integer": (int8, int16, int32, int64),
    "unsigned integer": (uint8, uint16, uint32, uint64),
    "real floating": (float16, float32, float64),
    "complex floating": (complex64, complex128),
}
KINDS["integral"] = KINDS["signed integer"] + KINDS["unsigned integer"]
KINDS["numeric"] = KINDS["integral"] + KINDS["real floating"] + KINDS["complex floating"]
ALL = KINDS["bool"] + KINDS["numeric"]
_ORDER = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}


def checked(dtype: Any) -> DType:
    """A dtype that Penstock has, or a TypeError that lists them."""
    try:
        if dtype is not None and (found := np.dtype(dtype)) in ALL:
            return ALL[ALL.index(found)]
    except TypeError:
        pass
    raise TypeError(f"{dtype!r} is no dtype of Penstock; there are {', '.join(map(str, ALL))}")


def promote(*dtypes: DType) -> DType:
    """The dtype that holds values of all of them. Of whole numbers and fractions, the fractions' own."""
    result = dtypes[0]
    for other in dtypes[1:]:
        if other is result:
            continue
        low, high = sorted((result, other), key=lambda dtype: _ORDER[dtype.kind])
        if _ORDER[low.kind] == _ORDER[high.kind] or high.kind == "c" == low.kind:
            result = np.promote_types(low, high)
            if low.kind != high.kind and result.kind == "f":
                raise TypeError(f"{low} and {high} have no common integer type; convert one of them first")
        elif high.kind == "c" and low.kind == "f":
            result = np.promote_types(low, high) if low != float16 else high
        else:
            result = high
    return result


def of_scalar(scalar: Any, beside: DType | None) -> DType:
    """The dtype that a Python number takes beside an array of dtype `beside`, or alone."""
    order = (
        0
        if isinstance(scalar, bool)
        else 1
        if isinstance(scalar, int)
        else 2
        if isinstance(scalar, float)
        else 3
    )
    if beside is not None and _ORDER[beside.kind] >= order:
        return beside
    if order == 3 and beside is not None and beside == float64:
        return complex128
    return (bool_, int64, float32, complex64)[order]
