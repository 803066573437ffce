"""Norms as modules, with their weights and running statistics."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.functional.normalization import replace_running
from penstock.nn.layers import Where
from penstock.nn.module import Module
from penstock.nn.parameter import Parameter
from penstock.tensor.arithmetic import reciprocal
from penstock.tensor.core import Tensor
from penstock.tensor.creation import ones, zeros
from penstock.tensor.dtypes import float32, int64
from penstock.tensor.manipulation import astype, expand_dims, squeeze


def _shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


class LayerNorm(Module):
    """Mean 0 and variance 1 along the last axes, then scaled and shifted.

    >>> ps.nn.LayerNorm(4)(ps.ones((2, 4))).tolist()[0]
    [0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Where = None,
    ) -> None:
        self.normalized_shape, self.eps = _shape(normalized_shape), eps
        has_bias = elementwise_affine and bias
        self.weight = Parameter(ones(self.normalized_shape, device=device)) if elementwise_affine else None
        self.bias = Parameter(zeros(self.normalized_shape, device=device)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize along the last axes."""
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class RMSNorm(Module):
    """Mean square 1 along the last axes, then scaled.

    >>> ps.nn.RMSNorm(4)(ps.zeros((2, 4))).tolist()[0]
    [0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Where = None,
    ) -> None:
        self.normalized_shape, self.eps = _shape(normalized_shape), eps
        self.weight = Parameter(ones(self.normalized_shape, device=device)) if elementwise_affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize along the last axes."""
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class GroupNorm(Module):
    """Mean 0 and variance 1 of each group of channels, then scaled and shifted.

    >>> ps.nn.GroupNorm(3, 6)(ps.zeros((2, 6, 4))).shape
    (2, 6, 4)
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Where = None,
    ) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"{num_channels} channels do not make {num_groups} groups")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = Parameter(ones((num_channels,), device=device)) if affine else None
        self.bias = Parameter(zeros((num_channels,), device=device)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each group."""
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.weight is not None}"


class _Running(Module):
    """Normalization of channels with running statistics, which are buffers."""

    _axes: tuple[int, ...]  # how many axes the input may have

    def __init__(
        self,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
        device: Where,
    ) -> None:
        if num_features < 1:
            raise ValueError(f"a norm needs 1 feature or more, and {num_features} was given")
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        shape = (num_features,)
        self.weight = Parameter(ones(shape, device=device)) if affine else None
        self.bias = Parameter(zeros(shape, device=device)) if affine else None
        tracked = track_running_stats
        self.running_mean = zeros(shape, device=device).realize() if tracked else None
        self.running_var = ones(shape, device=device).realize() if tracked else None
        self.num_batches_tracked = zeros((), dtype=int64, device=device).realize() if tracked else None

    def extra_repr(self) -> str:
        """Its sizes and settings."""
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, "
            f"affine={self.weight is not None}, track_running_stats={self.running_mean is not None}"
        )

    def _check(self, x: Tensor) -> None:
        if x.ndim not in self._axes:
            counts = " or ".join(map(str, self._axes))
            raise ValueError(f"{type(self).__name__} takes {counts} axes, and the shape {x.shape} was given")


class _BatchNorm(_Running):
    """Mean 0 and variance 1 of each channel over all examples, then scaled and shifted.

    Evaluation uses running statistics, which training moves towards those of each batch by `momentum`; with
    None they are the mean over all batches.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Where = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each channel."""
        self._check(x)
        training, momentum = self.training, self.momentum
        weight: float | Tensor = 0.0 if momentum is None else momentum
        if training and self.num_batches_tracked is not None:
            replace_running(self.num_batches_tracked, self.num_batches_tracked + 1)
            if momentum is None:
                weight = reciprocal(astype(self.num_batches_tracked, float32))
        by_batch = training or self.running_mean is None
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, by_batch, weight, self.eps
        )


class BatchNorm1d(_BatchNorm):
    """Batch norm of (batch, channels) or (batch, channels, length).

    >>> ps.nn.BatchNorm1d(3)(ps.zeros((2, 3, 4))).shape
    (2, 3, 4)
    """

    _axes = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Batch norm of (batch, channels, height, width).

    >>> ps.nn.BatchNorm2d(3)(ps.zeros((2, 3, 4, 4))).shape
    (2, 3, 4, 4)
    """

    _axes = (4,)


class BatchNorm3d(_BatchNorm):
    """Batch norm of (batch, channels, depth, height, width).

    >>> ps.nn.BatchNorm3d(3)(ps.zeros((2, 3, 2, 2, 2))).shape
    (2, 3, 2, 2, 2)
    """

    _axes = (5,)


class _InstanceNorm(_Running):
    """Mean 0 and variance 1 of each channel of each example, then scaled and shifted if `affine`."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Where = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each channel."""
        self._check(x)
        by_input = self.training or self.running_mean is None
        unbatched = x.ndim == self._axes[0]
        result = F.instance_norm(
            expand_dims(x, axis=0) if unbatched else x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            by_input,
            self.momentum or 0.0,
            self.eps,
        )
        return squeeze(result, 0) if unbatched else result


class InstanceNorm1d(_InstanceNorm):
    """Instance norm of (batch, channels, length), or without the batch.

    >>> ps.nn.InstanceNorm1d(3)(ps.zeros((2, 3, 4))).shape
    (2, 3, 4)
    """

    _axes = (2, 3)


class InstanceNorm2d(_InstanceNorm):
    """Instance norm of (batch, channels, height, width), or without the batch.

    >>> ps.nn.InstanceNorm2d(3)(ps.zeros((2, 3, 4, 4))).shape
    (2, 3, 4, 4)
    """

    _axes = (3, 4)


class InstanceNorm3d(_InstanceNorm):
    """Instance norm of (batch, channels, depth, height, width), or without the batch.

    >>> ps.nn.InstanceNorm3d(3)(ps.zeros((2, 3, 2, 2, 2))).shape
    (2, 3, 2, 2, 2)
    """

    _axes = (4, 5)
