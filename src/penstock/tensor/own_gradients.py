"""Gradients that users define for their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import KernelError
from penstock.graph import elementwise, reducing, shaping
from penstock.tensor.autograd import custom_vjp
from penstock.tensor.broadcasting import common_shape
from penstock.tensor.core import Tensor, record

# (gradient of the result, result, arguments in order) -> the gradient of each argument, or None.
GradientFunction = Callable[..., "Tensor | Sequence[Tensor | None]"]


def with_gradient(
    name: str, result: Tensor, args: Sequence[Any], gradient: Callable[..., Any], kept: Sequence[Tensor] = ()
) -> Tensor:
    """`result` with a user's gradient with respect to the tensors in `args`.

    `gradient` is given the tensors in `kept`, if there are any, instead of the result.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]

    def rule(g: Tensor, value: Tensor, *passed: Tensor) -> list[Tensor | None]:
        given = iter(passed)
        values = [next(given) if isinstance(arg, Tensor) else arg for arg in args]
        returned = gradient(g, tuple(given) if kept else value, *values)
        parts = [returned] if isinstance(returned, Tensor) else [*returned]
        missing = args[len(parts) :]
        if len(parts) > len(args) or any(isinstance(arg, Tensor) for arg in missing):
            raise KernelError(
                f"the gradient of {name!r} has to return a tensor or None for each of {len(args)} arguments, "
                f"and it returned {len(parts)}; only numbers at the end can be left out"
            )
        pairs = enumerate(zip(values, parts, strict=False))
        fitted = [_fitted(name, at, arg, part) for at, (arg, part) in pairs if isinstance(arg, Tensor)]
        return [*fitted, *(None for _ in kept)]

    return custom_vjp(result, [*tensors, *kept], rule)


def _fitted(name: str, position: int, argument: Tensor, part: Any) -> Tensor | None:
    """A gradient in the shape and dtype of its argument, summed over axes along which that was broadcast."""
    if part is None:
        return None
    what = f"the gradient of {name!r} with respect to argument {position}"
    if not isinstance(part, Tensor):
        raise KernelError(f"{what} has to be a tensor or None, and it is {type(part).__name__}")
    shape = argument.shape
    if part.ndim < len(shape) or common_shape(part.shape, shape) != part.shape:
        raise KernelError(f"{what} has to have its shape {shape}, and has {part.shape}")
    node = part._node
    before = part.ndim - len(shape)
    padded = (1,) * before + shape
    axes = tuple(axis for axis, length in enumerate(padded) if length != part.shape[axis] or axis < before)
    node = shaping.reshape(reducing.sum_(node, axes), shape)
    return record(elementwise.cast(node, argument.dtype), part)
