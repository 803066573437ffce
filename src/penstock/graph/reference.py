"""The reference values of nodes by NumPy, and keys of constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from penstock.graph.dtypes import HALF_PRECISION, checked
from penstock.graph.node import Array, Kind, Node, leaf, topological

Constant = tuple[str, Any]  # the dtype and the bits of a constant
Evaluator = Callable[[Sequence[Array], dict[str, Any]], Array]
_HALVES = frozenset(dtype.numpy.type for dtype in HALF_PRECISION)


def computed(node: Node, inputs: list[Array], attributes: dict[str, Any] | None = None) -> Array:
    """A node's value by its reference. As in kernels, float16 and bfloat16 are computed in float32."""
    with np.errstate(all="ignore"):
        return evaluator(node)(inputs, node.attributes if attributes is None else attributes)


def evaluator(node: Node) -> Evaluator:
    """A function of inputs and attributes that computes a node's value; call it inside `np.errstate`."""
    reference, dtype = node.primitive.reference, np.dtype(node.dtype)
    widens = node.primitive.widens and any(np.dtype(x.dtype).type in _HALVES for x in node.inputs)

    def evaluate(inputs: Sequence[Array], attributes: dict[str, Any]) -> Array:
        if widens:
            inputs = [x.astype(np.float32) if x.dtype.type in _HALVES else x for x in inputs]
        result = reference(*inputs, **attributes)
        if type(result) is np.ndarray and result.dtype == dtype:
            return result
        return np.asarray(result).astype(dtype, copy=False)

    return evaluate


def into_memory(node: Node) -> Callable[..., Array] | None:
    """A function of inputs that computes a node's value, into `out` if it is given; None if there is none."""
    reference, inputs = node.primitive.reference, [np.dtype(x.dtype) for x in node.inputs]
    if node.primitive.takes_out:
        return partial(reference, **node.attributes)
    if node.primitive.kind is Kind.VIEW:
        return partial(_view, partial(reference, **node.attributes))
    if not isinstance(reference, np.ufunc) or any(dtype.type in _HALVES for dtype in inputs):
        return None
    return reference if reference.resolve_dtypes((*inputs, None))[-1] == np.dtype(node.dtype) else None


def _view(view: Callable[..., Array], *inputs: Array, out: Array | None = None) -> Array:
    """A view of the first input, or its copy in `out`; a barrier has other inputs, which it waits for."""
    if out is None:
        return view(*inputs)
    np.copyto(out, view(*inputs))
    return out


def by_parts(parts: Callable[..., Node], *arrays: Array) -> Array:
    """The value of a graph that `parts` makes of leaves: the reference of a primitive made of others."""
    leaves = [leaf(array, array.shape, checked(array.dtype)) for array in arrays]
    values = dict(zip(leaves, arrays, strict=True))
    result = parts(*leaves)
    for node in topological([result]):
        if node not in values:
            values[node] = computed(node, [values[parent] for parent in node.inputs])
    return values[result]


def constant_key(node: Node, name: str) -> Constant:
    """A constant by its dtype and bits, so that 0 and -0 or 1 and True differ."""
    dtype, value = node.primitive.dtypes.get(name, node.dtype).name, node.attributes[name]
    if type(value) is complex:
        return _constant.__wrapped__(dtype, value)
    # 0 and -0 are equal in Python, and so they are in the cache.
    return _constant(dtype, value) if value else _constant(dtype, value, math.copysign(1.0, value))


@lru_cache(1 << 12, typed=True)
def _constant(dtype: str, value: Any, sign: float = 1.0) -> Constant:
    """`sign` distinguishes 0 from -0."""
    with np.errstate(over="ignore"):  # a value that is too large for the dtype becomes infinity
        return dtype, np.asarray(value).astype(checked(dtype)).tobytes()


@lru_cache(1 << 12)
def constant_value(constant: Constant) -> Any:
    """The Python value of a constant."""
    dtype, bits = constant
    return np.frombuffer(bits, dtype)[0].item()


@lru_cache(1 << 10)
def constant_values(constants: tuple[Constant, ...]) -> tuple[Any, ...]:
    """The Python values of constants: the same tuple for the same bits, as long as it is cached."""
    return tuple(map(constant_value, constants))
