"""Fourier transforms: the `fft` extension of the array API standard, computed by NumPy on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.graph import elementwise, host
from penstock.graph.node import DType
from penstock.tensor import dtypes
from penstock.tensor.arguments import integer, integers, of_tensor
from penstock.tensor.broadcasting import axes_of
from penstock.tensor.core import Tensor, from_numpy, record, resolve
from penstock.tensor.creation import Where
from penstock.tensor.manipulation import astype, roll
from penstock.tensor.recording import recording
from penstock.tensor.spelling import spelled

__all__ = [
    "fft",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfftn",
    "rfft",
    "rfftfreq",
    "rfftn",
]
_Norm = str | None
_NORMS = ("backward", "ortho", "forward")


def _transformed(
    name: str, x: Tensor, s: Any, axes: Any, norm: str | None, function: str, from_half: bool = False
) -> Tensor:
    norm = "backward" if norm is None else norm
    if norm not in _NORMS:
        raise ValueError(f"fft.{name}: norm is one of {', '.join(_NORMS)}, and {norm!r} was given")
    real = function in ("rfftn", "ihfft")
    if x.dtype.kind in "biu":
        x = astype(x, dtypes.float32)
    if x.dtype.kind not in ("f" if real else "fc"):
        raise TypeError(f"fft.{name} does not take {x.dtype}")
    lengths = None if s is None else integers(s, f"fft.{name}", "a length")
    axes = (axes,) if isinstance(axes, int) else axes
    if axes is None:
        axes = range(x.ndim) if lengths is None else range(x.ndim - len(lengths), x.ndim)
    order = tuple(axes_of(x, axis, f"fft.{name}")[0] for axis in axes)
    if lengths is None:
        lengths = tuple(x.shape[axis] for axis in order)
        if from_half:  # the input holds half of the spectrum of the result
            lengths = (*lengths[:-1], 2 * (lengths[-1] - 1))
    if len(lengths) != len(order):
        raise ValueError(f"fft.{name} needs as many lengths {lengths} as axes {order}")
    if not order or min(lengths) < 1:
        raise ValueError(f"fft.{name}: lengths {lengths} of axes {order} leave nothing to transform")
    wide = elementwise.widened(x._node)
    if not real and wide.dtype.kind != "c":
        wide = elementwise.cast(wide, host.complex_of(wide.dtype))
    node = host.fourier(wide, function=function, lengths=lengths, axes=order, norm=norm)
    if x.dtype in dtypes.HALF_PRECISION and node.dtype.kind == "f":
        node = elementwise.cast(node, x.dtype)
    if x.requires_grad and recording() and node.dtype.kind == "f":
        raise TypeError(f"fft.{name} has no gradient; use no_grad(), or detach() what is before it")
    return record(node, x)


@of_tensor
def fft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Tensor:
    """The Fourier transform along an axis.

    >>> ps.fft.fft(ps.asarray([1.0, 1.0])).tolist()
    [(2+0j), 0j]
    """
    return _transformed("fft", x, n, (axis,), norm, "fftn")


@of_tensor
def ifft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Tensor:
    """The inverse of `fft`.

    >>> ps.fft.ifft(ps.asarray([2 + 0j, 0j])).tolist()
    [(1+0j), (1+0j)]
    """
    return _transformed("ifft", x, n, (axis,), norm, "ifftn")


@of_tensor
def fftn(
    x: Tensor,
    /,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: _Norm = "backward",
) -> Tensor:
    """The Fourier transform along several axes, by default all.

    >>> ps.fft.fftn(ps.ones((2, 3))).shape
    (2, 3)
    """
    return _transformed("fftn", x, s, axes, norm, "fftn")


@of_tensor
def ifftn(
    x: Tensor,
    /,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: _Norm = "backward",
) -> Tensor:
    """The inverse of `fftn`.

    >>> ps.fft.ifftn(ps.ones((2, 3))).shape
    (2, 3)
    """
    return _transformed("ifftn", x, s, axes, norm, "ifftn")


@of_tensor
def rfft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Tensor:
    """The Fourier transform of real numbers along an axis: only its non-negative frequencies.

    >>> ps.fft.rfft(ps.ones(4)).tolist()
    [(4+0j), 0j, 0j]
    """
    return _transformed("rfft", x, n, (axis,), norm, "rfftn")


@of_tensor
def irfft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Tensor:
    """The inverse of `rfft`; `n` is the length of the result, by default 2 * (length - 1).

    >>> ps.fft.irfft(ps.asarray([4 + 0j, 0j, 0j])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return _transformed("irfft", x, n, (axis,), norm, "irfftn", from_half=True)


@of_tensor
def rfftn(
    x: Tensor,
    /,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: _Norm = "backward",
) -> Tensor:
    """The Fourier transform of real numbers along several axes, by default all; `rfft` along the last.

    >>> ps.fft.rfftn(ps.ones((2, 4))).shape
    (2, 3)
    """
    return _transformed("rfftn", x, s, axes, norm, "rfftn")


@of_tensor
def irfftn(
    x: Tensor,
    /,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: _Norm = "backward",
) -> Tensor:
    """The inverse of `rfftn`.

    >>> ps.fft.irfftn(ps.fft.rfftn(ps.ones((2, 4)))).tolist()
    [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    """
    return _transformed("irfftn", x, s, axes, norm, "irfftn", from_half=True)


@of_tensor
def hfft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Tensor:
    """The Fourier transform, which is real, of a Hermitian-symmetric signal, given by its first half.

    >>> ps.fft.hfft(ps.asarray([1 + 0j, 0j, 0j])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return _transformed("hfft", x, n, (axis,), norm, "hfft", from_half=True)


@of_tensor
def ihfft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Tensor:
    """The inverse of `hfft`.

    >>> ps.fft.ihfft(ps.ones(4)).shape
    (3,)
    """
    return _transformed("ihfft", x, n, (axis,), norm, "ihfft")


def fftfreq(n: int, /, *, d: float = 1.0, dtype: DType | None = None, device: Where = None) -> Tensor:
    """The frequencies of the items of `fft` for `n` samples at distance `d`.

    >>> ps.fft.fftfreq(4).tolist()
    [0.0, 0.25, -0.5, -0.25]
    """
    return _frequencies(np.fft.fftfreq, n, d, dtype, device)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: DType | None = None, device: Where = None) -> Tensor:
    """The frequencies of the items of `rfft` for `n` samples at distance `d`.

    >>> ps.fft.rfftfreq(4).tolist()
    [0.0, 0.25, 0.5]
    """
    return _frequencies(np.fft.rfftfreq, n, d, dtype, device)


def _frequencies(function: Any, n: int, d: float, dtype: DType | None, device: Where) -> Tensor:
    wanted = dtypes.checked(dtype or dtypes.float32)
    if wanted.kind != "f":
        raise TypeError(f"fft.{function.__name__} makes floating point, and {wanted} was asked for")
    return from_numpy(function(integer(n, function.__name__, "n"), d).astype(wanted), resolve(device))


@of_tensor
def fftshift(x: Tensor, /, axes: int | Sequence[int] | None = None) -> Tensor:
    """Move frequency 0 to the middle of the axes.

    >>> ps.fft.fftshift(ps.arange(4)).tolist()
    [2, 3, 0, 1]
    """
    order = axes_of(x, axes, "fft.fftshift")
    return roll(x, tuple(x.shape[axis] // 2 for axis in order), axis=order) if order else x


@of_tensor
def ifftshift(x: Tensor, /, axes: int | Sequence[int] | None = None) -> Tensor:
    """The inverse of `fftshift`.

    >>> ps.fft.ifftshift(ps.asarray([2, 3, 0, 1])).tolist()
    [0, 1, 2, 3]
    """
    order = axes_of(x, axes, "fft.ifftshift")
    return roll(x, tuple(-(x.shape[axis] // 2) for axis in order), axis=order) if order else x


for _name in __all__:  # accept PyTorch's keywords as well
    globals()[_name] = spelled(globals()[_name])
