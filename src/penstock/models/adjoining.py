"""Weights that are multiplied with the same rows lie one after another, where a library makes use of that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from penstock.nn.layers import Linear
from penstock.nn.module import Module
from penstock.nn.parameter import Parameter
from penstock.tensor.core import Tensor, resolve
from penstock.tensor.gathering import gather


def adjoin(model: Module) -> None:
    """Move the weights of linear layers of a module that have as many inputs into one allocation.

    Those of fewer outputs come first, as in `graph/joined.py`. Weights that share an allocation stay there:
    updates of parameters are quick because of that.
    """
    moved = [weights for weights in _alike(model) if _alone(weights)]
    for weights in moved:
        gather(weights)
    if moved:
        resolve(moved[0][0].device).release_idle()  # nothing else is of the sizes that they had


def _alike(model: Module) -> Iterator[list[Parameter]]:
    """Weights of as many inputs, those of fewer outputs first."""
    for module in model.modules():
        linears = [child for child in module.children() if type(child) is Linear]
        for _, group in groupby(linears, lambda linear: linear.weight.shape[1]):
            weights = sorted((linear.weight for linear in group), key=lambda weight: weight.shape[0])
            if len(weights) > 1:
                yield weights


def _alone(weights: Sequence[Tensor]) -> bool:
    """Whether weights are on one device, whose library joins products, each in an allocation of its own."""
    device, *others = {resolve(weight.device) for weight in weights}
    if others or not device.capabilities.matmul_library or device.dispatcher is not None:
        return False
    for weight in weights:
        weight._realize()
    buffers = [weight._node.value for weight in weights]
    return all(not buffer.hosted and buffer.whole is buffer for buffer in buffers)
