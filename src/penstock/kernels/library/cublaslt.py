"""Matrix products through cuBLASLt: a launch per problem, whose descriptors are made once.

Of the library's epilogues, only the bias is used. Measured on an H200 in bfloat16, for 4096 rows of a GPT of
width 384 and 16384 rows of width 768: a residual, instead of in the kernel of the following norm, makes +0.5
and -5 us; GELU with what its gradient needs, instead of in a memory-bound map, -0.6 and -1 us; the gradient
of a bias takes 6 and 36 us, as column sums do. Besides, GELU could only be recognised by its constants, which
are arguments of a program.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.drivers.driver import Capabilities, Driver
from penstock.fusion.groups import Group
from penstock.fusion.products import Matrix, bias_vector, laid_out, library_operand
from penstock.graph.dtypes import checked, float32
from penstock.graph.node import Array, Node
from penstock.kernels.source import ALIGNMENT, KernelSource
from penstock.kernels.templates.launches import Lowering, one_launch

_DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType_t
# Bytes that an algorithm may use, for parts of long sums. On an H200, the gradients of weights take up to 8%
# longer with 4 MiB, and nothing is faster with 32 MiB.
WORKSPACE = 16 << 20


@dataclass(frozen=True)
class Product:
    """`batch` products left @ right, of `rows` x `columns` items each, in row-major order."""

    batch: int
    rows: int
    columns: int
    inner: int
    left: Matrix
    right: Matrix
    dtype: str
    bias: bool = False  # a vector of `columns` items is added to every row
    tf32: bool = False  # float32 is rounded to 10 bits of fraction before it is multiplied
    # Items from a row of the result to the next; 0: `columns`. The same algorithms are the best for it.
    leading: int = field(default=0, repr=False)

    def nbytes(self, buffer: str) -> int:
        """The bytes of one of its buffers."""
        if buffer == "workspace":
            return WORKSPACE
        items = self.columns if buffer == "bias" else self.batch * self.rows * (self.leading or self.columns)
        if buffer in ("left", "right"):
            matrix = self.left if buffer == "left" else self.right
            items = matrix.extent + (self.batch - 1) * matrix.batch_stride
        return items * checked(self.dtype).itemsize


def library_launch(group: Group, product: Node, capabilities: Capabilities, name: str) -> Lowering:
    """The launch of a product with an optional bias, which also takes a workspace."""
    problem, operands = library_problem(group, product, capabilities)
    nodes = (*group.outputs, *group.inputs)
    dtypes = (*(str(node.dtype) for node in nodes), "uint8")
    buffers = {"out": 0, "workspace": len(nodes)}
    buffers |= {operand: nodes.index(node) for operand, node in operands.items()}
    lowering = one_launch(KernelSource(name, "", dtypes, (), (1,), (1,)))
    return replace(lowering, scratch=(WORKSPACE,), function=LibraryLaunch(problem, buffers, len(dtypes)))


def library_problem(
    group: Group, product: Node, capabilities: Capabilities
) -> tuple[Product, dict[str, Node]]:
    """A product with its bias in the library's terms, and the inputs that its operands are views of."""
    left, right = (library_operand(operand, group.inputs) for operand in product.inputs)
    assert left is not None  # other layouts were copied before
    assert right is not None
    operands = {"left": left[0], "right": right[0]}
    (output,) = group.outputs
    if output is not product:
        vectors = (bias_vector(operand, product.shape[-1], group.inputs) for operand in output.inputs)
        operands["bias"] = next(vector for vector in vectors if vector in group.inputs)
    problem = Product(
        batch=math.prod(product.shape[:-2]),
        rows=product.shape[-2],
        columns=product.shape[-1],
        inner=product.inputs[0].shape[-1],
        left=left[1],
        right=right[1],
        dtype=str(product.dtype),
        bias=output is not product,
        tf32=capabilities.tf32 and product.dtype is float32,
    )
    return problem, operands


def joined_launch(node: Node) -> Lowering:
    """The launch of products of the same rows with several matrices, which also takes a workspace."""
    x, *weights = node.inputs
    launch = JoinedLaunch(x.shape, [weight.shape[0] for weight in weights], str(node.dtype))
    dtypes = (*(str(value.dtype) for value in (node, *node.inputs)), "uint8")
    lowering = one_launch(KernelSource("matmul_joined", "", dtypes, (), (1,), (1,)))
    return replace(lowering, scratch=(WORKSPACE,), function=launch)


class LibraryLaunch:
    """A problem that can be enqueued with any memory, once it is prepared."""

    def __init__(self, product: Product, buffers: Mapping[str, int], count: int) -> None:
        """`buffers`: the indices of `out`, `left`, `right`, `workspace` and, if any, `bias` among `count`."""
        self.product = product
        self.buffers = dict(buffers)
        self._count = count

    def prepare(self, driver: Driver) -> None:
        """Choose the algorithm, by measurement if no choice is cached, and load its kernels."""
        # NVIDIA's packages are installed only with CUDA devices, and slow to import.
        from nvmath.bindings import cublasLt

        from penstock.kernels.library.cublaslt_tuning import tune

        self.descriptors = Descriptors(self.product)
        self._matmul = cublasLt.matmul
        self._bias = 0  # the address that is set
        self.workspace = tune(self, driver)  # bytes in use

    def use(self, handle: int, algorithm: Array) -> None:
        """Set the algorithm, in the library's opaque bytes."""
        size = checked(self.product.dtype).itemsize
        skipped = {"left": self.product.left.offset * size, "right": self.product.right.offset * size}
        order = ("right", "left", "out", "workspace", *(["bias"] if self.product.bias else []))
        at = self.buffers
        self._at = [(at[name], self._count + at[name], skipped.get(name, 0)) for name in order]
        self._handle = handle
        self.algorithm = algorithm
        self._algorithm_address = algorithm.ctypes.data

    def __call__(self, stream: int, *args: int) -> None:
        """Enqueue on a stream: `args` are the buffers' addresses, then their offsets in `ALIGNMENT`s."""
        right, left, out, workspace, *bias = [args[n] + ALIGNMENT * args[p] + more for n, p, more in self._at]
        of = self.descriptors
        if bias and bias[0] != self._bias:
            of.set_bias(bias[0])
            self._bias = bias[0]
        operands = of.alpha, right, of.right, left, of.left, of.beta, out, of.out, out, of.out
        chosen = self._algorithm_address, workspace, WORKSPACE, stream
        self._matmul(self._handle, of.operation, *operands, *chosen)


