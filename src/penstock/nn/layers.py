"""Linear layers, embeddings, and layers that reshape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.functional.linear import padding_row
from penstock.nn.module import Module
from penstock.nn.parameter import Parameter
from penstock.runtime import Device
from penstock.tensor import random
from penstock.tensor.arithmetic import where
from penstock.tensor.broadcasting import axes_of
from penstock.tensor.core import Tensor
from penstock.tensor.creation import arange, zeros
from penstock.tensor.manipulation import reshape
from penstock.tensor.recording import only_recording

Where = Device | str | None


_undrawn: ContextVar[bool] = ContextVar("undrawn", default=False)


@contextmanager
def undrawn() -> Iterator[None]:
    """In this block and this thread, linear layers and embeddings are made without random weights.

    For weights that are loaded or drawn afterwards: until then they take no memory.
    """
    token = _undrawn.set(True)
    try:
        with only_recording():
            yield
    finally:
        _undrawn.reset(token)


def drawn(shape: tuple[int, ...], bound: float, device: Where) -> Parameter:
    """A parameter with uniform values between -bound and bound, computed at the first use."""
    if _undrawn.get():
        return Parameter(zeros(shape, device=device))
    values = random.default_generator.uniform(shape, -bound, bound)
    return Parameter(values if device is None else values.to_device(device))


class Identity(Module):
    """Returns its input.

    >>> ps.nn.Identity()(ps.zeros((2, 3))).shape
    (2, 3)
    """

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x


class Linear(Module):
    """`x @ weight.T + bias`, with a weight of shape (out_features, in_features).

    >>> ps.nn.Linear(3, 2)(ps.zeros((4, 3))).shape
    (4, 2)
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Where = None) -> None:
        if in_features < 1 or out_features < 1:
            raise ValueError(
                f"a linear layer needs sizes of 1 or more, and {in_features}, {out_features} were given"
            )
        bound = 1 / math.sqrt(in_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = drawn((out_features, in_features), bound, device)
        self.bias = drawn((out_features,), bound, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Its sizes."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class Embedding(Module):
    """Rows of the weight, selected by integers; the row `padding_idx` starts as 0 and is not trained.

    >>> ps.nn.Embedding(10, 4)(ps.asarray([[1, 2, 3]])).shape
    (1, 3, 4)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: Where = None,
    ) -> None:
        if num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(
                f"an embedding needs sizes of 1 or more, and {num_embeddings}, {embedding_dim} were given"
            )
        shape = (num_embeddings, embedding_dim)
        if _undrawn.get():
            values = zeros(shape, device=device)
        else:
            values = random.default_generator.normal(shape)
            values = values if device is None else values.to_device(device)
        if padding_idx is not None:
            padding_idx = padding_row(padding_idx, num_embeddings)
            rows = reshape(arange(num_embeddings, device=values.device), (num_embeddings, 1))
            values = where(rows == padding_idx, 0.0, values)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.weight = Parameter(values)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None
    ) -> Embedding:
        """An embedding with the rows of a tensor; `freeze`: they are not trained."""
        if embeddings.ndim != 2:
            raise ValueError(f"embeddings are rows, and the shape {embeddings.shape} was given")
        count, width = embeddings.shape
        embedding = cls(count, width, padding_idx, embeddings.device)
        embedding.weight = Parameter(embeddings, not freeze)
        return embedding

    def forward(self, index: Tensor) -> Tensor:
        """The rows at `index`, with a new last axis of length `embedding_dim`."""
        return F.embedding(index, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        """Its sizes."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class Flatten(Module):
    """Merges the axes from `start_dim` to `end_dim`.

    >>> ps.nn.Flatten()(ps.zeros((2, 3, 4))).shape
    (2, 12)
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        """`x` with fewer axes."""
        (start,), (end,) = (axes_of(x, axis, "Flatten") for axis in (self.start_dim, self.end_dim))
        if start > end:
            raise ValueError(f"Flatten: axis {self.start_dim} of shape {x.shape} is after {self.end_dim}")
        between = math.prod(x.shape[start : end + 1])
        return reshape(x, (*x.shape[:start], between, *x.shape[end + 1 :]))

    def extra_repr(self) -> str:
        """Its axes."""
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Module):
    """Splits an axis into several; one length may be -1.

    >>> ps.nn.Unflatten(1, (3, -1))(ps.zeros((2, 12))).shape
    (2, 3, 4)
    """

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        """`x` with more axes."""
        (axis,) = axes_of(x, self.dim, "Unflatten")
        sizes = list(self.unflattened_size)
        if sizes.count(-1) == 1:
            sizes[sizes.index(-1)] = x.shape[axis] // max(1, math.prod(n for n in sizes if n != -1))
        if math.prod(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
            raise ValueError(f"Unflatten: axis {self.dim} of shape {x.shape} is not {self.unflattened_size}")
        return reshape(x, (*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))

    def extra_repr(self) -> str:
        """Its axis and sizes."""
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"


class Upsample(Module):
    """`F.interpolate` to a size, or by a factor.

    >>> ps.nn.Upsample(scale_factor=2)(ps.zeros((1, 3, 4, 4))).shape
    (1, 3, 8, 8)
    """

    def __init__(
        self,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
    ) -> None:
        self.size, self.scale_factor, self.mode = size, scale_factor, mode
        self.align_corners = align_corners

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, ...) in another size."""
        return F.interpolate(x, self.size, self.scale_factor, self.mode, self.align_corners)

    def extra_repr(self) -> str:
        """Its sizes and mode."""
        what = f"scale_factor={self.scale_factor}" if self.size is None else f"size={self.size}"
        return f"{what}, mode={self.mode!r}"
