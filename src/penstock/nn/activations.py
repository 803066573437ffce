"""Activations as modules: each is a function of `nn.functional` with its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.functional.common import takes_dim
from penstock.nn.layers import Where
from penstock.nn.module import Module
from penstock.nn.parameter import Parameter
from penstock.tensor.core import Tensor
from penstock.tensor.creation import full


class _Activation(Module):
    """A function of a tensor, with settings."""

    _function: ClassVar[Callable[..., Tensor]]
    _settings: dict[str, Any]

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each item."""
        return type(self)._function(x, **self._settings)

    def extra_repr(self) -> str:
        """Its settings."""
        return ", ".join(f"{name}={value!r}" for name, value in self._settings.items())


def _plain(name: str, function: Callable[..., Tensor]) -> type[_Activation]:
    """The module of a function without settings."""

    def init(self: _Activation) -> None:
        _Activation.__init__(self)

    example = f"    >>> ps.nn.{name}()(ps.ones((2, 3))).shape\n    (2, 3)\n    "
    body = {
        "__init__": init,
        "__doc__": f"`F.{function.__name__}`.\n\n{example}",
        "__module__": __name__,
        "_function": staticmethod(function),
    }
    return type(name, (_Activation,), body)


ReLU = _plain("ReLU", F.relu)
ReLU6 = _plain("ReLU6", F.relu6)
SELU = _plain("SELU", F.selu)
Sigmoid = _plain("Sigmoid", F.sigmoid)
LogSigmoid = _plain("LogSigmoid", F.logsigmoid)
Tanh = _plain("Tanh", F.tanh)
Tanhshrink = _plain("Tanhshrink", F.tanhshrink)
SiLU = _plain("SiLU", F.silu)
Mish = _plain("Mish", F.mish)
Softsign = _plain("Softsign", F.softsign)
Hardsigmoid = _plain("Hardsigmoid", F.hardsigmoid)
Hardswish = _plain("Hardswish", F.hardswish)


class GELU(_Activation):
    """`F.gelu`: exact, or with `approximate="tanh"` the approximation of GPT-2.

    >>> ps.nn.GELU()(ps.asarray([0.0])).tolist()
    [0.0]
    """

    _function = staticmethod(F.gelu)

    def __init__(self, approximate: str = "none") -> None:
        super().__init__(approximate=approximate)


class LeakyReLU(_Activation):
    """`F.leaky_relu`.

    >>> ps.nn.LeakyReLU(0.5)(ps.asarray([-4.0, 2.0])).tolist()
    [-2.0, 2.0]
    """

    _function = staticmethod(F.leaky_relu)

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__(negative_slope=negative_slope)


class ELU(_Activation):
    """`F.elu`.

    >>> ps.nn.ELU()(ps.asarray([0.0, 2.0])).tolist()
    [0.0, 2.0]
    """

    _function = staticmethod(F.elu)

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(alpha=alpha)


class CELU(_Activation):
    """`F.celu`.

    >>> ps.nn.CELU()(ps.asarray([0.0, 2.0])).tolist()
    [0.0, 2.0]
    """

    _function = staticmethod(F.celu)

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(alpha=alpha)


class Softplus(_Activation):
    """`F.softplus`.

    >>> round(ps.nn.Softplus()(ps.asarray([0.0])).item(), 4)
    0.6931
    """

    _function = staticmethod(F.softplus)

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        super().__init__(beta=beta, threshold=threshold)


class Hardtanh(_Activation):
    """`F.hardtanh`.

    >>> ps.nn.Hardtanh()(ps.asarray([-3.0, 0.5])).tolist()
    [-1.0, 0.5]
    """

    _function = staticmethod(F.hardtanh)

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0) -> None:
        super().__init__(min_val=min_val, max_val=max_val)


class Softshrink(_Activation):
    """`F.softshrink`.

    >>> ps.nn.Softshrink()(ps.asarray([-2.0, 0.25])).tolist()
    [-1.5, 0.0]
    """

    _function = staticmethod(F.softshrink)

    def __init__(self, lambd: float = 0.5) -> None:
        super().__init__(lambd=lambd)


class Hardshrink(_Activation):
    """`F.hardshrink`.

    >>> ps.nn.Hardshrink()(ps.asarray([-2.0, 0.25])).tolist()
    [-2.0, 0.0]
    """

    _function = staticmethod(F.hardshrink)

    def __init__(self, lambd: float = 0.5) -> None:
        super().__init__(lambd=lambd)


class Threshold(_Activation):
    """`F.threshold`.

    >>> ps.nn.Threshold(1, 0)(ps.asarray([0.5, 2.0])).tolist()
    [0.0, 2.0]
    """

    _function = staticmethod(F.threshold)

    def __init__(self, threshold: float, value: float) -> None:
        super().__init__(threshold=threshold, value=value)


class _AlongAxis(_Activation):
    """A function along an axis."""

    @takes_dim
    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis=axis)


class Softmax(_AlongAxis):
    """`F.softmax` along an axis.

    >>> ps.nn.Softmax(-1)(ps.zeros((2, 4))).tolist()[0]
    [0.25, 0.25, 0.25, 0.25]
    """

    _function = staticmethod(F.softmax)


class LogSoftmax(_AlongAxis):
    """`F.log_softmax` along an axis.

    >>> ps.nn.LogSoftmax(-1)(ps.zeros((2, 1))).tolist()
    [[0.0], [0.0]]
    """

    _function = staticmethod(F.log_softmax)


class Softmin(_AlongAxis):
    """`F.softmin` along an axis.

    >>> ps.nn.Softmin(-1)(ps.zeros((2, 4))).tolist()[0]
    [0.25, 0.25, 0.25, 0.25]
    """

    _function = staticmethod(F.softmin)


class GLU(_AlongAxis):
    """`F.glu` along an axis.

    >>> ps.nn.GLU()(ps.zeros((3, 4))).shape
    (3, 2)
    """

    _function = staticmethod(F.glu)


class PReLU(Module):
    """`F.prelu` with a trained slope for negative items: one, or one for each channel.

    >>> ps.nn.PReLU()(ps.asarray([-4.0, 2.0])).tolist()
    [-1.0, 2.0]
    """

    def __init__(self, num_parameters: int = 1, init: float = 0.25, device: Where = None) -> None:
        self.num_parameters = num_parameters
        self.weight = Parameter(full((num_parameters,), init, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each item."""
        return F.prelu(x, self.weight)

    def extra_repr(self) -> str:
        """Its size."""
        return f"num_parameters={self.num_parameters}"
