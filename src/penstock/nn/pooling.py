"""Pooling as modules, `Unfold` and `Fold`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.functional.convolution import Sizes
from penstock.nn.module import Module
from penstock.tensor.core import Tensor


class _Windowed(Module):
    """A function with settings, which are its attributes."""

    settings: ClassVar[str]

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.settings.split()}

    def extra_repr(self) -> str:
        """Its settings."""
        return ", ".join(f"{name}={value}" for name, value in self._given().items())


class _MaxPool(_Windowed):
    settings = "kernel_size stride padding dilation ceil_mode"
    axes: ClassVar[int]

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.dilation = padding, dilation
        self.return_indices, self.ceil_mode = return_indices, ceil_mode

    def forward(self, x: Tensor) -> Any:
        """The maximum of each window; with `return_indices`, also its flat index in the image."""
        return _MAX[self.axes](x, **self._given(), return_indices=self.return_indices)


class MaxPool1d(_MaxPool):
    """The maximum of each window of (batch, channels, length).

    >>> ps.nn.MaxPool1d(2)(ps.zeros((1, 3, 8))).shape
    (1, 3, 4)
    """

    axes = 1


class MaxPool2d(_MaxPool):
    """The maximum of each window of (batch, channels, height, width).

    >>> ps.nn.MaxPool2d(2)(ps.zeros((1, 3, 8, 8))).shape
    (1, 3, 4, 4)
    """

    axes = 2


class MaxPool3d(_MaxPool):
    """The maximum of each window of (batch, channels, depth, height, width).

    >>> ps.nn.MaxPool3d(2)(ps.zeros((1, 2, 4, 4, 4))).shape
    (1, 2, 2, 2, 2)
    """

    axes = 3


class _MaxUnpool(_Windowed):
    settings = "kernel_size stride padding"
    axes: ClassVar[int]

    def __init__(self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0) -> None:
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding = padding

    def forward(self, x: Tensor, indices: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """The items at the positions that max pooling took them from, 0 elsewhere."""
        return _UNPOOL[self.axes](x, indices, **self._given(), output_size=output_size)


class MaxUnpool1d(_MaxUnpool):
    """Puts the results of `MaxPool1d` back at its `return_indices`, with 0 elsewhere.

    >>> x, at = ps.nn.MaxPool1d(2, return_indices=True)(ps.zeros((1, 3, 8)))
    >>> ps.nn.MaxUnpool1d(2)(x, at).shape
    (1, 3, 8)
    """

    axes = 1


class MaxUnpool2d(_MaxUnpool):
    """Puts the results of `MaxPool2d` back at its `return_indices`, with 0 elsewhere.

    >>> x, at = ps.nn.MaxPool2d(2, return_indices=True)(ps.zeros((1, 2, 4, 4)))
    >>> ps.nn.MaxUnpool2d(2)(x, at).shape
    (1, 2, 4, 4)
    """

    axes = 2


class MaxUnpool3d(_MaxUnpool):
    """Puts the results of `MaxPool3d` back at its `return_indices`, with 0 elsewhere.

    >>> x, at = ps.nn.MaxPool3d(2, return_indices=True)(ps.zeros((1, 2, 2, 2, 2)))
    >>> ps.nn.MaxUnpool3d(2)(x, at).shape
    (1, 2, 2, 2, 2)
    """

    axes = 3


class AvgPool1d(_Windowed):
    """The mean of each window of (batch, channels, length).

    >>> ps.nn.AvgPool1d(2)(ps.zeros((1, 3, 8))).shape
    (1, 3, 4)
    """

    settings = "kernel_size stride padding ceil_mode count_include_pad"

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.ceil_mode, self.count_include_pad = padding, ceil_mode, count_include_pad

    def forward(self, x: Tensor) -> Tensor:
        """The means."""
        return F.avg_pool1d(x, **self._given())


class AvgPool2d(AvgPool1d):
    """The mean of each window of (batch, channels, height, width), or the sum / `divisor_override`.

    >>> ps.nn.AvgPool2d(2)(ps.zeros((1, 3, 8, 8))).shape
    (1, 3, 4, 4)
    """

    settings = f"{AvgPool1d.settings} divisor_override"

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode, count_include_pad)
        self.divisor_override = divisor_override

    def forward(self, x: Tensor) -> Tensor:
        """The means."""
        return F.avg_pool2d(x, **self._given())


class AvgPool3d(AvgPool2d):
    """The mean of each window of (batch, channels, depth, height, width), or the sum / `divisor_override`.

    >>> ps.nn.AvgPool3d(2)(ps.zeros((1, 2, 4, 4, 4))).shape
    (1, 2, 2, 2, 2)
    """

    def forward(self, x: Tensor) -> Tensor:
        """The means."""
        return F.avg_pool3d(x, **self._given())


class _AdaptiveAvgPool(_Windowed):
    settings = "output_size"
    axes: ClassVar[int]

    def __init__(self, output_size: int | Sequence[int | None] | None) -> None:
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        """The means."""
        return _ADAPTIVE_AVG[self.axes](x, self.output_size)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """The means of `output_size` windows of (batch, channels, length).

    >>> ps.nn.AdaptiveAvgPool1d(2)(ps.zeros((1, 3, 7))).shape
    (1, 3, 2)
    """

    axes = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """The means of `output_size` windows of (batch, channels, height, width).

    >>> ps.nn.AdaptiveAvgPool2d(1)(ps.zeros((1, 3, 7, 7))).shape
    (1, 3, 1, 1)
    """

    axes = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """The means of `output_size` windows of (batch, channels, depth, height, width).

    >>> ps.nn.AdaptiveAvgPool3d(1)(ps.zeros((1, 2, 3, 3, 3))).shape
    (1, 2, 1, 1, 1)
    """

    axes = 3


class _AdaptiveMaxPool(_Windowed):
    settings = "output_size"
    axes: ClassVar[int]

    def __init__(self, output_size: int | Sequence[int | None] | None, return_indices: bool = False) -> None:
        self.output_size, self.return_indices = output_size, return_indices

    def forward(self, x: Tensor) -> Any:
        """The maximum of each window; with `return_indices`, also its flat index in the image."""
        return _ADAPTIVE_MAX[self.axes](x, self.output_size, self.return_indices)


class AdaptiveMaxPool1d(_AdaptiveMaxPool):
    """The maximum of `output_size` windows of (batch, channels, length).

    >>> ps.nn.AdaptiveMaxPool1d(2)(ps.zeros((1, 3, 7))).shape
    (1, 3, 2)
    """

    axes = 1


class AdaptiveMaxPool2d(_AdaptiveMaxPool):
    """The maximum of `output_size` windows of (batch, channels, height, width).

    >>> ps.nn.AdaptiveMaxPool2d(1)(ps.zeros((1, 3, 7, 7))).shape
    (1, 3, 1, 1)
    """

    axes = 2


class AdaptiveMaxPool3d(_AdaptiveMaxPool):
    """The maximum of `output_size` windows of (batch, channels, depth, height, width).

    >>> ps.nn.AdaptiveMaxPool3d(1)(ps.zeros((1, 2, 3, 3, 3))).shape
    (1, 2, 1, 1, 1)
    """

    axes = 3


_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_UNPOOL = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}
_ADAPTIVE_AVG = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
_ADAPTIVE_MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


class Unfold(_Windowed):
    """Windows of (batch, channels, height, width) as (batch, channels * items of a window, windows).

    >>> ps.nn.Unfold(2)(ps.zeros((2, 3, 4, 4))).shape
    (2, 12, 9)
    """

    settings = "kernel_size dilation padding stride"

    def __init__(
        self, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
    ) -> None:
        self.kernel_size, self.dilation, self.padding, self.stride = kernel_size, dilation, padding, stride

    def forward(self, x: Tensor) -> Tensor:
        """The columns."""
        return F.unfold(x, **self._given())


class Fold(Unfold):
    """The transpose of `Unfold`: items of overlapping windows are summed.

    >>> ps.nn.Fold((4, 4), 2)(ps.zeros((2, 12, 9))).shape
    (2, 3, 4, 4)
    """

    settings = f"output_size {Unfold.settings}"

    def __init__(
        self,
        output_size: Sizes,
        kernel_size: Sizes,
        dilation: Sizes = 1,
        padding: Sizes = 0,
        stride: Sizes = 1,
    ) -> None:
        super().__init__(kernel_size, dilation, padding, stride)
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        """The images."""
        return F.fold(x, **self._given())
