"""Linear layers and embeddings."""

from __future__ import annotations

from penstock.nn.functional.activations import named_activation, relu
from penstock.tensor.arithmetic import equal, where
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor
from penstock.tensor.indexing import table_rows
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import expand_dims


@composite
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """`x @ weight.T + bias`, with an optional activation; the weight is (outputs, inputs), as in PyTorch.

    >>> ps.nn.functional.linear(ps.zeros((4, 3)), ps.zeros((2, 3)), ps.zeros(2)).shape
    (4, 2)
    """
    result = matmul(x, weight.T)
    if bias is not None:
        result = result + bias
    return result if activation is None else named_activation(activation)(result)


@composite
def add_relu(x: Tensor, y: Tensor) -> Tensor:
    """`relu(x + y)`.

    >>> ps.nn.functional.add_relu(ps.asarray([1.0]), ps.asarray([-3.0])).tolist()
    [0.0]
    """
    return relu(x + y)


@composite
def mul_relu(x: Tensor, y: Tensor) -> Tensor:
    """`relu(x * y)`.

    >>> ps.nn.functional.mul_relu(ps.asarray([2.0]), ps.asarray([3.0])).tolist()
    [6.0]
    """
    return relu(x * y)


@composite
def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * scale + shift`.

    >>> ps.nn.functional.affine(ps.asarray([2.0]), ps.asarray([3.0]), ps.asarray([1.0])).tolist()
    [7.0]
    """
    return x * scale + shift


def embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of `weight` at the integers in `index`; an index out of range, or below 0, raises.

    Row `padding_idx`, if given, gets no gradient.

    >>> ps.nn.functional.embedding(ps.asarray([2, 0]), ps.asarray([[1.0], [2.0], [3.0]])).tolist()
    [[3.0], [1.0]]
    """
    if index._node.dtype.kind not in "iu":
        raise TypeError(f"embedding looks up integers, and {index.dtype} was given")
    rows = table_rows(weight, index, "embedding")
    if padding_idx is None or not weight.requires_grad:
        return rows
    padded = expand_dims(equal(index, padding_row(padding_idx, weight.shape[0])), axis=-1)
    return where(padded, rows.detach(), rows)


def padding_row(padding_idx: int, rows: int) -> int:
    """The row of a padding index, which may count from the end."""
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx is a row of {rows}, and {padding_idx} was given")
    return padding_idx % rows
