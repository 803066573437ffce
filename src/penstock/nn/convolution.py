"""Convolutions as modules, with their weights."""

from __future__ import annotations

import math
from typing import ClassVar

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.functional.convolution import Sizes, padding_of, same_padding, sizes_of
from penstock.nn.layers import Where, drawn
from penstock.nn.module import Module
from penstock.tensor.arguments import integers
from penstock.tensor.core import Tensor
from penstock.tensor.padding import pad

_MODES = ("zeros", "reflect", "replicate", "circular")


class _Convolution(Module):
    """The base of convolutions and transposed convolutions."""

    axes: ClassVar[int]
    is_transposed: ClassVar[bool] = False

    def _make(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes,
        dilation: Sizes,
        groups: int,
        bias: bool,
        device: Where,
    ) -> None:
        name = type(self).__name__
        if min(in_channels, out_channels, groups) < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{name}: channels are multiples of groups, and {in_channels}, {out_channels} channels in "
                f"{groups} groups were given"
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = sizes_of(kernel_size, self.axes, name, "kernel_size")
        self.stride = sizes_of(stride, self.axes, name, "stride")
        self.dilation = sizes_of(dilation, self.axes, name, "dilation")
        channels = (in_channels, out_channels) if self.is_transposed else (out_channels, in_channels)
        shape = (channels[0], channels[1] // groups, *self.kernel_size)
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        self.weight = drawn(shape, bound, device)
        self.bias = drawn((out_channels,), bound, device) if bias else None

    def extra_repr(self) -> str:
        """Its sizes, and settings that differ from the defaults."""
        text = (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        )
        defaults = {
            "padding": (0,) * self.axes,
            "output_padding": (0,) * self.axes,
            "dilation": (1,) * self.axes,
            "groups": 1,
            "padding_mode": "zeros",
        }
        for name, usual in defaults.items():
            if getattr(self, name, usual) != usual:
                text += f", {name}={getattr(self, name)!r}"
        return text if self.bias is not None else f"{text}, bias=False"


class _Conv(_Convolution):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Where = None,
    ) -> None:
        self._make(in_channels, out_channels, kernel_size, stride, dilation, groups, bias, device)
        name = type(self).__name__
        pairs = padding_of(padding, self.kernel_size, self.stride, self.dilation, name)
        if padding_mode not in _MODES:
            modes = ", ".join(map(repr, _MODES))
            raise ValueError(f"{name}: padding_mode is {modes}, and {padding_mode!r} was given")
        self.padding = padding if isinstance(padding, str) else tuple(before for before, _ in pairs)
        self.padding_mode = padding_mode

    def forward(self, x: Tensor) -> Tensor:
        """The convolution."""
        padding: Sizes | str = self.padding
        if self.padding_mode != "zeros" and padding != "valid":
            if isinstance(padding, str):
                pairs = same_padding(self.kernel_size, self.dilation)
            else:
                pairs = tuple((n, n) for n in integers(padding, "padding", "padding"))
            x = pad(x, [n for pair in reversed(pairs) for n in pair], mode=self.padding_mode)
            padding = 0
        convolve = _FUNCTIONS[self.axes]
        return convolve(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


_FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class Conv1d(_Conv):
    """Convolution of (batch, channels, length).

    >>> ps.nn.Conv1d(3, 5, 4)(ps.zeros((2, 3, 10))).shape
    (2, 5, 7)
    """

    axes = 1


class Conv2d(_Conv):
    """Convolution of (batch, channels, height, width).

    >>> ps.nn.Conv2d(3, 5, 3, padding=1)(ps.zeros((2, 3, 8, 8))).shape
    (2, 5, 8, 8)
    """

    axes = 2


class Conv3d(_Conv):
    """Convolution of (batch, channels, depth, height, width).

    >>> ps.nn.Conv3d(2, 3, 2)(ps.zeros((1, 2, 4, 4, 4))).shape
    (1, 3, 3, 3, 3)
    """

    axes = 3


class _ConvTranspose(_Convolution):
    is_transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        device: Where = None,
    ) -> None:
        self._make(in_channels, out_channels, kernel_size, stride, dilation, groups, bias, device)
        name = type(self).__name__
        self.padding = sizes_of(padding, self.axes, name, "padding", 0)
        self.output_padding = sizes_of(output_padding, self.axes, name, "output_padding", 0)

    def forward(self, x: Tensor, output_size: Sizes | None = None) -> Tensor:
        """The transposed convolution; `output_size` selects among the possible sizes of the result."""
        more = self.output_padding if output_size is None else self._padding_for(x, output_size)
        convolve = _TRANSPOSED[self.axes]
        settings = (self.stride, self.padding, more, self.groups, self.dilation)
        return convolve(x, self.weight, self.bias, *settings)

    def _padding_for(self, x: Tensor, output_size: Sizes) -> tuple[int, ...]:
        """The output padding for a given size of the result."""
        wanted = integers(output_size, type(self).__name__, "output_size")[-self.axes :]
        along = zip(
            x.shape[-self.axes :], self.kernel_size, self.stride, self.dilation, self.padding, strict=True
        )
        least = [(n - 1) * step + (size - 1) * gap + 1 - 2 * end for n, size, step, gap, end in along]
        more = tuple(size - n for size, n in zip(wanted, least, strict=False))
        most = [n + step - 1 for n, step in zip(least, self.stride, strict=True)]
        if len(wanted) != self.axes or any(
            not 0 <= n < step for n, step in zip(more, self.stride, strict=True)
        ):
            raise ValueError(
                f"{type(self).__name__}: sizes from {tuple(least)} to {tuple(most)} are possible for shape "
                f"{x.shape}, and {output_size} was given"
            )
        return more


class ConvTranspose1d(_ConvTranspose):
    """The transpose of a convolution of (batch, channels, length).

    >>> ps.nn.ConvTranspose1d(3, 5, 2, stride=2)(ps.zeros((2, 3, 4))).shape
    (2, 5, 8)
    """

    axes = 1


class ConvTranspose2d(_ConvTranspose):
    """The transpose of a convolution of (batch, channels, height, width).

    >>> ps.nn.ConvTranspose2d(3, 5, 2, stride=2)(ps.zeros((2, 3, 4, 4))).shape
    (2, 5, 8, 8)
    """

    axes = 2


class ConvTranspose3d(_ConvTranspose):
    """The transpose of a convolution of (batch, channels, depth, height, width).

    >>> ps.nn.ConvTranspose3d(2, 3, 2, stride=2)(ps.zeros((1, 2, 2, 2, 2))).shape
    (1, 3, 4, 4, 4)
    """

    axes = 3
