"""NumPy's universal functions of tensors: computed if Penstock has the function, refused otherwise.

NumPy's operators call them: `array * tensor` is `np.multiply(array, tensor)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.tensor import arithmetic, linear, special
from penstock.tensor.core import Tensor

# NumPy's names that differ from those of the array API standard.
_OTHER_NAMES = {
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "conjugate": "conj",
    "invert": "bitwise_invert",
    "left_shift": "bitwise_left_shift",
    "power": "pow",
    "right_shift": "bitwise_right_shift",
    "rint": "round",
}


def applied(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """The result of a universal function of tensors, arrays and numbers, or a TypeError that names it."""
    name = f"np.{ufunc.__name__}"
    if method == "__call__" and "out" in options:
        raise TypeError(f"{name} cannot write a tensor into {_kinds(options['out'])}; use tensor.numpy()")
    if method != "__call__" or options:
        what = f"with {', '.join(options)}" if method == "__call__" else f"as {name}.{method}"
        raise TypeError(f"{name} does not take a tensor {what}; use a function of ps, or tensor.numpy()")
    function = _function(ufunc)
    if function is None:
        raise TypeError(f"{name} is no function of tensors; use those of ps, or tensor.numpy()")
    return function(*inputs)


def _function(ufunc: np.ufunc) -> Callable[..., Tensor] | None:
    name = _OTHER_NAMES.get(ufunc.__name__, ufunc.__name__)
    if name in ("matmul", "vecdot"):
        product: Callable[..., Tensor] = getattr(linear, name)
        return product
    if name in ("exp2", "fmod"):
        return getattr(special, name)  # type: ignore[no-any-return]
    return getattr(arithmetic, name, None) if getattr(np, ufunc.__name__, None) is ufunc else None


def _kinds(values: Any) -> str:
    return " and ".join(type(value).__name__ for value in values)