class JoinedLaunch:
    """Products of the same rows with several matrices, whose results are columns of one.

    Where the matrices lie one after another in an allocation, they are a single product; else one by one. If
    allocations happen to adjoin, that counts for nothing: bits must not depend on it.
    """

    def __init__(self, shape: Sequence[int], columns: Sequence[int], dtype: str) -> None:
        """`shape`: of the rows; `columns`: of each matrix."""
        (rows, inner), total = shape, sum(columns)
        self._columns, self._item = columns, checked(dtype).itemsize
        left = laid_out(rows, inner, inner, 1)
        buffers = {"out": 0, "left": 1, "right": 2, "workspace": 3}

        def product(count: int) -> LibraryLaunch:
            right = laid_out(inner, count, 1, inner)
            assert left is not None
            assert right is not None
            return LibraryLaunch(
                Product(1, rows, count, inner, left, right, dtype, leading=total), buffers, 4
            )

        self._all = product(total)
        self._each = {count: product(count) for count in columns}

    def prepare(self, driver: Driver) -> None:
        """Choose the algorithms, and load their kernels."""
        from penstock.kernels.library.cublaslt_tuning import allocation_of

        self._allocation_of = allocation_of
        products = [self._all, *self._each.values()]
        for product in products:
            product.prepare(driver)
        self.workspace = max(product.workspace for product in products)

    def __call__(self, stream: int, *args: int) -> None:
        """See `LibraryLaunch`."""
        count = len(args) // 2
        addresses = [args[at] + ALIGNMENT * args[count + at] for at in range(count)]
        out, left, *matrices, workspace = addresses
        sizes = [columns * self._all.product.inner * self._item for columns in self._columns]
        ends = [start + size for start, size in zip(matrices, sizes, strict=True)]
        adjoin = ends[:-1] == matrices[1:]
        if adjoin and self._allocation_of(matrices[0]) == self._allocation_of(matrices[-1]):
            self._all(stream, out, left, matrices[0], workspace, 0, 0, 0, 0)
            return
        for columns, matrix in zip(self._columns, matrices, strict=True):
            self._each[columns](stream, out, left, matrix, workspace, 0, 0, 0, 0)
            out += columns * self._item


class Descriptors:
    """The library's descriptors of a problem, in host memory that is freed with this object."""

    def __init__(self, product: Product) -> None:
        from nvmath.bindings import cublas, cublasLt

        compute, epilogue, attribute = cublas.ComputeType, cublasLt.Epilogue, cublasLt.MatmulDescAttribute
        kind = compute.COMPUTE_64F if product.dtype == "float64" else compute.COMPUTE_32F
        if product.tf32:
            kind = compute.COMPUTE_32F_FAST_TF32
        scale = "float64" if product.dtype == "float64" else "float32"
        self._scale = np.array([1, 0], scale)  # alpha and beta
        self.alpha: int = self._scale.ctypes.data
        self.beta = self.alpha + self._scale.itemsize
        self.operation: int = cublasLt.matmul_desc_create(int(kind), _DATA_TYPES[scale])
        weakref.finalize(self, cublasLt.matmul_desc_destroy, self.operation)
        values = {
            attribute.TRANSA: product.right.transposed,
            attribute.TRANSB: product.left.transposed,
            attribute.EPILOGUE: epilogue.BIAS if product.bias else epilogue.DEFAULT,
        }
        for which, value in values.items():
            self._set(which, np.array([value], np.int32))
        rows, columns = product.rows, product.columns
        result = Matrix(columns, rows, product.leading or columns, False, rows * columns, 0)
        self.left, self.right, self.out = (
            _layout(self, matrix, product) for matrix in (product.left, product.right, result)
        )

    def set_bias(self, address: int) -> None:
        """Set the address of the bias."""
        from nvmath.bindings import cublasLt

        self._set(cublasLt.MatmulDescAttribute.BIAS_POINTER, np.array([address], np.int64))

    def _set(self, attribute: Any, value: Array) -> None:
        from nvmath.bindings import cublasLt

        cublasLt.matmul_desc_set_attribute(self.operation, int(attribute), value.ctypes.data, value.nbytes)


def _layout(owner: Descriptors, matrix: Matrix, product: Product) -> int:
    from nvmath.bindings import cublasLt

    dtype, attribute = _DATA_TYPES[product.dtype], cublasLt.MatrixLayoutAttribute
    layout: int = cublasLt.matrix_layout_create(dtype, matrix.rows, matrix.columns, matrix.leading)
    weakref.finalize(owner, cublasLt.matrix_layout_destroy, layout)
    count, stride = np.array([product.batch], np.int32), np.array([matrix.batch_stride], np.int64)
    for which, value in ((attribute.BATCH_COUNT, count), (attribute.STRIDED_BATCH_OFFSET, stride)):
        cublasLt.matrix_layout_set_attribute(layout, int(which), value.ctypes.data, value.nbytes)
    return layout
