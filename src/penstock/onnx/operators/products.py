"""Products of matrices."""

from __future__ import annotations

import penstock as ps
from penstock.onnx.registry import Call, operator


@operator("MatMul")
def matmul(call: Call, x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
    """The product of the matrices in the last two axes."""
    return ps.matmul(x, y)


@operator("Gemm")
def gemm(call: Call, a: ps.Tensor, b: ps.Tensor, c: ps.Tensor | None = None) -> ps.Tensor:
    """`alpha` times the product of two matrices, either transposed, plus `beta` times a third."""
    left = a.mT if call.get("transA", 0) else a
    right = b.mT if call.get("transB", 0) else b
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    product = left @ right if alpha == 1 else alpha * (left @ right)
    if c is not None and beta != 0:
        product = product + (c if beta == 1 else beta * c)
    return ps.astype(product, a.dtype)


@operator("Einsum", since=12)
def einsum(call: Call, *operands: ps.Tensor) -> ps.Tensor:
    """The sum of products over named axes."""
    return ps.einsum(call.get("equation").replace(" ", ""), *operands)


@operator("Det", since=11)
def det(call: Call, x: ps.Tensor) -> ps.Tensor:
    """The determinants of the matrices in the last two axes."""
    return ps.linalg.det(x)
