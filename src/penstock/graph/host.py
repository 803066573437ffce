"""Primitives that only NumPy computes: decompositions of matrices, and Fourier transforms.

Several results of a primitive are packed into a single array, concatenated along its last axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.graph.dtypes import complex64, complex128, float32, float64
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape, same

_REAL = {complex64: float32, complex128: float64}
_COMPLEX = {float32: complex64, float64: complex128}


def real_of(dtype: DType) -> DType:
    """The dtype of real and imaginary parts."""
    return _REAL.get(dtype, dtype)


def complex_of(dtype: DType) -> DType:
    """The complex dtype whose real and imaginary parts have this dtype."""
    return _COMPLEX.get(dtype, dtype)


def _row(name: str, shape_rule: Any, reference: Callable[..., Array]) -> Callable[..., Node]:
    primitive = Primitive(name, Kind.HOST, shape_rule, reference)

    def apply(*inputs: Node, **attributes: Any) -> Node:
        return Node(primitive, inputs, attributes)

    return apply


def packed(parts: Sequence[Array], batch: int) -> Array:
    """Several results concatenated along the last axis; the first `batch` axes stay."""
    rows = [part.reshape(*part.shape[:batch], math.prod(part.shape[batch:])) for part in parts]
    return np.concatenate(rows, axis=-1)


def qr_shapes(shape: Shape, complete: bool) -> tuple[Shape, Shape]:
    """The shapes of Q and R."""
    *batch, m, n = shape
    k = m if complete else min(m, n)
    return (*batch, m, k), (*batch, k, n)


def svd_shapes(shape: Shape, full: bool) -> tuple[Shape, Shape, Shape]:
    """The shapes of U, the singular values, and V transposed."""
    *batch, m, n = shape
    k = min(m, n)
    return (*batch, m, m if full else k), (*batch, k), (*batch, n if full else k, n)


def _packed_shape(x: Node, shapes: Sequence[Shape]) -> tuple[Shape, DType]:
    batch = x.ndim - 2
    return (*x.shape[:batch], sum(math.prod(shape[batch:]) for shape in shapes)), x.dtype


def _eigh_reference(x: Array) -> Array:
    values, vectors = np.linalg.eigh(x)
    return packed([values.astype(x.dtype), vectors], x.ndim - 2)


inv = _row("inv", same, np.linalg.inv)
cholesky = _row("cholesky", same, np.linalg.cholesky)
solve = _row("solve", lambda a, b: (b.shape, b.dtype), np.linalg.solve)
det = _row("det", lambda x: (x.shape[:-2], x.dtype), lambda x: np.asarray(np.linalg.det(x)))
slogdet = _row(
    "slogdet",
    lambda x: ((*x.shape[:-2], 2), x.dtype),
    lambda x: np.stack([part.astype(x.dtype) for part in np.linalg.slogdet(x)], axis=-1),
)
qr = _row(
    "qr",
    lambda x, complete: _packed_shape(x, qr_shapes(x.shape, complete)),
    lambda x, complete: packed(np.linalg.qr(x, "complete" if complete else "reduced"), x.ndim - 2),
)
svd = _row(
    "svd",
    lambda x, full: _packed_shape(x, svd_shapes(x.shape, full)),
    lambda x, full: packed([part.astype(x.dtype) for part in np.linalg.svd(x, full)], x.ndim - 2),
)
eigh = _row("eigh", lambda x: _packed_shape(x, [x.shape[:-1], x.shape]), _eigh_reference)


# Fourier transforms. `lengths` are those that NumPy takes: if the result is real, its lengths.


def _fourier_shape(
    x: Node, *, function: str, lengths: tuple[int, ...], axes: tuple[int, ...], norm: str
) -> tuple[Shape, DType]:
    shape = list(x.shape)
    for axis, length in zip(axes, lengths, strict=True):
        shape[axis] = length
    if function in ("rfftn", "ihfft"):
        shape[axes[-1]] = lengths[-1] // 2 + 1
    real = function in ("irfftn", "hfft")
    return tuple(shape), real_of(x.dtype) if real else complex_of(x.dtype)


def _fourier_reference(
    x: Array, function: str, lengths: tuple[int, ...], axes: tuple[int, ...], norm: str
) -> Array:
    apply: Any = getattr(np.fft, function)
    if function in ("hfft", "ihfft"):
        return np.asarray(apply(x, lengths[0], axes[0], norm))
    return np.asarray(apply(x, lengths, axes, norm))


fourier = _row("fourier", _fourier_shape, _fourier_reference)
