"""Linear systems, determinants and decompositions of matrices.

NumPy computes them, on every device; their gradients are graph operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.graph import elementwise, host
from penstock.graph.node import DType, Node, Shape
from penstock.tensor import dtypes
from penstock.tensor.arguments import of_tensor
from penstock.tensor.arithmetic import (
    add,
    conj,
    divide,
    equal,
    greater,
    multiply,
    square,
    subtract,
    where,
)
from penstock.tensor.arithmetic import real as real_
from penstock.tensor.autograd import lasting_vjp
from penstock.tensor.broadcasting import broadcast, common_shape
from penstock.tensor.core import Tensor, record
from penstock.tensor.creation import asarray, eye, tril
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import (
    astype,
    concat,
    expand_dims,
    reshape,
    squeeze,
)
from penstock.tensor.operands import Array, as_tensors
from penstock.tensor.recording import recording
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import prod


class EighResult(NamedTuple):
    """The result of `eigh`."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class QRResult(NamedTuple):
    """The result of `qr`."""

    Q: Tensor
    R: Tensor


class SlogdetResult(NamedTuple):
    """The result of `slogdet`."""

    sign: Tensor
    logabsdet: Tensor


class SVDResult(NamedTuple):
    """The result of `svd`."""

    U: Tensor
    S: Tensor
    Vh: Tensor


def check_matrices(name: str, x: Tensor, square_: bool = False) -> None:
    """Raise unless `x` has matrices of floating point or complex numbers; `square_`: square matrices."""
    if x.dtype.kind not in "fc":
        raise TypeError(f"linalg.{name} takes floating point, and {x.dtype} was given")
    if x.ndim < 2 or (square_ and x.shape[-1] != x.shape[-2]):
        kind = "square matrices" if square_ else "matrices"
        raise ValueError(f"linalg.{name} takes {kind}, and the shape is {x.shape}")


def _adjoint(x: Tensor) -> Tensor:
    return conj(x.mT) if x.dtype.kind == "c" else x.mT


