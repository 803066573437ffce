"""The single operations whose kernels are compiled ahead for a GPU.

Their kernels take sizes as arguments, and where the order of sums depends on them, the number of threads that
share a sum, too. So a few shapes of each show all that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from penstock.graph import elementwise as ops
from penstock.graph.contraction import matmul
from penstock.graph.dtypes import bool_, float32, int32, int64
from penstock.graph.elementwise import PRIMITIVES, cast, like
from penstock.graph.node import DType, Node, Shape, placeholder
from penstock.graph.reducing import BLOCK, all_, any_, argmin, expand, max_, min_, prod, sum_
from penstock.graph.shaping import concat, permute, slice_

_NEIGHBOURS = (1, 2, 4)  # that a thread takes of a row
_MANY_THREADS = (256, 512, 1024)  # of a workgroup that has a row
_FEW_THREADS = (2, 4, 8, 16, 32, 64, 128)  # where a workgroup has several rows
_LONG_THREADS = 512  # of a workgroup that has a very long row
_PARTS = (2, 4, 8, 16, 32, 64, 128, 256)  # of a column
_WIDE_PARTS = 16  # the same where there are many columns
_INNER = (3, 7, 11, 14, 20, 27, 40, 50, 100, 120, 200, 700)  # steps of products: two for each division
_OF_INTEGERS = (
    *("add", "subtract", "multiply", "floor_divide", "remainder", "maximum", "minimum"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
)
_PERMUTATIONS = ((0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1, 3), (2, 1, 0, 3), (0, 3, 2, 1))
LIST = _NEIGHBOURS, _MANY_THREADS, _FEW_THREADS, _PARTS, _INNER, _OF_INTEGERS, _PERMUTATIONS, 1


def gpu_operations() -> Iterator[Sequence[Node]]:
    """Operations, those together whose kernels differ in sizes only."""
    for pair in zip(_integers(101, 103), _integers(211, 307), strict=True):
        yield pair
    for pair in zip(_views(11, 13, 17), _views(19, 23, 29), strict=True):
        yield pair
    yield from _sums_of_rows()
    yield from _sums_of_columns()
    for reduce in (max_, min_, any_, all_):
        yield from _in_any_order(reduce(_array((2, 2), bool_ if reduce in (any_, all_) else float32), (1,)))
    yield from _in_any_order(sum_(_array((2, 2), int64), (1,)))
    yield [node for sizes in product((2, 3, 77), _INNER, (2, 3, 77)) for node in _products(*sizes)]
    yield [node for sizes in product((2, 3, 77), _INNER) for node in _squares(*sizes)]


def _array(shape: Shape, dtype: DType = float32) -> Node:
    return placeholder(shape, dtype)


def _integers(rows: int, columns: int) -> Iterator[Node]:
    """Operations on integers and truth values."""
    truths = _array((rows, columns), bool_)
    for dtype, shape in ((float32, ()), *product((float32, int32, int64), [truths.shape])):
        x, y = _array(shape, dtype), _array(shape, dtype)
        for yes, no in ((x, y), (x, like(x, 2)), (like(x, 2), x), (like(x, 2), like(x, 3))):
            yield ops.where(_array(shape, bool_), yes, no)
    for dtype in (int32, int64):
        x, y = _array((rows, columns), dtype), _array((rows, columns), dtype)
        for name in _OF_INTEGERS:
            yield Node(PRIMITIVES[name], (x, y), {})
            yield Node(PRIMITIVES[name], (x, like(x, 2)), {})
        yield cast(truths, dtype)
    yield cast(_array((rows, columns), int32), int64)
    yield cast(_array((rows, columns), int64), int32)
    yield ops.logical_or(truths, _array((rows, columns), bool_))
    yield argmin(_array((rows, columns)), 1)


def _views(blocks: int, rows: int, columns: int) -> Iterator[Node]:
    """Copies of arrays of two to four axes."""
    lengths = blocks, rows, columns, rows + columns
    yield permute(_array((rows, columns)), (1, 0))
    for order in _PERMUTATIONS:
        yield permute(_array(lengths[: len(order)]), order)
    whole = lengths[:3]
    for shape in ((1, rows, 1), (blocks, 1, columns), (blocks, rows, 1)):
        yield expand(_array(shape), whole)
    x, step = _array((rows, columns)), blocks // 5
    for first, start, apart in product((0, blocks - 8), (0, rows - 8), (1, step)):
        taken = (columns - start) // apart - (not start)
        yield slice_(x, ((first, rows - blocks, 1), (start, taken, apart)))
    yield slice_(x, ((0, rows, 1), (blocks - 8, 1, 1)))
    yield slice_(x, ((blocks - 8, rows - blocks, 1), (0, columns, 1)))
    for start in (0, blocks - 8):
        yield slice_(_array((columns,)), ((start, columns // 4, step),))
        yield slice_(_array(whole), ((0, blocks, 1), (start, rows - blocks, 1), (0, columns, 1)))
        yield slice_(_array(whole), ((0, blocks, 1), (start, rows - blocks, 1), (start, columns - rows, 1)))
    yield slice_(_array((columns,)), ((columns - 1, columns, -1),))
    yield concat([x, _array((rows, blocks))], 1)
    yield concat([_array((columns,)), _array((rows,))], 0)


def _ordered(reduction: Node, order: tuple[int, ...]) -> Node:
    return Node(reduction.primitive, reduction.inputs, {**reduction.attributes, "order": order})


def _sums_of_rows() -> Iterator[Sequence[Node]]:
    """Sums and products of rows and of whole arrays, in all orders that fused kernels have."""
    for reduce, lanes in product((sum_, prod), _NEIGHBOURS):
        for threads in (_FEW_THREADS, (1,), *((count,) for count in _MANY_THREADS)):
            sizes = [
                (rows, lanes * more * (count + 1), (count, lanes))
                for count in threads
                for rows, more in ((101, 2), (211, 3))
            ]
            yield [_ordered(reduce(_array((r, columns)), (1,)), order) for r, columns, order in sizes]
            yield [_ordered(reduce(_array((columns,)), (0,)), order) for _, columns, order in sizes]
        # Rows that are added up in blocks: so many that they are not divided.
        long = _LONG_THREADS * (BLOCK + 1) * lanes
        order = _LONG_THREADS, lanes
        yield [_ordered(reduce(_array((1100 + more, long * more)), (1,)), order) for more in (2, 3)]


def _sums_of_columns() -> Iterator[Sequence[Node]]:
    for parts in (_PARTS, (1,)):
        sizes = [(count + more, 101 * more, (count,)) for count in parts for more in (2, 3)]
        yield [_ordered(sum_(_array((rows, columns)), (0,)), order) for rows, columns, order in sizes]
        yield [_ordered(sum_(_array((11, rows, columns)), (1,)), order) for rows, columns, order in sizes]
        alone = [(rows, columns, (count, 1)) for rows, columns, (count,) in sizes]
        yield [_ordered(sum_(_array((11, rows, columns)), (1,)), order) for rows, columns, order in alone]
        # In blocks: so many columns that they are not divided.
        wide = [
            (count * (BLOCK + more), 140_000 + more, (count,))
            for count in parts
            if count <= _WIDE_PARTS
            for more in (2, 3)
        ]
        yield [_ordered(sum_(_array((rows, columns)), (0,)), order) for rows, columns, order in wide]


def _in_any_order(reduction: Node) -> Iterable[Sequence[Node]]:
    """A reduction whose bits do not depend on its order: of short and long rows, of arrays, of columns."""

    def of(shape: Shape, axis: int) -> Node:
        return Node(reduction.primitive, (_array(shape, reduction.inputs[0].dtype),), {"axes": (axis,)})

    for lengths in ((103, 307), (2051, 4099)):
        yield [of((rows, columns), 1) for rows, columns in zip((101, 211), lengths, strict=True)]
        yield [of((columns,), 0) for columns in lengths]
    columns = (101, 103), (211, 307), (50, 3), (7, 2000), (3, 1501)
    yield [of(shape, 0) for shape in columns]
    yield [of((5 + at, *shape), 1) for at, shape in enumerate(columns)]


def _products(rows: int, steps: int, columns: int) -> Iterator[Node]:
    """Products of small matrices, and of several of them, of which one may be transposed."""
    for batch in ((), (rows + 3,)):
        last = len(batch), len(batch) + 1
        turned = (*range(len(batch)), *reversed(last))
        left, right = _array((*batch, rows, steps)), _array((*batch, steps, columns))
        yield matmul(left, right)
        yield matmul(left, permute(_array((*batch, columns, steps)), turned))
        yield matmul(permute(_array((*batch, steps, rows)), turned), right)


def _squares(rows: int, steps: int) -> Iterator[Node]:
    """Products of a matrix and its transpose."""
    left, right = _array((rows, steps)), _array((steps, rows))
    yield matmul(left, permute(left, (1, 0)))
    yield matmul(permute(right, (1, 0)), right)
