"""The values of nodes, and of their constants, by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.graph.dtypes import HALF_PRECISION, DType, checked
from penstock.graph.node import Array, Node, leaf, topological

Constant = tuple[str, Any]  # dtype, and the bits of a number
Evaluator = Callable[[list[Array], dict[str, Any]], Array]
_HALVES = frozenset(dtype.numpy.type for dtype in HALF_PRECISION)


def computed(node: Node, inputs: list[Array], attributes: dict[str, Any] | None = None) -> Array:
    """A node's value by its reference. As in kernels, float16 and bfloat16 are computed in float32."""
    with np.errstate(all="ignore"):
        return evaluator(node)(inputs, node.attributes if attributes is None else attributes)


def evaluator(node: Node) -> Evaluator:
    """What computes a node's value from those of its inputs, with these attributes, inside `np.errstate`."""
    reference, dtype = node.primitive.reference, np.dtype(node.dtype)
    widens = node.primitive.widens and any(np.dtype(x.dtype).type in _HALVES for x in node.inputs)

    def evaluate(inputs: list[Array], attributes: dict[str, Any]) -> Array:
        if widens:
            inputs = [x.astype(np.float32) if x.dtype.type in _HALVES else x for x in inputs]
        result = reference(*inputs, **attributes)
        if type(result) is np.ndarray and result.dtype == dtype:
            return result
        return np.asarray(result).astype(dtype, copy=False)

    return evaluate


def by_parts(parts: Callable[..., Node], *arrays: Array) -> Array:
    """The reference of a primitive that is made of others: the value of these."""
    leaves = [leaf(array, array.shape, checked(array.dtype)) for array in arrays]
    values = dict(zip(leaves, arrays, strict=True))
    result = parts(*leaves)
    for node in topological([result]):
        if node not in values:
            values[node] = computed(node, [values[parent] for parent in node.inputs])
    return values[result]


def number_key(node: Node, name: str) -> Constant:
    """A constant by its dtype and bits, so that 0 and -0 or 1 and True differ."""
    dtype, value = node.primitive.dtypes.get(name, node.dtype), node.attributes[name]
    # Python takes 0 and -0, also as parts of a complex number, for the same.
    same_bits = value and type(value) is not complex
    return _constant(dtype, value) if same_bits else _constant.__wrapped__(dtype, value)


@lru_cache(1 << 12, typed=True)
def _constant(dtype: DType, value: Any) -> Constant:
    with np.errstate(over="ignore"):  # a number that is too large for the dtype is infinite in it
        return str(dtype), np.asarray(value).astype(dtype).tobytes()


@lru_cache(1 << 12)
def number(constant: Constant) -> Any:
    """The Python number that a constant is."""
    dtype, bits = constant
    return np.frombuffer(bits, dtype)[0].item()


@lru_cache(1 << 10)
def numbers(constants: tuple[Constant, ...]) -> tuple[Any, ...]:
    """The numbers that constants are: mostly the same object again, and another one if any bit differs."""
    return tuple(map(number, constants))
