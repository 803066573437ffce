"""Copies of tensors by `copy` and `pickle`: value, dtype, device, gradient and `requires_grad`."""

from __future__ import annotations

import copy
from typing import Any

import numpy.typing as npt

from penstock.runtime import Device
from penstock.tensor.core import Tensor, from_numpy
from penstock.tensor.leaves import leaf_of


def copied(x: Tensor, memo: dict[int, Any] | None = None) -> Tensor:
    """A tensor of the same value, independent of later changes of `x`; `memo` is that of a deep copy."""
    _check_history(x)
    result = x.detach().requires_grad_() if x.requires_grad else x.detach()
    if memo is not None:
        memo[id(x)] = result
    result.grad = x.grad if memo is None else copy.deepcopy(x.grad, memo)
    return result


def reduced(x: Tensor) -> tuple[Any, ...]:
    """The state of a tensor for `pickle`."""
    _check_history(x)
    return restored, (x.numpy(), x.device, x.requires_grad, x.grad)


def restored(values: npt.NDArray[Any], device: Device, requires_grad: bool, grad: Tensor | None) -> Tensor:
    """A tensor from the state that `reduced` returns, on the device of the same name."""
    result = from_numpy(values, device)
    if requires_grad:
        result.requires_grad_()
    result.grad = grad
    return result


def _check_history(x: Tensor) -> None:
    if x.requires_grad and leaf_of(x._node) is not x._here():
        raise ValueError(
            f"{x.dtype}{list(x.shape)} was computed from tensors that require a gradient, which a copy "
            f"would be separated from; copy x.detach() instead"
        )
