"""Losses as modules: each is a function of `nn.functional` with its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.functional.common import takes_dim
from penstock.nn.module import Module
from penstock.tensor.core import Tensor


class _Loss(Module):
    """A loss function of predictions and targets, with settings as attributes."""

    _function: ClassVar[Callable[..., Tensor]]

    def __init__(self, **settings: Any) -> None:
        self._names = tuple(settings)
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Tensor:
        """The loss."""
        return type(self)._function(*args, **{name: getattr(self, name) for name in self._names})

    def extra_repr(self) -> str:
        """Its settings."""
        settings = {name: getattr(self, name) for name in self._names}
        plain = {name: value for name, value in settings.items() if not isinstance(value, Tensor)}
        return ", ".join(f"{name}={value!r}" for name, value in plain.items() if value is not None)


class L1Loss(_Loss):
    """`F.l1_loss`.

    >>> ps.nn.L1Loss()(ps.asarray([1.0, 3.0]), ps.asarray([1.0, 1.0])).item()
    1.0
    """

    _function = staticmethod(F.l1_loss)

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)


class MSELoss(_Loss):
    """`F.mse_loss`.

    >>> ps.nn.MSELoss()(ps.asarray([1.0, 3.0]), ps.asarray([1.0, 1.0])).item()
    2.0
    """

    _function = staticmethod(F.mse_loss)

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)


class SmoothL1Loss(_Loss):
    """`F.smooth_l1_loss`.

    >>> ps.nn.SmoothL1Loss()(ps.asarray([1.0, 3.0]), ps.asarray([1.0, 1.0])).item()
    0.75
    """

    _function = staticmethod(F.smooth_l1_loss)

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction=reduction, beta=beta)


class HuberLoss(_Loss):
    """`F.huber_loss`.

    >>> ps.nn.HuberLoss()(ps.asarray([1.0, 3.0]), ps.asarray([1.0, 1.0])).item()
    0.75
    """

    _function = staticmethod(F.huber_loss)

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction=reduction, delta=delta)


class BCELoss(_Loss):
    """`F.binary_cross_entropy`.

    >>> round(ps.nn.BCELoss()(ps.asarray([0.5]), ps.asarray([1.0])).item(), 4)
    0.6931
    """

    _function = staticmethod(F.binary_cross_entropy)

    def __init__(self, weight: Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__(weight=weight, reduction=reduction)


class BCEWithLogitsLoss(_Loss):
    """`F.binary_cross_entropy_with_logits`.

    >>> round(ps.nn.BCEWithLogitsLoss()(ps.asarray([0.0]), ps.asarray([1.0])).item(), 4)
    0.6931
    """

    _function = staticmethod(F.binary_cross_entropy_with_logits)

    def __init__(
        self, weight: Tensor | None = None, reduction: str = "mean", pos_weight: Tensor | None = None
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, pos_weight=pos_weight)


class NLLLoss(_Loss):
    """`F.nll_loss`.

    >>> ps.nn.NLLLoss()(ps.asarray([[-1.0, -2.0]]), ps.asarray([1])).item()
    2.0
    """

    _function = staticmethod(F.nll_loss)

    def __init__(
        self, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__(weight=weight, ignore_index=ignore_index, reduction=reduction)


class CrossEntropyLoss(_Loss):
    """`F.cross_entropy`.

    >>> round(ps.nn.CrossEntropyLoss()(ps.zeros((3, 2)), ps.asarray([0, 1, 1])).item(), 4)
    0.6931
    """

    _function = staticmethod(F.cross_entropy)

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )


class KLDivLoss(_Loss):
    """`F.kl_div`.

    >>> ps.nn.KLDivLoss(reduction="sum")(ps.log(ps.asarray([0.5, 0.5])), ps.asarray([0.5, 0.5])).item()
    0.0
    """

    _function = staticmethod(F.kl_div)

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(reduction=reduction, log_target=log_target)


class CosineEmbeddingLoss(_Loss):
    """`F.cosine_embedding_loss`.

    >>> x1, x2 = ps.asarray([[1.0, 0.0]]), ps.asarray([[0.0, 1.0]])
    >>> ps.nn.CosineEmbeddingLoss()(x1, x2, ps.asarray([1])).item()
    1.0
    """

    _function = staticmethod(F.cosine_embedding_loss)

    def __init__(self, margin: float = 0.0, reduction: str = "mean") -> None:
        super().__init__(margin=margin, reduction=reduction)


class CosineSimilarity(_Loss):
    """`F.cosine_similarity`.

    >>> ps.nn.CosineSimilarity()(ps.asarray([[1.0, 0.0]]), ps.asarray([[0.0, 1.0]])).tolist()
    [0.0]
    """

    _function = staticmethod(F.cosine_similarity)

    @takes_dim
    def __init__(self, axis: int = 1, eps: float = 1e-8) -> None:
        super().__init__(axis=axis, eps=eps)


class CTCLoss(_Loss):
    """`F.ctc_loss`.

    >>> round(ps.nn.CTCLoss()(ps.log_softmax(ps.zeros((4, 1, 3)), -1), ps.asarray([[1]]), [4], [1]).item(), 4)
    2.0919
    """

    _function = staticmethod(F.ctc_loss)

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> None:
        super().__init__(blank=blank, reduction=reduction, zero_infinity=zero_infinity)
