"""The layers that networks are made of."""

from __future__ import annotations

import math

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.module import Module
from penstock.runtime import Device
from penstock.tensor import random
from penstock.tensor.core import Tensor
from penstock.tensor.creation import ones, zeros

Where = Device | str | None


def _drawn(shape: tuple[int, ...], bound: float, device: Where) -> Tensor:
    """A parameter, drawn evenly between -bound and bound; computed when it is first used."""
    drawn = random.default_generator.uniform(shape, -bound, bound)
    return (drawn if device is None else drawn.to_device(device)).requires_grad_()


class Linear(Module):
    """`x @ weight.T + bias`."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, device: Where = None) -> None:
        if inputs < 1 or outputs < 1:
            raise ValueError(f"a linear layer needs sizes of 1 or more, and {inputs}, {outputs} were given")
        bound = 1 / math.sqrt(inputs)
        self.weight = _drawn((outputs, inputs), bound, device)
        self.bias = _drawn((outputs,), bound, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight."""
        return F.linear(x, self.weight, self.bias)


class Embedding(Module):
    """A row of the weight for each integer."""

    def __init__(self, count: int, width: int, device: Where = None) -> None:
        if count < 1 or width < 1:
            raise ValueError(f"an embedding needs sizes of 1 or more, and {count}, {width} were given")
        self.weight = random.default_generator.normal((count, width))
        if device is not None:
            self.weight = self.weight.to_device(device)
        self.weight.requires_grad_()

    def forward(self, index: Tensor) -> Tensor:
        """The rows of an index."""
        return F.embedding(index, self.weight)


class LayerNorm(Module):
    """Mean 0 and variance 1 along the last axis, then scaled and shifted."""

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True, device: Where = None) -> None:
        self.eps = eps
        self.weight = ones((width,), device=device).requires_grad_()
        self.bias = zeros((width,), device=device).requires_grad_() if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The norm of each row."""
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """Mean square 1 along the last axis, then scaled."""

    def __init__(self, width: int, eps: float = 1e-5, device: Where = None) -> None:
        self.eps = eps
        self.weight = ones((width,), device=device).requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        """The norm of each row."""
        return F.rms_norm(x, self.weight, self.eps)


class Dropout(Module):
    """Sets some items to 0 in training."""

    def __init__(self, probability: float = 0.5) -> None:
        if not 0 <= probability < 1:
            raise ValueError(f"dropout needs a probability in [0, 1), and {probability} was given")
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """`x` with some items gone."""
        return F.dropout(x, self.probability, self.training)


class Sequential(Module):
    """Modules one after the other."""

    def __init__(self, *layers: Module) -> None:
        self.layers = list(layers)

    def __getitem__(self, number: int) -> Module:
        return self.layers[number]

    def __len__(self) -> int:
        return len(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        """What the last module makes of what those before it made."""
        for layer in self.layers:
            x = layer(x)
        return x


class Activation(Module):
    """An activation by its name, as a module."""

    name = ""

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each item."""
        return F.named_activation(self.name)(x)


class ReLU(Activation):
    """`F.relu`."""

    name = "relu"


class GELU(Module):
    """`F.gelu`."""

    def __init__(self, approximate: str = "tanh") -> None:
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each item."""
        return F.gelu(x, self.approximate)


class Sigmoid(Activation):
    """`F.sigmoid`."""

    name = "sigmoid"


class Tanh(Activation):
    """`ps.tanh`."""

    name = "tanh"


class SiLU(Activation):
    """`F.silu`."""

    name = "silu"


class Softmax(Module):
    """`F.softmax` along an axis."""

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """The softmax of each row."""
        return F.softmax(x, self.axis)
