"""The single operations whose kernels are compiled ahead on every device; see `ahead_cpu` and `ahead_gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from penstock.graph import elementwise as ops
from penstock.graph import random
from penstock.graph.contraction import gather
from penstock.graph.creating import sequence
from penstock.graph.dtypes import HALF_PRECISION, bool_, float16, float32, int32, int64, uint32, uint64
from penstock.graph.elementwise import PRIMITIVES, cast, full, like
from penstock.graph.node import DType, Node, Shape, placeholder
from penstock.graph.reducing import any_, argmax, argmin, argsort, cumulative_sum, expand, sort
from penstock.graph.shaping import concat, pad, slice_at

_UNARY = (
    *("negative", "abs", "sign", "floor", "ceil", "round", "exp", "expm1", "log", "log1p", "sqrt"),
    *("sin", "cos", "tanh", "isnan", "isinf", "isfinite"),
)
_BINARY = ("add", "subtract", "multiply", "divide", "pow", "maximum", "minimum")
_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_OF_NUMBERS = ("subtract", "multiply", "divide", "equal")  # which gradients have of two constants
_CASTS = (
    *((int64, float32), (int32, float32), (uint32, int64)),
    *((int64, int32), (int32, int64), (int64, uint64)),
)
_OF_INTEGERS = (
    *("add", "subtract", "multiply", "floor_divide", "remainder", "maximum", "minimum"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
)
LIST = _UNARY, _BINARY, _COMPARISONS, _OF_NUMBERS, _CASTS, _OF_INTEGERS, 3  # counts what else changed


def array(shape: Shape, dtype: DType = float32) -> Node:
    """An input."""
    return placeholder(shape, dtype)


def operations(rows: int, columns: int) -> Iterator[Node]:
    """Those of floating point, on matrices of this shape, vectors, and single values."""
    shape = rows, columns
    x, y, truths = array(shape), array(shape), array(shape, bool_)
    for value in (x, array(())):
        yield from _elementwise(value, array(value.shape))
    for name in ("add", "multiply", "equal", "not_equal"):
        yield _apply(name, x, x)
    yield ops.where(truths, x, y)
    yield ops.where(truths, x, like(x, 2.5))
    yield ops.where(truths, like(x, 2.5), x)
    yield ops.logical_not(truths)
    yield ops.logical_and(truths, array(shape, bool_))
    yield cast(truths, float32)
    for given, wanted in _CASTS:
        yield cast(array(shape, given), wanted)
    yield argmax(x, 1)
    for dtype in (bool_, float16, float32, int64):  # of each size; their kernels have strides as arguments
        yield expand(array((1, columns), dtype), shape)
    yield slice_at(x, [full((), int32, 3)], ((0, 1, 1), (0, columns, 1)), (0,))
    yield slice_at(x, [full((), int32, 3)], ((0, rows, 1), (0, 1, 1)), (1,))
    yield concat([x, y], 0)
    yield concat([x, y], 1)
    yield gather(x, array((rows + 1,), int64))
    for dtype in (int32, int64):
        numbers = sequence(0, 1, rows * columns, dtype)
        yield numbers
        yield ops.multiply(numbers, like(numbers, 7))
    yield cast(numbers, float32)
    yield any_(array(shape, bool_), (1,))
    state = array((4,), random.WORD)
    yield random.uniform(random.random_bits(state, (*shape, random.UNIFORM_WORDS[float32])), float32)
    yield random.normal(random.random_bits(state, (*shape, random.NORMAL_WORDS[float32])), float32)


def integers(rows: int, columns: int) -> Iterator[Node]:
    """Those of integers and truth values, and choices by these."""
    truths = array((rows, columns), bool_)
    for dtype, shape in ((float32, ()), *product((float32, int32, int64), [truths.shape])):
        x, y = array(shape, dtype), array(shape, dtype)
        for yes, no in ((x, y), (x, like(x, 2)), (like(x, 2), x), (like(x, 2), like(x, 3))):
            yield ops.where(array(shape, bool_), yes, no)
    x, y = array((rows, columns), int32), array((rows, columns), int32)
    for name in ("add", "multiply", "equal"):  # of positions
        yield _apply(name, x, y)
    for dtype in (int32, int64):
        yield cast(truths, dtype)
    x, y = array((rows, columns), int64), array((rows, columns), int64)
    for name in _OF_INTEGERS:
        yield _apply(name, x, y)
        yield _apply(name, x, like(x, 2))
    yield ops.logical_or(truths, array((rows, columns), bool_))
    yield argmin(array((rows, columns)), 1)


def moves(blocks: int, rows: int, columns: int) -> Iterator[Node]:
    """What moves items, but for copies through views."""
    matrix, before, after = array((rows, columns)), 1 + blocks % 5, 1 + blocks % 3
    yield pad(matrix, ((0, rows, 1), (before, columns, 1)), (rows, before + columns + after))
    yield pad(matrix, ((blocks, rows, 1), (0, columns, 1)), (rows + 2 * blocks, columns))
    yield gather(array((rows * columns,)), array((rows,), int32))
    yield gather(array((rows * columns,)), array((rows, blocks), int64))
    for before in (3, blocks):
        yield concat([array((rows, before)), matrix], 1)
    yield concat([array((columns,)), array((rows,))], 0)


def half_precision(rows: int, columns: int) -> Iterator[Node]:
    """What 16-bit floats need beside the operations of float32."""
    for dtype in HALF_PRECISION:
        for shape in ((rows, columns), ()):
            yield cast(array(shape, dtype), float32)
            yield cast(array(shape), dtype)
        yield gather(array((rows, columns), dtype), array((rows + 1,), int64))
        yield gather(array((rows * columns,), dtype), array((rows,), int32))


def sorts(rows: int, columns: int) -> Iterator[Node]:
    """What sorts rows, adds them up item by item, and finds their largest items."""
    x = array((rows, columns))
    for descending in (False, True):
        yield sort(x, 1, descending)
        yield argsort(x, 1, descending)
    for axis in (0, 1):
        yield cumulative_sum(x, axis)
    for dtype in (float32, *HALF_PRECISION):
        for find in (argmax, argmin):
            yield find(array((rows, columns), dtype), 1)


def _elementwise(x: Node, y: Node) -> Iterator[Node]:
    for name in _UNARY:
        yield _apply(name, x)
    for name in (*_BINARY, *_COMPARISONS):
        yield _apply(name, x, y)
        yield _apply(name, x, like(x, 2.5))
    for name in _BINARY:
        yield _apply(name, like(x, 2.5), x)
    for name in _OF_NUMBERS:
        yield _apply(name, like(x, 2.5), like(x, 1.5))


def _apply(name: str, *inputs: Node) -> Node:
    return Node(PRIMITIVES[name], inputs, {})
