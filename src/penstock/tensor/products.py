"""PyTorch's products: einsum, products of batches of matrices, outer products."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.tensor import dtypes, linear
from penstock.tensor.arithmetic import add, multiply
from penstock.tensor.broadcasting import axes_of, common_shape
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import astype, broadcast_to, expand_dims, permute_dims, reshape
from penstock.tensor.operands import Array, as_tensors
from penstock.tensor.reduction import sum as sum_
from penstock.tensor.selecting import diagonal

_Term = tuple[Tensor, str]  # a tensor and the names of its axes


def _of_axes(name: str, tensors: Sequence[Tensor], counts: Sequence[int]) -> None:
    for tensor, count in zip(tensors, counts, strict=True):
        if tensor.ndim != count:
            shapes = " and ".join(str(tensor.shape) for tensor in tensors)
            raise ValueError(f"{name} takes tensors of {' and '.join(map(str, counts))} axes, not {shapes}")


def mm(x1: Array, x2: Array, /) -> Tensor:
    """The product of two matrices.

    >>> ps.mm(ps.zeros((2, 3)), ps.zeros((3, 4))).shape
    (2, 4)
    """
    both = as_tensors("mm", x1, x2)
    _of_axes("mm", both, (2, 2))
    return matmul(*both)


def bmm(x1: Array, x2: Array, /) -> Tensor:
    """The products of two batches of matrices.

    >>> ps.bmm(ps.zeros((5, 2, 3)), ps.zeros((5, 3, 4))).shape
    (5, 2, 4)
    """
    both = as_tensors("bmm", x1, x2)
    _of_axes("bmm", both, (3, 3))
    if both[0].shape[0] != both[1].shape[0]:
        raise ValueError(f"bmm: shapes {both[0].shape} and {both[1].shape} differ in the number of matrices")
    return matmul(*both)


def mv(x1: Array, x2: Array, /) -> Tensor:
    """The product of a matrix and a vector.

    >>> ps.mv(ps.asarray([[1, 2], [3, 4]]), ps.asarray([1, 1])).tolist()
    [3, 7]
    """
    both = as_tensors("mv", x1, x2)
    _of_axes("mv", both, (2, 1))
    return matmul(*both)


def dot(x1: Array, x2: Array, /) -> Tensor:
    """The dot product of two vectors.

    >>> ps.dot(ps.asarray([1, 2]), ps.asarray([3, 4])).item()
    11
    """
    both = as_tensors("dot", x1, x2)
    _of_axes("dot", both, (1, 1))
    return matmul(*both)


def outer(x1: Array, x2: Array, /) -> Tensor:
    """The outer product of two vectors.

    >>> ps.outer(ps.asarray([1, 2]), ps.asarray([3, 4])).tolist()
    [[3, 4], [6, 8]]
    """
    x1, x2 = as_tensors("outer", x1, x2)
    return _outer(x1, x2)


@composite
def _outer(x1: Tensor, x2: Tensor) -> Tensor:
    _of_axes("outer", (x1, x2), (1, 1))
    return multiply(expand_dims(x1, 1), expand_dims(x2, 0))


def tensordot(x1: Array, x2: Array, /, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Tensor:
    """The sum of products over the last `axes` axes of x1 and the first of x2, or over lists of axes.

    As in PyTorch, an axis of length 1 is broadcast to any length.

    >>> ps.tensordot(ps.zeros((2, 3, 4)), ps.zeros((4, 5)), 1).shape
    (2, 3, 5)
    """
    x1, x2 = as_tensors("tensordot", x1, x2)
    if not isinstance(axes, int):
        for left, right in zip(*axes, strict=True):
            (first,), (second,) = axes_of(x1, left, "tensordot"), axes_of(x2, right, "tensordot")
            if x1.shape[first] == 1:
                x2 = sum_(x2, axis=second, keepdims=True)
            elif x2.shape[second] == 1:
                x1 = sum_(x1, axis=first, keepdims=True)
    return linear.tensordot(x1, x2, axes=axes)


def addmm(x: Array, x1: Array, x2: Array, /, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * x + alpha * (x1 @ x2)`, of matrices.

    >>> ps.addmm(ps.ones((2, 2)), ps.eye(2), ps.eye(2)).tolist()
    [[2.0, 1.0], [1.0, 2.0]]
    """
    x, x1, x2 = as_tensors("addmm", x, x1, x2)
    return _added("addmm", x, mm(x1, x2), beta, alpha)


