"""Data types and their promotion: as in the array API standard, and beyond it as in PyTorch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from penstock.graph.dtypes import (
    ALL,
    COMPLEX,
    FLOATING,
    HALF_PRECISION,
    SIGNED,
    UNSIGNED,
    DType,
    bfloat16,
    bool_,
    checked,
    complex64,
    complex128,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    limits,
    uint8,
    uint16,
    uint32,
    uint64,
)

__all__ = [
    "ALL",
    "DEFAULTS",
    "HALF_PRECISION",
    "KINDS",
    "bfloat16",
    "bool_",
    "checked",
    "complex64",
    "complex128",
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "limits",
    "of_scalar",
    "promote",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]

DEFAULTS = {
    "real floating": float32,
    "complex floating": complex64,
    "integral": int64,
    "indexing": int64,
}
KINDS: dict[str, tuple[DType, ...]] = {
    "bool": (bool_,),
    "signed integer": SIGNED,
    "unsigned integer": UNSIGNED,
    "integral": SIGNED + UNSIGNED,
    "real floating": FLOATING,
    "complex floating": COMPLEX,
    "numeric": SIGNED + UNSIGNED + FLOATING + COMPLEX,
}
_ORDER = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}


def promote(*dtypes: DType) -> DType:
    """The common dtype. Of integers and floating point, the floating-point dtype, whatever the sizes."""
    result = dtypes[0]
    for other in dtypes[1:]:
        if other is not result:
            result = _common(result, other)
    return result


@cache
def _common(first: DType, second: DType) -> DType:
    low, high = sorted((first, second), key=lambda dtype: (_ORDER[dtype.kind], dtype.itemsize))
    if _ORDER[low.kind] < _ORDER[high.kind]:
        return complex128 if low is float64 else high
    if high.kind in "fc":
        # float16 and bfloat16: neither has the range and the precision of both.
        return float32 if high in HALF_PRECISION else high
    common = checked(np.promote_types(low, high))
    if common.kind == "f":
        raise TypeError(f"{low} and {high} have no common integer type; convert one of them first")
    return common


def of_scalar(scalar: Any, beside: DType | None) -> DType:
    """The dtype of a Python number in an operation with a tensor of dtype `beside`, or by itself."""
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
    if order == 3 and beside is float64:
        return complex128
    return (bool_, int64, float32, complex64)[order]
