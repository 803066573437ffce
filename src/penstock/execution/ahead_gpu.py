"""The single operations whose kernels are compiled ahead for a GPU.

Their kernels take sizes as arguments, and where the order of sums depends on them, the number of threads that
share a sum, too. So a few shapes of each show all that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from penstock.execution.ahead_operations import array, half_precision, moves, sorts
from penstock.graph.contraction import matmul
from penstock.graph.dtypes import bool_, float32, int64, uint64
from penstock.graph.elementwise import PRIMITIVES, like
from penstock.graph.node import Node, Shape
from penstock.graph.reducing import (
    BLOCK,
    all_,
    any_,
    max_,
    min_,
    prod,
    sum_,
)
from penstock.graph.shaping import permute

_NEIGHBOURS = (1, 2, 4, 8)  # that a thread takes of a row
_MANY_THREADS = (256, 512, 1024)  # of a workgroup that has a row
_FEW_THREADS = (2, 4, 8, 16, 32, 64, 128)  # where a workgroup has several rows
_LONG_THREADS = 512  # of a workgroup that has a very long row
_LONG_ROW = 1 << 14  # items from which on some rows are split
_PARTS = (2, 4, 8, 16, 32, 64, 128, 256)  # of a column
_WIDE_PARTS = 16  # the same where there are many columns
_SORTED = (  # rows of several lengths
    ((101, 7), (211, 11)),
    ((101, 103), (211, 307)),
    ((345, 219), (97, 200)),
    ((97, 600), (230, 801)),
)
_INNER = (3, 7, 11, 14, 20, 27, 40, 50, 100, 120, 200, 700)  # steps of products: two for each division
LIST = _NEIGHBOURS, _MANY_THREADS, _FEW_THREADS, _PARTS, _INNER, _SORTED, 3


def gpu_operations() -> Iterator[Sequence[Node]]:
    """Operations, those together whose kernels differ in sizes only."""
    yield from zip(moves(11, 13, 17), moves(19, 23, 29), strict=True)
    yield from zip(half_precision(11, 13), half_precision(19, 23), strict=True)
    yield from zip(_quick(11, 13), _quick(19, 23), strict=True)
    yield from _sums_of_rows()
    yield from _sums_of_columns()
    for reduce in (max_, min_, any_, all_):
        yield from _in_any_order(reduce(array((2, 2), bool_ if reduce in (any_, all_) else float32), (1,)))
    yield from _in_any_order(sum_(array((2, 2), int64), (1,)))
    yield from _in_any_order(max_(array((2, 2), uint64), (1,)))  # by which indices are checked
    for first, second in _SORTED:
        yield from zip(sorts(*first), sorts(*second), strict=True)
    yield [node for sizes in product((2, 3, 77), _INNER, (2, 3, 77)) for node in _products(*sizes)]
    yield [node for sizes in product((2, 3, 77), _INNER) for node in _squares(*sizes)]


def _quick(rows: int, columns: int) -> Iterator[Node]:
    """The operations in float32 that kernels of 16-bit floats have quick functions for."""
    for shape in ((rows, columns), ()):
        x, number = array(shape), like(array(shape), 2.5)
        yield Node(PRIMITIVES["exp"], (x,), {"quick": True})
        for pair in ((x, array(shape)), (x, number), (number, x), (number, like(x, 1.5))):
            yield Node(PRIMITIVES["divide"], pair, {"quick": True})


def _ordered(reduction: Node, order: tuple[int, ...]) -> Node:
    return Node(reduction.primitive, reduction.inputs, {**reduction.attributes, "order": order})


def _columns(threads: int, lanes: int, more: int) -> int:
    """The items of a row that so many threads share: in several turns, unless such rows would be split."""
    columns = lanes * more * (threads + 1)
    return columns if columns < _LONG_ROW else lanes * (threads - more)


def _sums_of_rows() -> Iterator[Sequence[Node]]:
    """Sums and products of rows and of whole arrays, in all orders that fused kernels have."""
    for reduce, lanes in product((sum_, prod), _NEIGHBOURS):
        for threads in (_FEW_THREADS, (1,), *((count,) for count in _MANY_THREADS)):
            sizes = [
                (rows, _columns(count, lanes, more), (count, lanes))
                for count in threads
                for rows, more in ((101, 2), (211, 3))
            ]
            yield [_ordered(reduce(array((r, columns)), (1,)), order) for r, columns, order in sizes]
            yield [_ordered(reduce(array((columns,)), (0,)), order) for _, columns, order in sizes]
        # Rows that are added up in blocks: so many that they are not divided.
        long = _LONG_THREADS * (BLOCK + 1) * lanes
        order = _LONG_THREADS, lanes
        yield [_ordered(reduce(array((1100 + more, long * more)), (1,)), order) for more in (2, 3)]


def _sums_of_columns() -> Iterator[Sequence[Node]]:
    for parts in (_PARTS, (1,)):
        sizes = [(count + more, 101 * more, (count,)) for count in parts for more in (2, 3)]
        yield [_ordered(sum_(array((rows, columns)), (0,)), order) for rows, columns, order in sizes]
        yield [_ordered(sum_(array((11, rows, columns)), (1,)), order) for rows, columns, order in sizes]
        alone = [(rows, columns, (count, 1)) for rows, columns, (count,) in sizes]
        yield [_ordered(sum_(array((11, rows, columns)), (1,)), order) for rows, columns, order in alone]
        # In blocks: so many columns that they are not divided.
        wide = [
            (count * (BLOCK + more), 140_000 + more, (count,))
            for count in parts
            if count <= _WIDE_PARTS
            for more in (2, 3)
        ]
        yield [_ordered(sum_(array((rows, columns)), (0,)), order) for rows, columns, order in wide]


def _in_any_order(reduction: Node) -> Iterable[Sequence[Node]]:
    """A reduction whose bits do not depend on its order: of short and long rows, of arrays, of columns."""

    def of(shape: Shape, axis: int) -> Node:
        return Node(reduction.primitive, (array(shape, reduction.inputs[0].dtype),), {"axes": (axis,)})

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
        left, right = array((*batch, rows, steps)), array((*batch, steps, columns))
        yield matmul(left, right)
        yield matmul(left, permute(array((*batch, columns, steps)), turned))
        yield matmul(permute(array((*batch, steps, rows)), turned), right)


def _squares(rows: int, steps: int) -> Iterator[Node]:
    """Products of a matrix and its transpose."""
    left, right = array((rows, steps)), array((steps, rows))
    yield matmul(left, permute(left, (1, 0)))
    yield matmul(permute(right, (1, 0)), right)
