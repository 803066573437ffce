"""Parametrizations: weights that are computed from other parameters."""

from __future__ import annotations

from functools import cache
from typing import Any

from penstock.nn.module import Module
from penstock.nn.parameter import Parameter
from penstock.tensor.arithmetic import sqrt
from penstock.tensor.broadcasting import axes_of
from penstock.tensor.core import Tensor
from penstock.tensor.recording import no_grad
from penstock.tensor.reduction import sum as sum_

__all__ = ["weight_norm"]
_Norms = tuple[
    tuple[str, int | None], ...
]  # names of weights, each with the axis that has a length for each item


def weight_norm(module: Module, name: str = "weight", dim: int | None = 0) -> Module:
    """Train the length and the direction of a weight: `original0 * original1 / |original1|`.

    There is a length for each item of axis `dim`, or a single length with None. The module is changed, and
    returned. Its parameters have PyTorch's names.
    """
    weight = vars(module).get(name)
    if not isinstance(weight, Tensor) or not weight.requires_grad:
        raise ValueError(f"weight_norm: {type(module).__name__} has no parameter {name!r}")
    axis = None if dim is None else axes_of(weight, dim, "weight_norm")[0]
    with no_grad():
        length = _length(weight, axis)
    known = vars(module).get("parametrizations", {})
    parts = {"original0": Parameter(length.detach()), "original1": Parameter(weight.detach())}
    delattr(module, name)
    module.parametrizations = {**known, name: parts}
    base, norms = _plain(type(module))
    module.__class__ = _normed(base, (*norms, (name, axis)))
    return module


def _length(weight: Tensor, axis: int | None) -> Tensor:
    axes = tuple(at for at in range(weight.ndim) if at != axis)
    return sqrt(sum_(weight * weight, axis=axes, keepdims=axis is not None))


def _plain(kind: type[Module]) -> tuple[Any, _Norms]:
    """The original class of a module, and its weight norms."""
    known: tuple[Any, _Norms] = vars(kind).get("_plain", (kind, ()))
    return known


@cache
def _normed(base: Any, norms: _Norms) -> type[Module]:
    """A class whose weights are properties, computed at every access."""

    def reduced(self: Module) -> tuple[Any, ...]:
        return _made, (base, norms), vars(self)

    members: dict[str, Any] = {name: _computed(name, axis) for name, axis in norms}
    return type(
        f"Parametrized{base.__name__}", (base,), {**members, "_plain": (base, norms), "__reduce__": reduced}
    )


def _computed(name: str, axis: int | None) -> property:
    def weight(self: Any) -> Tensor:
        parts = self.parametrizations[name]
        direction = parts["original1"]
        result: Tensor = direction * (parts["original0"] / _length(direction, axis))
        return result

    return property(weight)


def _made(base: Any, norms: _Norms) -> Module:
    """A module without its parts, for pickle and copies."""
    kind = _normed(base, norms)
    return kind.__new__(kind)
