"""Operations on all parameters or gradients together.

`rnn` is for sequences of several lengths, `parametrizations` for weights that are computed from parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from penstock.nn.functional.common import wide
from penstock.nn.utils import parametrizations, rnn
from penstock.tensor.arithmetic import abs as abs_
from penstock.tensor.arithmetic import clip, minimum, sqrt
from penstock.tensor.arithmetic import pow as pow_
from penstock.tensor.core import Tensor
from penstock.tensor.manipulation import astype, concat, reshape
from penstock.tensor.recording import no_grad
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import sum as sum_

__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_total_norm",
    "parameters_to_vector",
    "parametrizations",
    "rnn",
    "vector_to_parameters",
]

_EPS = 1e-6  # added to a norm that may be 0


def get_total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all tensors, concatenated to a vector; in float32 of those in half precision."""
    given = [wide(tensor) for tensor in tensors]
    if not given:
        raise ValueError("get_total_norm needs a tensor")
    if norm_type != math.inf and norm_type <= 0:
        raise ValueError(f"the type of a norm is above 0, and {norm_type} was given")
    if norm_type == math.inf:
        return max_(concat([reshape(max_(abs_(tensor)), (1,)) for tensor in given]))
    if norm_type == 2:
        return sqrt(sum_(concat([reshape(sum_(tensor * tensor), (1,)) for tensor in given])))
    parts = [reshape(sum_(pow_(abs_(tensor), norm_type)), (1,)) for tensor in given]
    return pow_(sum_(concat(parts)), 1 / norm_type)


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
) -> Tensor | None:
    """Scale all gradients so that their total norm is at most `max_norm`. Returns the norm before.

    None if no parameter has a gradient. `clip_norm` of an optimizer does the same in its step.
    """
    if max_norm <= 0:
        raise ValueError(f"max_norm is above 0, and {max_norm} was given")
    tensors = _with_gradients(parameters)
    if not tensors:
        return None
    with no_grad():
        total = get_total_norm([grad for _, grad in tensors], norm_type)
        factor = minimum(max_norm / (total + _EPS), 1.0)
        for tensor, grad in tensors:
            _replace(tensor, astype(wide(grad) * astype(factor, wide(grad).dtype), grad.dtype))
    return total


def clip_grad_value_(parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
    """Limit every item of every gradient to the range from -clip_value to clip_value."""
    if clip_value <= 0:
        raise ValueError(f"clip_value is above 0, and {clip_value} was given")
    with no_grad():
        for tensor, grad in _with_gradients(parameters):
            _replace(tensor, clip(grad, -clip_value, clip_value))


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """All items of all parameters as a vector."""
    return concat([reshape(tensor, (-1,)) for tensor in parameters])


def vector_to_parameters(vector: Tensor, parameters: Iterable[Tensor]) -> None:
    """Give parameters the items of a vector, in order."""
    tensors = list(parameters)
    size = sum(tensor.size for tensor in tensors)
    if vector.shape != (size,):
        raise ValueError(f"the parameters have {size} items, and a vector of shape {vector.shape} was given")
    start = 0
    with no_grad():
        for tensor in tensors:
            part = vector[start : start + tensor.size]
            tensor._rebind(astype(reshape(part, tensor.shape), tensor.dtype).detach())
            start += tensor.size


def _with_gradients(parameters: Iterable[Tensor] | Tensor) -> list[tuple[Tensor, Tensor]]:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [(tensor, tensor.grad) for tensor in given if tensor.grad is not None]


def _replace(tensor: Tensor, grad: Tensor) -> None:
    """Replace a gradient; it stays a gradient of the same loss, so that both are computed in one run."""
    source = getattr(tensor.grad, "_source", None)
    if source is not None:
        grad._source = source
    tensor.grad = grad
