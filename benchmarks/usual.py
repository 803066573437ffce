"""Expressions as users write them in their first hour, of arrays with `n` rows and `m` columns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import penstock as ps
from penstock import Device
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it


class Arrays:
    """Makes arrays of floating point on a device."""

    def __init__(self, device: Device, dtype: str = "float32") -> None:
        self._device, self._dtype = device, getattr(ps, dtype)

    def __call__(self, *shape: int) -> ps.Tensor:
        return ps.asarray(np.ones(shape, self._dtype), device=self._device)

    def index(self, *shape: int) -> ps.Tensor:
        return ps.asarray(np.zeros(shape, np.int64), device=self._device)


def _heads(a: Arrays, n: int, m: int) -> ps.Tensor:
    return F.gelu(a(2, n, 64)).reshape(2, n, 4, 16).permute(0, 2, 1, 3) * 2


def _correlations(a: Arrays, n: int, m: int) -> ps.Tensor:
    x = a(n, 40) - a(n, 40).mean(axis=0)
    return (x.T @ x) / (n * x.std(axis=0)[:, None] * x.std(axis=0)[None, :])


def _rotated(a: Arrays, n: int, m: int) -> ps.Tensor:
    x, cosine, sine = a(2, 4, n, 32), ps.cos(a(n, 16)), ps.sin(a(n, 16))
    first, second = x[..., :16], x[..., 16:]
    return ps.concat([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


USUAL: dict[str, Callable[[Arrays, int, int], ps.Tensor]] = {
    "squared distances": lambda a, n, m: ((a(50, m)[:, None, :] - a(20, m)[None, :, :]) ** 2).sum(axis=-1),
    "distances": lambda a, n, m: ps.sqrt(((a(n, 1, 8) - a(1, m, 8)) ** 2).sum(axis=-1)),
    "the nearest": lambda a, n, m: ps.argmin(((a(n, 1, 8) - a(1, 5, 8)) ** 2).sum(axis=-1), axis=1),
    "a transpose": lambda a, n, m: ps.exp(a(n, m)).T * 2,
    "correlations": _correlations,
    "standardized": lambda a, n, m: (a(n, m) - a(n, m).mean(axis=0)) / (a(n, m).std(axis=0) + 1e-6),
    "a batch of products": lambda a, n, m: ps.exp(a(4, n, 30)) @ a(4, 30, 20),
    "einsum": lambda a, n, m: ps.einsum("bik,bjk->bij", ps.exp(a(4, n, 30)), a(4, 20, 30)),
    "heads": _heads,
    "rotated": _rotated,
    "softmax": lambda a, n, m: F.softmax(a(n, m), axis=1),
    "softmax of columns": lambda a, n, m: F.softmax(a(n, m), axis=0),
    "log_softmax": lambda a, n, m: F.log_softmax(a(n, m), axis=1),
    "logsumexp": lambda a, n, m: ps.logsumexp(a(n, m), axis=1),
    "cross-entropy": lambda a, n, m: F.cross_entropy(a(n, m), a.index(n)),
    "its gradient": lambda a, n, m: ps.grad(lambda x: F.cross_entropy(x, a.index(n)))(a(n, m)),
    "mean squared error": lambda a, n, m: F.mse_loss(a(n, m), a(n, m)),
    "binary cross-entropy": lambda a, n, m: F.binary_cross_entropy_with_logits(a(n, m), a(n, m)),
    "layer norm": lambda a, n, m: F.layer_norm(a(n, m), (m,), a(m), a(m)),
    "normalized": lambda a, n, m: F.normalize(a(n, m)),
    "dropout": lambda a, n, m: F.dropout(a(n, m), 0.5),
    "gelu": lambda a, n, m: F.gelu(a(n, m)),
    "gradient of gelu": lambda a, n, m: ps.grad(lambda x: F.gelu(x).sum())(a(n, m)),
    "a linear layer": lambda a, n, m: F.relu(F.linear(a(n, m), a(40, m), a(40))),
    "gradient of a network": lambda a, n, m: ps.grad(lambda w: F.mse_loss(ps.tanh(a(n, m) @ w), a(n, 16)))(
        a(m, 16)
    ),
    "embedding": lambda a, n, m: F.embedding(a.index(n), a(50, m)) * 1.5 + ps.sin(a(n, m)),
    "one hot": lambda a, n, m: ps.one_hot(a.index(n), 10).astype(ps.float32) @ ps.exp(a(10, m)),
    "largest of windows": lambda a, n, m: F.max_pool2d(ps.exp(a(2, 3, n // 8 * 2, m // 8 * 2)), 2),
    "mean of pictures": lambda a, n, m: ps.exp(a(2, 3, n // 8, m // 8)).mean(axis=(2, 3)),
    "interpolated": lambda a, n, m: F.interpolate(ps.exp(a(2, 3, n // 8, m // 8)), scale_factor=2),
    "padded": lambda a, n, m: F.pad(ps.exp(a(n, m)), (1, 1)),
    "differences": lambda a, n, m: ps.exp(a(n, m))[:, 1:] - ps.exp(a(n, m))[:, :-1],
    "every other": lambda a, n, m: ps.exp(a(n, m)[:, ::2]),
    "flipped": lambda a, n, m: ps.exp(ps.flip(a(n, m), axis=1)),
    "rolled": lambda a, n, m: ps.exp(ps.roll(a(n, m), 3, axis=1)),
    "stacked": lambda a, n, m: ps.stack([ps.exp(a(n, m)), a(n, m)]),
    "cumulative sums": lambda a, n, m: ps.cumulative_sum(ps.exp(a(n, m)), axis=1),
    "accuracy": lambda a, n, m: (ps.argmax(ps.exp(a(n, m)), axis=1) == a.index(n)).astype(ps.float32).mean(),
    "chosen": lambda a, n, m: ps.where(a(n, m) > 0, ps.log(a(n, m)), 0.0).sum(),
    "clipped": lambda a, n, m: ps.clip(ps.exp(a(n, m)), 0, 1),
    "a norm": lambda a, n, m: ps.sqrt((a(n, m) ** 2).sum()),
    "an outer product": lambda a, n, m: ps.exp(a(n))[:, None] * a(m)[None, :],
    "a dot product": lambda a, n, m: ps.exp(a(n * m)) @ a(n * m),
    "a polynomial": lambda a, n, m: 3 * a(n, m) ** 3 - 2 * a(n, m) ** 2 + a(n, m) / 7,
    "below the diagonal": lambda a, n, m: ps.tril(ps.exp(a(n, n))),
    "means of the middle": lambda a, n, m: ps.exp(a(9, n, m)).mean(axis=1),
    "means of the first": lambda a, n, m: ps.exp(a(9, n, m)).mean(axis=0),
    "largest of the middle": lambda a, n, m: ps.exp(a(9, n, m)).max(axis=1),
    "a gated unit": lambda a, n, m: F.glu(a(n, 2 * m)),
}


def _images(a: Arrays, n: int, m: int) -> ps.Tensor:
    return a(2, 5, n // 8, m // 8)


def _network(a: Arrays, n: int, m: int) -> ps.Tensor:
    hidden = F.max_pool2d(F.relu(F.conv2d(_images(a, n, m), a(12, 5, 3, 3), a(12), padding=1)), 2)
    return F.relu(F.conv2d(hidden, a(20, 12, 3, 3), a(20), padding=1)).mean(axis=(2, 3))


# Of images and sequences; a GPU's kernels for these depend on shapes.
OF_IMAGES: dict[str, Callable[[Arrays, int, int], ps.Tensor]] = {
    "a convolution": lambda a, n, m: F.conv2d(_images(a, n, m), a(16, 5, 3, 3), a(16), padding=1),
    "of large windows": lambda a, n, m: F.conv2d(a(1, 3, n // 8, m // 8), a(8, 3, 5, 5), padding=2),
    "with a stride": lambda a, n, m: F.conv2d(_images(a, n, m), a(6, 5, 3, 3), stride=2, padding=1),
    "of items": lambda a, n, m: F.conv2d(_images(a, n, m), a(8, 5, 1, 1)),
    "of each channel": lambda a, n, m: F.conv2d(_images(a, n, m), a(5, 1, 3, 3), padding=1, groups=5),
    "of sequences": lambda a, n, m: F.conv1d(a(3, 5, n), a(7, 5, 5), padding=2),
    "a transposed convolution": lambda a, n, m: F.conv_transpose2d(_images(a, n, m), a(5, 4, 2, 2), stride=2),
    "a network of convolutions": _network,
    "the gradient of a weight": lambda a, n, m: ps.grad(
        lambda w: (F.conv2d(_images(a, n, m), w, padding=1) ** 2).mean()
    )(a(8, 5, 3, 3)),
    "the gradient of images": lambda a, n, m: ps.grad(
        lambda x: (F.conv2d(x, a(8, 5, 3, 3), padding=1) ** 2).mean()
    )(_images(a, n, m)),
    "largest of overlapping windows": lambda a, n, m: F.max_pool2d(
        ps.exp(_images(a, n, m)), 3, stride=2, padding=1
    ),
    "means of windows": lambda a, n, m: F.avg_pool2d(ps.exp(_images(a, n, m)), 2),
}