def baddbmm(x: Array, x1: Array, x2: Array, /, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * x + alpha * (x1 @ x2)`, of batches of matrices.

    >>> ps.baddbmm(ps.zeros((5, 2, 4)), ps.zeros((5, 2, 3)), ps.zeros((5, 3, 4))).shape
    (5, 2, 4)
    """
    x, x1, x2 = as_tensors("baddbmm", x, x1, x2)
    return _added("baddbmm", x, bmm(x1, x2), beta, alpha)


def _added(name: str, x: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    if product.dtype.kind in "iu" and not (isinstance(beta, int) and isinstance(alpha, int)):
        raise TypeError(f"{name}: beta and alpha are integers for {product.dtype}, not {beta} and {alpha}")
    product = product if alpha == 1 else multiply(product, alpha)
    if beta == 0:  # x is ignored, even NaN
        return product
    broadcast_to(x, product.shape)
    return add(x if beta == 1 else multiply(x, beta), product)


def einsum(equation: str, *operands: Any) -> Tensor:
    """The sum of products over named axes, computed pair by pair in the cheapest order.

    An example is `einsum("bij,bjk->bik", x, y)`; an ellipsis stands for axes that broadcast.

    >>> ps.einsum("ij,jk->ik", ps.zeros((2, 3)), ps.zeros((3, 4))).shape
    (2, 4)
    """
    if not isinstance(equation, str):
        raise TypeError(f"einsum takes an equation such as 'ij,jk->ik' first, not {type(equation).__name__}")
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return _einsum(equation, *as_tensors("einsum", *operands))


@composite
def _einsum(equation: str, *tensors: Tensor) -> Tensor:
    inputs, output = _parsed(equation, tensors)
    dtype = dtypes.promote(*(tensor.dtype for tensor in tensors))
    terms = [
        _once(astype(tensor, dtype), names, equation) for tensor, names in zip(tensors, inputs, strict=True)
    ]
    lengths = _lengths(terms, equation)
    for name in output:
        if name not in lengths:
            raise ValueError(f"einsum {equation!r}: the result names axis {name!r}, which no operand has")
    for pair in _order(terms, output):
        chosen = [terms.pop(at) for at in sorted(pair, reverse=True)]
        needed = set(output).union(*(names for _, names in terms))
        terms.append(_product(chosen[-1], chosen[0], needed, lengths))
    (last,) = terms
    tensor, names = _summed(last, set(output))
    return permute_dims(tensor, [names.index(name) for name in output])


def _parsed(equation: str, tensors: Sequence[Tensor]) -> tuple[list[str], str]:
    """The axis names of each operand and of the result; the axes of an ellipsis are named too."""
    text = equation.replace(" ", "")
    left, arrow, output = text.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(tensors):
        raise ValueError(f"einsum {equation!r} has {len(inputs)} operands, and {len(tensors)} were given")
    plain = text.replace("...", "").replace("->", "").replace(",", "")
    if not all(name in string.ascii_letters for name in plain):
        raise ValueError(f"einsum {equation!r}: axes are named by letters")
    free = [name for name in string.ascii_letters if name not in plain]
    widest, hidden = 0, []
    for names, tensor in zip(inputs, tensors, strict=True):
        count = tensor.ndim - len(names.replace("...", ""))
        if count < 0 or (count and "..." not in names):
            raise ValueError(f"einsum {equation!r}: {names!r} does not fit shape {tensor.shape}")
        hidden.append(count)
        widest = max(widest, count)
    if widest > len(free):
        raise ValueError(f"einsum {equation!r}: there are not enough letters for {widest} more axes")
    rest = "".join(free[:widest])
    inputs = [
        names.replace("...", rest[widest - count :]) for names, count in zip(inputs, hidden, strict=True)
    ]
    if not arrow:
        single = sorted(name for name in set(plain) if plain.count(name) == 1)
        return inputs, rest + "".join(single)
    output = output.replace("...", rest)
    if len(set(output)) != len(output):
        raise ValueError(f"einsum {equation!r}: the result names an axis twice")
    return inputs, output


def _once(tensor: Tensor, names: str, equation: str) -> _Term:
    """Replace axes of the same name by their diagonal."""
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            if tensor.shape[first] != tensor.shape[second]:
                raise ValueError(f"einsum {equation!r}: {name!r} has two lengths in {tensor.shape}")
            tensor = diagonal(tensor, 0, first, second)
            names = names[:first] + names[first + 1 : second] + names[second + 1 :] + name
    return tensor, names


def _lengths(terms: Sequence[_Term], equation: str) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for tensor, names in terms:
        for name, length in zip(names, tensor.shape, strict=True):
            known = lengths.setdefault(name, length)
            if known == 1:
                lengths[name] = length
            elif length not in (known, 1):
                shapes = ", ".join(str(tensor.shape) for tensor, _ in terms)
                raise ValueError(f"einsum {equation!r}: {name!r} has two lengths in shapes {shapes}")
    return lengths


def _order(terms: Sequence[_Term], output: str) -> list[tuple[int, ...]]:
    """The pairs of operands to multiply, in the cheapest order."""
    if len(terms) < 3:
        return [(0, 1)] if len(terms) == 2 else []
    text = ",".join(names for _, names in terms) + "->" + output
    shapes = [np.broadcast_to(np.float32(0), tensor.shape) for tensor, _ in terms]
    path, _ = np.einsum_path(text, *shapes, optimize="optimal" if len(terms) < 7 else "greedy")
    steps: list[tuple[int, ...]] = []
    for step in path[1:]:
        # A step of NumPy's may have several operands: multiply them pair by pair.
        at = sorted(step)
        left = len(terms) - sum(len(done) - 1 for done in steps)
        steps.append(tuple(at[-2:]))
        for other in reversed(at[:-2]):
            left -= 1
            steps.append((other, left - 1))
    return steps


def _summed(term: _Term, needed: set[str]) -> _Term:
    """Sum over the axes that are not needed."""
    tensor, names = term
    axes = tuple(axis for axis, name in enumerate(names) if name not in needed)
    if not axes:
        return term
    return sum_(tensor, axis=axes, dtype=tensor.dtype), "".join(name for name in names if name in needed)


def _product(left: _Term, right: _Term, needed: set[str], lengths: dict[str, int]) -> _Term:
    """The product of two operands, summed over the axes that are not needed."""
    a, a_names = _summed(left, needed | set(right[1]))
    b, b_names = _summed(right, needed | set(a_names))
    both = [name for name in a_names if name in b_names]
    batch = [name for name in both if name in needed]
    inner = [name for name in both if name not in needed]
    rows = [name for name in a_names if name not in both]
    columns = [name for name in b_names if name not in both]
    sizes = [tuple(lengths[name] for name in part) for part in (batch, rows, inner, columns)]
    a = _arranged(a, a_names, batch + rows + inner, lengths)
    b = _arranged(b, b_names, batch + inner + columns, lengths)
    count, m, k, n = (math.prod(part) for part in sizes)
    if inner and not batch:
        product = matmul(reshape(a, (m, k)), reshape(b, (k, n)))
    elif inner:
        product = matmul(reshape(a, (count, m, k)), reshape(b, (count, k, n)))
    else:
        product = multiply(reshape(a, (count, m, 1)), reshape(b, (count, 1, n)))
    return reshape(product, sizes[0] + sizes[1] + sizes[3]), "".join(batch + rows + columns)


def _arranged(x: Tensor, names: str, order: list[str], lengths: dict[str, int]) -> Tensor:
    """Permute the axes, and broadcast axes of length 1 to the length of other operands."""
    x = permute_dims(x, [names.index(name) for name in order])
    return broadcast_to(x, common_shape(x.shape, tuple(lengths[name] for name in order)))
