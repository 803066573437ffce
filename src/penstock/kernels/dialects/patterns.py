"""The expressions that C and WGSL share, and how reductions start and combine values."""

from __future__ import annotations

import math

import numpy as np

# The primitive that combines two values, for each reduction.
COMBINE = {
    "sum": "add",
    "prod": "multiply",
    "max": "maximum",
    "min": "minimum",
    "any": "logical_or",
    "all": "logical_and",
}


def infix(**symbols: str) -> dict[str, str]:
    """Patterns of primitives with two inputs, {0} and {1}, from their operators."""
    return {name: f"({{0}} {symbol} {{1}})" for name, symbol in symbols.items()}


COMPARISONS = infix(equal="==", not_equal="!=", less="<", less_equal="<=", greater=">", greater_equal=">=")
# For argmax and argmin of integers, which have no NaN.
EXTREMES = infix(greater_or_nan=">", less_or_nan="<")
ARITHMETIC = infix(add="+", subtract="-", multiply="*", divide="/") | {"negative": "(-{0})"}
BITS = infix(bitwise_and="&", bitwise_or="|", bitwise_xor="^") | {"bitwise_invert": "(~{0})"}


def of_booleans(conjunction: str, disjunction: str, unequal: str) -> dict[str, str]:
    """Patterns of primitives on booleans, from the language's three operators."""
    names = {
        conjunction: "logical_and bitwise_and multiply minimum",
        disjunction: "logical_or bitwise_or add maximum",
        unequal: "logical_xor bitwise_xor not_equal",
    }
    symbols = {name: symbol for symbol, same in names.items() for name in same.split()}
    return infix(**symbols) | dict.fromkeys(("logical_not", "bitwise_invert"), "(!{0})")


def identity(reduction: str, dtype: str) -> int | float:
    """The identity element of a reduction."""
    if reduction in ("sum", "any"):
        return 0
    if reduction in ("prod", "all"):
        return 1
    if dtype == "bool":
        return int(reduction == "min")
    if "float" in dtype:
        return math.inf if reduction == "min" else -math.inf
    return int(np.iinfo(dtype).max if reduction == "min" else np.iinfo(dtype).min)
