"""Conversion of dtypes and devices, and tensors like others, under PyTorch's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.graph.node import DType
from penstock.registry import find
from penstock.runtime import Device
from penstock.tensor import dtypes, random
from penstock.tensor.arguments import of_tensor, shape_of
from penstock.tensor.broadcasting import broadcast
from penstock.tensor.core import Scalar, Tensor
from penstock.tensor.creation import Where, asarray, full
from penstock.tensor.manipulation import astype


def tensor(data: Any, *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """A tensor with a copy of the values of `data`; Python numbers become int64, float32 or complex64.

    >>> ps.tensor([1, 2]).dtype
    penstock.int64
    """
    made = asarray(data, dtype=dtype, device=device, copy=True)
    return made.detach() if isinstance(data, Tensor) else made


@of_tensor
def to(
    x: Tensor,
    /,
    *args: Any,
    dtype: DType | None = None,
    device: Where = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> Tensor:
    """In another dtype, on another device, or with the dtype and device of another tensor.

    `non_blocking` is accepted and ignored.
    """
    for given in args:
        if isinstance(given, Tensor):
            dtype, device = given.dtype, given.device
        elif isinstance(given, (str, Device)) and device is None:
            device = given
        elif isinstance(given, (DType, np.dtype, type)) and dtype is None:
            dtype = dtypes.checked(given)
        else:
            raise TypeError(f"to takes a dtype, a device or a tensor, and {given!r} was given")
    moved = x if device is None else x.to_device(device)
    return moved if dtype is None else astype(moved, dtype, copy=copy)


def converting(dtype: DType) -> Callable[[Tensor], Tensor]:
    """A method that converts to a dtype."""

    def convert(x: Tensor, /) -> Tensor:
        return astype(x, dtype, copy=False)

    convert.__name__ = convert.__qualname__ = dtype.name
    convert.__doc__ = f"The values as {dtype}."
    return of_tensor(convert)


@of_tensor
def type_as(x: Tensor, /, other: Tensor) -> Tensor:
    """The values in the dtype of another tensor."""
    return astype(x, other.dtype, copy=False)


@of_tensor
def cpu(x: Tensor, /) -> Tensor:
    """The same values on the CPU; the tensor itself if it is there already."""
    return x if x.device.capabilities.kind in ("cpu", "host") else x.to_device(find("cpu"))


@of_tensor
def cuda(x: Tensor, /, device: int | str | Device | None = None) -> Tensor:
    """The same values on a CUDA device."""
    return x.to_device(f"cuda:{device}" if isinstance(device, int) else device or "cuda")


@of_tensor
def clone(x: Tensor, /) -> Tensor:
    """A tensor with the same values, through which gradients pass."""
    return astype(x, x.dtype)


@of_tensor
def contiguous(x: Tensor, /) -> Tensor:
    """The tensor itself: layouts in memory are not visible to users."""
    return x


@of_tensor
def dim(x: Tensor, /) -> int:
    """The number of axes."""
    return x.ndim


@of_tensor
def numel(x: Tensor, /) -> int:
    """The number of items.

    >>> ps.numel(ps.zeros((2, 3)))
    6
    """
    return int(x.size)


@of_tensor
def element_size(x: Tensor, /) -> int:
    """The size of an item in bytes."""
    return x.dtype.itemsize


@of_tensor
def is_floating_point(x: Tensor, /) -> bool:
    """Whether the dtype is floating point.

    >>> ps.is_floating_point(ps.zeros(1))
    True
    """
    return x.dtype.kind == "f"


@of_tensor
def is_complex(x: Tensor, /) -> bool:
    """Whether the dtype is complex.

    >>> ps.is_complex(ps.zeros(1))
    False
    """
    return x.dtype.kind == "c"


def is_tensor(x: Any, /) -> bool:
    """Whether it is a tensor.

    >>> ps.is_tensor([1, 2])
    False
    """
    return isinstance(x, Tensor)


# Tensors like another tensor


def _new(name: str, number: int) -> Callable[..., Tensor]:
    def function(
        x: Tensor, /, shape: int | Sequence[int], *, dtype: DType | None = None, device: Where = None
    ) -> Tensor:
        return full(shape_of(shape, name), number, dtype=dtype or x.dtype, device=device or x.device)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"A tensor of {number}s, in the dtype and on the device of another tensor by default."
    return of_tensor(function)


new_zeros, new_ones = _new("new_zeros", 0), _new("new_ones", 1)


@of_tensor
def new_full(
    x: Tensor,
    /,
    shape: int | Sequence[int],
    fill_value: Scalar,
    *,
    dtype: DType | None = None,
    device: Where = None,
) -> Tensor:
    """A tensor filled with a number, in the dtype and on the device of another tensor by default."""
    return full(shape_of(shape, "new_full"), fill_value, dtype=dtype or x.dtype, device=device or x.device)


@of_tensor
def filled(x: Tensor, /, value: Scalar) -> Tensor:
    """A number in the shape, dtype and device of `x`."""
    return full(x.shape, value, dtype=x.dtype, device=x.device)


@of_tensor
def zeroed(x: Tensor, /) -> Tensor:
    """0 in the shape, dtype and device of `x`."""
    return filled(x, 0)


@of_tensor
def replaced(x: Tensor, /, other: Any) -> Tensor:
    """The values of another tensor, broadcast to the shape of `x` and converted to its dtype and device."""
    given = asarray(other, device=x.device)
    return broadcast(astype(given, x.dtype, copy=False), x.shape)


# Random numbers

_Sizes = int | Sequence[int]


def rand(
    shape: _Sizes,
    *,
    dtype: DType | None = None,
    device: Where = None,
    generator: random.Generator | None = None,
) -> Tensor:
    """Uniformly distributed numbers in [0, 1).

    >>> ps.rand((2, 3)).shape
    (2, 3)
    """
    source = generator or random.default_generator
    return source.uniform(shape, dtype=dtype or dtypes.float32, device=device)


def randn(
    shape: _Sizes,
    *,
    dtype: DType | None = None,
    device: Where = None,
    generator: random.Generator | None = None,
) -> Tensor:
    """Normally distributed numbers with mean 0 and standard deviation 1.

    >>> ps.randn((2, 3)).shape
    (2, 3)
    """
    source = generator or random.default_generator
    return source.normal(shape, dtype=dtype or dtypes.float32, device=device)


def randint(
    low: int,
    high: Any = None,
    shape: Any = None,
    *,
    dtype: DType | None = None,
    device: Where = None,
    generator: random.Generator | None = None,
) -> Tensor:
    """Uniformly distributed integers in [low, high), or in [0, low) if `high` is left out.

    >>> ps.randint(5, 6, (3,)).tolist()
    [5, 5, 5]
    """
    if shape is None and isinstance(high, (tuple, list)):
        low, high, shape = 0, low, high
    elif high is None:
        low, high = 0, low
    if shape is None:
        raise TypeError("randint takes low, high and a shape, as in randint(0, 10, (2, 3))")
    source = generator or random.default_generator
    return source.integers(low, high, shape, dtype or dtypes.int64, device)


def randperm(n: int, *, device: Where = None, generator: random.Generator | None = None) -> Tensor:
    """The integers from 0 to `n` - 1 in random order.

    >>> sorted(ps.randperm(4).tolist())
    [0, 1, 2, 3]
    """
    return (generator or random.default_generator).permutation(n, device)


@of_tensor
def rand_like(x: Tensor, /, *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """Uniformly distributed numbers in [0, 1) in the shape of `x`.

    >>> ps.rand_like(ps.zeros((2, 3))).shape
    (2, 3)
    """
    return rand(x.shape, dtype=dtype or x.dtype, device=device or x.device)


@of_tensor
def randn_like(x: Tensor, /, *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """Normally distributed numbers in the shape of `x`.

    >>> ps.randn_like(ps.zeros((2, 3))).shape
    (2, 3)
    """
    return randn(x.shape, dtype=dtype or x.dtype, device=device or x.device)


@of_tensor
def uniform_like(x: Tensor, /, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniformly distributed numbers in [low, high) in the shape of `x`."""
    return random.uniform(x.shape, low, high, x.dtype, x.device)


@of_tensor
def normal_like(x: Tensor, /, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Normally distributed numbers in the shape of `x`."""
    return random.normal(x.shape, mean, std, x.dtype, x.device)