def _parts(packed: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Results of these shapes, which a primitive has concatenated in the last axis."""
    parts, start = [], 0
    batch = packed.ndim - 1
    for shape in shapes:
        size = math.prod(shape[batch:])
        parts.append(reshape(packed[..., start : start + size], shape))
        start += size
    return parts


def _column(x: Tensor) -> Tensor:
    return expand_dims(x, -1)


def _row(x: Tensor) -> Tensor:
    return expand_dims(x, -2)


# Linear systems


@of_tensor
def inv(x: Tensor, /) -> Tensor:
    """The inverses of square matrices.

    >>> ps.linalg.inv(ps.asarray([[2.0, 0.0], [0.0, 4.0]])).tolist()
    [[0.5, 0.0], [0.0, 0.25]]
    """
    check_matrices("inv", x, square_=True)
    return lasting_vjp(_apply(host.inv, x), [x], _inv_gradient)


def _inv_gradient(g: Tensor, _: Tensor, x: Tensor) -> list[Tensor]:
    inverse = inv(x).mT
    return [-matmul(matmul(inverse, g), inverse)]


def _apply(function: Any, *tensors: Tensor, **attributes: Any) -> Tensor:
    """A primitive that the host computes, float16 and bfloat16 in float32."""
    node: Node = function(*(elementwise.widened(x._node) for x in tensors), **attributes)
    return record(elementwise.cast(node, _narrow(node.dtype, tensors[0].dtype)), *tensors)


def _narrow(dtype: DType, given: DType) -> DType:
    return given if given in dtypes.HALF_PRECISION else dtype


def solve(x1: Array, x2: Array, /) -> Tensor:
    """The solution `x` of `x1 @ x == x2`, where `x2` is a vector or has matrices in its last two axes.

    >>> ps.linalg.solve(ps.asarray([[2.0, 0.0], [0.0, 4.0]]), ps.asarray([2.0, 4.0])).tolist()
    [1.0, 1.0]
    """
    x1, x2 = as_tensors("linalg.solve", x1, x2)
    check_matrices("solve", x1, square_=True)
    dtype = dtypes.promote(x1.dtype, x2.dtype)
    a, b = astype(x1, dtype), astype(x2, dtype)
    check_matrices("solve", a)
    right = _column(b) if b.ndim == 1 else b
    if right.shape[-2] != a.shape[-1]:
        raise ValueError(f"linalg.solve: shapes {x1.shape} and {x2.shape} do not fit together")
    batch = common_shape(a.shape[:-2], right.shape[:-2])
    a, right = broadcast(a, batch + a.shape[-2:]), broadcast(right, batch + right.shape[-2:])
    result = lasting_vjp(_apply(host.solve, a, right), [a, right], _solve_gradient)
    return squeeze(result, -1) if b.ndim == 1 else result


def _solve_gradient(g: Tensor, x: Tensor, a: Tensor, _: Tensor) -> list[Tensor]:
    to_b = solve(a.mT, g)
    return [-matmul(to_b, x.mT), to_b]


@of_tensor
def det(x: Tensor, /) -> Tensor:
    """The determinants of square matrices.

    >>> ps.linalg.det(ps.asarray([[2.0, 0.0], [0.0, 4.0]])).item()
    8.0
    """
    check_matrices("det", x, square_=True)
    return lasting_vjp(_apply(host.det, x), [x], _det_gradient)


def _det_gradient(g: Tensor, _: Tensor, x: Tensor) -> list[Tensor]:
    """Computed from the singular values, so that it is right for singular matrices too."""
    u, s, vh = svd(x.detach(), full_matrices=False)
    count = s.shape[-1]
    others = where(eye(count, dtype=dtypes.bool_, device=x.device), 1.0, _row(s))
    sign = det(matmul(u, vh))
    cofactors = matmul(multiply(u, _row(multiply(prod(others, axis=-1), _column(sign)))), vh)
    return [multiply(reshape(g, (*g.shape, 1, 1)), cofactors)]


@of_tensor
def slogdet(x: Tensor, /) -> SlogdetResult:
    """The signs of the determinants, and the logarithms of their absolute values.

    >>> ps.linalg.slogdet(ps.eye(2)).sign.item()
    1.0
    """
    check_matrices("slogdet", x, square_=True)
    packed = _apply(host.slogdet, x)
    sign, logarithm = packed[..., 0], real_(packed[..., 1])
    return SlogdetResult(sign.detach(), lasting_vjp(logarithm, [x], _slogdet_gradient))


def _slogdet_gradient(g: Tensor, _: Tensor, x: Tensor) -> list[Tensor]:
    return [multiply(reshape(g, (*g.shape, 1, 1)), inv(x).mT)]


# Decompositions


@of_tensor
def cholesky(x: Tensor, /, *, upper: bool = False) -> Tensor:
    """The lower triangular L with `x == L @ L.T` (conjugated if complex), or its transpose if `upper`.

    `x` has to be symmetric and positive definite.

    >>> ps.linalg.cholesky(ps.asarray([[4.0, 0.0], [0.0, 9.0]])).tolist()
    [[2.0, 0.0], [0.0, 3.0]]
    """
    check_matrices("cholesky", x, square_=True)
    lower = lasting_vjp(_apply(host.cholesky, x), [x], _cholesky_gradient)
    return _adjoint(lower) if upper else lower


def _cholesky_gradient(g: Tensor, lower: Tensor, _: Tensor) -> list[Tensor]:
    inner = tril(matmul(lower.mT, g))
    inner = subtract(inner, multiply(0.5, multiply(inner, _identity(lower))))
    inverse = inv(lower)
    whole = matmul(matmul(inverse.mT, inner), inverse)
    return [multiply(0.5, add(whole, whole.mT))]


def _identity(x: Tensor) -> Tensor:
    return eye(x.shape[-1], dtype=x.dtype, device=x.device)


@of_tensor
def qr(x: Tensor, /, *, mode: str = "reduced") -> QRResult:
    """Q with orthonormal columns and an upper triangular R, with `x == Q @ R`.

    >>> q, r = ps.linalg.qr(ps.ones((3, 2)))
    >>> q.shape, r.shape
    ((3, 2), (2, 2))
    """
    check_matrices("qr", x)
    if mode not in ("reduced", "complete"):
        raise ValueError(f"linalg.qr: mode is 'reduced' or 'complete', and {mode!r} was given")
    *_, m, n = x.shape
    if mode == "complete" and m > n:
        q, r = _parts(_apply(host.qr, x.detach(), complete=True), host.qr_shapes(x.shape, True))
        if x.requires_grad and recording():
            raise TypeError("linalg.qr: 'complete' has no gradient where there are more rows than columns")
        return QRResult(q, r)
    first = x[..., :m] if m < n else x
    packed = lasting_vjp(_apply(host.qr, first, complete=False), [first], _qr_gradient)
    q, r = _parts(packed, host.qr_shapes(first.shape, False))
    if m < n:  # Q depends on the first m columns only; the rest of R follows from it
        r = concat([r, matmul(_adjoint(q), x[..., m:])], axis=-1)
    return QRResult(q, r)


def _qr_gradient(g: Tensor, packed: Tensor, x: Tensor) -> list[Tensor]:
    shapes = host.qr_shapes(x.shape, False)
    (to_q, to_r), (q, r) = _parts(g, shapes), _parts(packed, shapes)
    middle = subtract(matmul(r, to_r.mT), matmul(to_q.mT, q))
    below = tril(middle, k=-1)
    symmetric = add(tril(middle), below.mT)
    return [solve(r, add(to_q, matmul(q, symmetric)).mT).mT]


@of_tensor
def eigh(x: Tensor, /) -> EighResult:
    """The eigenvalues of symmetric matrices in ascending order, and the eigenvectors as columns.

    >>> ps.linalg.eigh(ps.asarray([[2.0, 0.0], [0.0, 1.0]])).eigenvalues.tolist()
    [1.0, 2.0]
    """
    check_matrices("eigh", x, square_=True)
    packed = lasting_vjp(_apply(host.eigh, x), [x], _eigh_gradient)
    values, vectors = _parts(packed, [x.shape[:-1], x.shape])
    return EighResult(real_(values), vectors)


def _eigh_gradient(g: Tensor, packed: Tensor, x: Tensor) -> list[Tensor]:
    shapes = [x.shape[:-1], x.shape]
    (to_values, to_vectors), (values, vectors) = _parts(g, shapes), _parts(packed, shapes)
    differences = subtract(_row(values), _column(values))
    inner = multiply(_inverse(differences), matmul(vectors.mT, to_vectors))
    inner = add(inner, multiply(_column(to_values), _identity(x)))
    whole = matmul(matmul(vectors, inner), vectors.mT)
    return [multiply(0.5, add(whole, whole.mT))]


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 where x is 0: vectors of equal eigenvalues are not unique, and get no gradient."""
    none = equal(x, 0.0)
    return where(none, 0.0, divide(1.0, where(none, 1.0, x)))


@of_tensor
def eigvalsh(x: Tensor, /) -> Tensor:
    """The eigenvalues of symmetric matrices in ascending order.

    >>> ps.linalg.eigvalsh(ps.asarray([[2.0, 0.0], [0.0, 1.0]])).tolist()
    [1.0, 2.0]
    """
    return eigh(x).eigenvalues


@of_tensor
def svd(x: Tensor, /, *, full_matrices: bool = True) -> SVDResult:
    """U, the singular values S in descending order, and Vh, with `x == (U * S) @ Vh` for the reduced form.

    >>> u, s, vh = ps.linalg.svd(ps.ones((3, 2)), full_matrices=False)
    >>> u.shape, s.shape, vh.shape
    ((3, 2), (2,), (2, 2))
    """
    check_matrices("svd", x)
    square_ = x.shape[-1] == x.shape[-2]
    if full_matrices and not square_ and x.requires_grad and recording():
        raise TypeError("linalg.svd: give full_matrices=False where a gradient passes")
    full = full_matrices and not square_
    packed = lasting_vjp(_apply(host.svd, x, full=full), [x], _svd_gradient)
    u, s, vh = _parts(packed, host.svd_shapes(x.shape, full))
    return SVDResult(u, real_(s), vh)


def _svd_gradient(g: Tensor, packed: Tensor, x: Tensor) -> list[Tensor]:
    shapes = host.svd_shapes(x.shape, False)
    (to_u, to_s, to_vh), (u, s, vh) = _parts(g, shapes), _parts(packed, shapes)
    apart = _inverse(subtract(square(_row(s)), square(_column(s))))
    left, right = matmul(u.mT, to_u), matmul(vh, to_vh.mT)
    of_u = multiply(multiply(apart, subtract(left, left.mT)), _row(s))
    of_v = multiply(_column(s), multiply(apart, subtract(right, right.mT)))
    eye_k = eye(s.shape[-1], dtype=x.dtype, device=x.device)
    inner = add(add(of_u, of_v), multiply(_column(to_s), eye_k))
    whole = matmul(matmul(u, inner), vh)
    inverse = _inverse(s)
    if x.shape[-2] > x.shape[-1]:
        outside = subtract(to_u, matmul(u, left))
        whole = add(whole, matmul(multiply(outside, _row(inverse)), vh))
    if x.shape[-1] > x.shape[-2]:
        outside = subtract(to_vh, matmul(right.mT, vh))
        whole = add(whole, matmul(multiply(u, _row(inverse)), outside))
    return [whole]


@of_tensor
def svdvals(x: Tensor, /) -> Tensor:
    """The singular values in descending order.

    >>> ps.linalg.svdvals(ps.asarray([[3.0, 0.0], [0.0, 4.0]])).tolist()
    [4.0, 3.0]
    """
    return svd(x, full_matrices=False).S


@of_tensor
def pinv(x: Tensor, /, *, rtol: Any = None) -> Tensor:
    """The Moore-Penrose inverses; singular values up to `rtol` times the greatest count as 0.

    >>> ps.linalg.pinv(ps.ones((3, 2))).shape
    (2, 3)
    """
    check_matrices("pinv", x)
    u, s, vh = svd(x.detach(), full_matrices=False)
    if not s.size:
        return _adjoint(x)
    limit = multiply(max_(s, axis=-1, keepdims=True), _column(relative_tolerance(x, rtol)))
    inverse = where(greater(s, limit), _inverse(s), 0.0)
    value = matmul(multiply(_adjoint(vh), _row(astype(inverse, x.dtype))), _adjoint(u))
    return lasting_vjp(value, [x], _pinv_gradient)


def relative_tolerance(x: Tensor, rtol: Any) -> Tensor:
    """A tolerance for the singular values of each matrix."""
    if rtol is None:
        rtol = max(x.shape[-2:]) * float(dtypes.limits(host.real_of(x.dtype)).eps)
    if not isinstance(rtol, Tensor):
        rtol = asarray(rtol, dtype=host.real_of(x.dtype), device=x.device)
    return broadcast(astype(rtol, host.real_of(x.dtype)), x.shape[:-2])


def _pinv_gradient(g: Tensor, p: Tensor, x: Tensor) -> list[Tensor]:
    pt, gt = p.mT, g.mT
    rows = subtract(matmul(gt, matmul(p, pt)), matmul(x, matmul(p, matmul(gt, matmul(p, pt)))))
    columns = matmul(matmul(pt, p), subtract(gt, matmul(matmul(gt, p), x)))
    return [add(subtract(rows, matmul(matmul(pt, g), pt)), columns)]
