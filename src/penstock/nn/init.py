"""Initialization of parameters in place, with the default generator of `ps.random`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.graph.node import DType
from penstock.nn.state import assign
from penstock.tensor import random
from penstock.tensor.arithmetic import clip, log, sqrt, where
from penstock.tensor.core import Tensor, from_numpy
from penstock.tensor.creation import eye, full
from penstock.tensor.dtypes import float32, float64
from penstock.tensor.manipulation import astype
from penstock.tensor.recording import no_grad

_GAINS = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 0.75}
_GAINS |= {f"conv{axes}d": 1.0 for axes in (1, 2, 3)} | {f"conv_transpose{axes}d": 1.0 for axes in (1, 2, 3)}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """The factor of the standard deviation for an activation; `param` is the slope of a leaky_relu."""
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in _GAINS:
        known = ", ".join([*_GAINS, "leaky_relu"])
        raise ValueError(f"there is no gain for {nonlinearity!r}; there are {known}")
    return _GAINS[nonlinearity]


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Uniform between `a` and `b`."""
    return _assigned(tensor, random.uniform(tensor.shape, a, b, _dtype(tensor)))


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Normal, with mean `mean` and standard deviation `std`."""
    return _assigned(tensor, random.normal(tensor.shape, mean, std, _dtype(tensor)))


def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Tensor:
    """Normal, truncated to the range from `a` to `b`."""
    if not (a < b and std > 0):
        raise ValueError(f"trunc_normal_ needs a < b and std above 0; {a}, {b} and {std} were given")
    low, high = (math.erf((end - mean) / std / math.sqrt(2)) for end in (a, b))
    # erfinv is infinite at -1 and 1.
    edge = 1 - 2.0**-24
    uniform = clip(random.uniform(tensor.shape, low, high), -edge, edge)
    return _assigned(tensor, clip(_erfinv(uniform) * (std * math.sqrt(2)) + mean, a, b))


def constant_(tensor: Tensor, val: float) -> Tensor:
    """Fill with a value."""
    return _assigned(tensor, full(tensor.shape, val, dtype=_dtype(tensor), device=tensor.device))


def zeros_(tensor: Tensor) -> Tensor:
    """Fill with 0."""
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """Fill with 1."""
    return constant_(tensor, 1.0)


def eye_(tensor: Tensor) -> Tensor:
    """1 on the diagonal of a matrix, else 0."""
    if tensor.ndim != 2:
        raise ValueError(f"eye_ is for matrices, and the shape is {tensor.shape}")
    return _assigned(tensor, eye(*tensor.shape, dtype=_dtype(tensor), device=tensor.device))


def xavier_uniform_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Uniform (Glorot): results and gradients keep their variance."""
    fan_in, fan_out = _fans(tensor)
    bound = gain * math.sqrt(6 / (fan_in + fan_out))
    return uniform_(tensor, -bound, bound)


def xavier_normal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Normal (Glorot): results and gradients keep their variance."""
    fan_in, fan_out = _fans(tensor)
    return normal_(tensor, 0.0, gain * math.sqrt(2 / (fan_in + fan_out)))


def kaiming_uniform_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Tensor:
    """Uniform (He): results (`fan_in`) or gradients (`fan_out`) keep their variance after an activation."""
    bound = math.sqrt(3) * _std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Tensor:
    """Normal (He): results (`fan_in`) or gradients (`fan_out`) keep their variance after an activation."""
    return normal_(tensor, 0.0, _std(tensor, a, mode, nonlinearity))


def orthogonal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Orthonormal rows, or columns if there are more rows, times `gain`; computed by NumPy."""
    if tensor.ndim < 2:
        raise ValueError(f"orthogonal_ needs 2 axes or more, and the shape is {tensor.shape}")
    rows, columns = tensor.shape[0], tensor.size // tensor.shape[0]
    values = random.normal((max(rows, columns), min(rows, columns)), dtype=float64).numpy()
    q, r = np.linalg.qr(values)
    q = q * np.sign(np.diagonal(r))
    matrix = (q if rows >= columns else q.T).reshape(tensor.shape) * gain
    return _assigned(tensor, from_numpy(matrix.astype(np.float32), tensor.device))


def _assigned(tensor: Tensor, values: Tensor) -> Tensor:
    """Assign values to a tensor. Returns the tensor."""
    with no_grad():
        assign(tensor, astype(values, tensor.dtype).to_device(tensor.device))
    return tensor


def _dtype(tensor: Tensor) -> DType:
    if tensor.dtype.kind != "f":
        raise TypeError(f"parameters are of floating point, and the dtype is {tensor.dtype}")
    return float32 if tensor.dtype.itemsize == 2 else tensor.dtype


def _fans(tensor: Tensor) -> tuple[int, int]:
    """fan_in and fan_out: the inputs of each output item, and the outputs of each input item."""
    if tensor.ndim < 2:
        raise ValueError(f"fan_in and fan_out need 2 axes or more, and the shape is {tensor.shape}")
    inside = math.prod(tensor.shape[2:])
    return tensor.shape[1] * inside, tensor.shape[0] * inside


def _std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"a mode is 'fan_in' or 'fan_out', and {mode!r} was given")
    fan = _fans(tensor)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(fan)


# Polynomials of w = -log(1 - x**2), by Giles, "Approximating the erfinv function" (2010), for float32:
# of w - 2.5 where w < 5, and of sqrt(w) - 3 beyond. The highest power comes first.
_NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def _erfinv(x: Tensor) -> Tensor:
    w = -log((1 - x) * (1 + x))
    return x * where(w < 5, _polynomial(_NEAR, w - 2.5), _polynomial(_FAR, sqrt(w) - 3))


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    total = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        total = total * x + coefficient
    return total
