"""The single operations whose kernels are compiled ahead for a CPU, beside those of `ahead_operations`.

Kernels for a CPU differ in whether rows end with a partial vector, and those of sums and products in how rows
are divided. All else that differs are sizes, which are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from penstock.execution.ahead_operations import array, moves, sorts
from penstock.graph.contraction import gather, matmul
from penstock.graph.dtypes import HALF_PRECISION, bool_, float32, int32, int64, uint64
from penstock.graph.elementwise import cast
from penstock.graph.node import Node, Shape, placeholder
from penstock.graph.reducing import (
    any_,
    argmax,
    argmin,
    max_,
    min_,
    sort,
    sum_,
)
from penstock.graph.shaping import permute

# A pair of lengths for each way to reduce a row: short and long rows, with and without a remainder after the
# last 32 and the last 8 items.
ROWS = ((3, 5), (16, 40), (19, 45), (128, 256), (104, 208), (99, 165), (107, 213))
ROW_COUNTS = 101, 5000  # reduced by a single task, and shared by several
# Rows, steps and columns of products: one, few, and more than tiles, spans of sums or all cores take at once.
PRODUCTS = (1, 2, 3, 6, 77, 1031), (1, 3, 7, 19, 700, 3001), (1, 2, 3, 7, 77, 1031)
_BATCHED = (1, 2, 5, 77, 300), (3, 19, 64, 700), (1, 2, 6, 77, 300)
_DOTS = (4099, 20000, 65536, 75555, 150000, 200000, 300001, 1000000)  # items of products of vectors
_SQUARES = (1, 2, 3, 4, 5, 7, 8, 12, 32, 40, 77, 300, 1031), (1, 3, 7, 19, 700, 3001)  # rows and steps
# Rows and columns of sums: with and without a remainder after four rows, a block of sums, and a vector.
_COLUMNS = (
    (2, 3, 8, 45, 100, 256, 300, 301, 512, 784, 1000, 1023, 1540, 2048),
    (2, 7, 16, 24, 31, 40, 64, 99, 100, 256, 300, 515, 2048),
)
# Rows of sums, and what is beside each other in them: in vectors, and with a remainder.
_WIDE = ((9, (345, 219)), (7, (301, 105)), (9, (128, 512)), (6, (200, 331)))
# The same of rows that are so long that they are added up in levels.
_LONG = (
    *((4096, 12288), (4128, 12320), (4104, 12296), (4099, 12323), (4107, 12331)),
    *((32768, 40960), (16672, 40032), (16648, 40040), (16643, 40035), (16651, 40043)),
)
_LONG_COUNTS = (5, 8)
# Blocks, rows and columns: long rows and short ones that end with a partial vector, or with a whole one.
_CUBES = (
    *(((11, 101, 203), (19, 211, 307)), ((11, 103, 77), (19, 209, 107))),
    *(((8, 112, 160), (24, 176, 320)), ((8, 104, 88), (24, 168, 104))),
)
_SORTED = ((101, 103), (211, 307)), ((104, 96), (168, 320))
_SUMS, _MATRICES = (
    (ROWS, ROW_COUNTS, _LONG, _LONG_COUNTS, _COLUMNS, _WIDE),
    (PRODUCTS, _BATCHED, _DOTS, _SQUARES),
)
LIST = _SUMS, _MATRICES, _CUBES, _SORTED, 2  # counts what else changed


def cpu_operations() -> Iterator[Sequence[Node]]:
    """Operations, those together whose kernels differ in sizes only."""
    for pair in ROWS:
        yield from zip(*map(reductions, ROW_COUNTS, pair), strict=True)
        yield [any_(array((1, columns), bool_), (1,)) for columns in pair]
        yield [max_(array((1, columns), uint64), (1,)) for columns in pair]  # by which indices are checked
    for pair in _LONG:
        yield [sum_(array(shape), (1,)) for shape in zip(_LONG_COUNTS, pair, strict=True)]
    for reduce in (sum_, max_, min_):
        yield [reduce(array(shape), (0,)) for shape in product(*_COLUMNS)]
        numbered = [*enumerate(product(*_COLUMNS), 11)]
        yield [reduce(array((at, *shape)), (1,)) for at, shape in numbered]
        yield [reduce(array((rows, at, columns)), (0,)) for at, (rows, columns) in numbered]
        yield [reduce(array((rows, *shape)), (0,)) for rows, shape in _WIDE]
    yield [node for sizes in product(*PRODUCTS) for node in products(*sizes)]
    yield [node for steps in _DOTS for node in products(1, steps, 1)]
    batched = [*enumerate(product(*_BATCHED), 2)]
    yield [node for at, sizes in batched for node in products(*sizes, batch=(at,))]
    yield [node for at, sizes in batched for node in products(*sizes, batch=(at % 7 + 2, at % 5 + 2))]
    yield [node for sizes in product(*_SQUARES) for node in squares(*sizes)]
    for first, second in _CUBES:
        yield from zip(moves(*first), moves(*second), strict=True)
        yield from zip(_halves(*first), _halves(*second), strict=True)
    for one, other in _SORTED:
        yield from zip(sorts(*one), sorts(*other), strict=True)
        yield from zip(_single_rows(*one), _single_rows(*other), strict=True)


def _halves(_: int, rows: int, columns: int) -> Iterator[Node]:
    """What 16-bit floats need beside the operations of float32."""
    for dtype in HALF_PRECISION:
        for shape in ((rows, columns), ()):
            yield cast(array(shape, dtype), float32)
            yield cast(array(shape), dtype)
        yield gather(array((rows, columns), dtype), array((rows + 1,), int64))
        yield gather(array((rows * columns,), dtype), array((rows,), int32))


def _single_rows(rows: int, columns: int) -> Iterator[Node]:
    """What a CPU does in another way for a single row, and for short ones."""
    for descending in (False, True):
        yield sort(array((rows * columns,)), 0, descending)
    for find in (argmax, argmin):
        yield find(array((rows, 5 + columns % 2)), 1)


def reductions(rows: int, columns: int) -> Iterator[Node]:
    """The reductions of rows with so many items, and of whole arrays."""
    parts = 8 if rows % 2 else 6  # of a long array, which is first reduced in rows of that kind
    for reduce in (sum_, max_, min_):
        yield reduce(placeholder((rows, columns), float32), (1,))
        yield reduce(placeholder((columns,), float32), (0,))
        yield reduce(placeholder((parts * (2048 + columns),), float32), (0,))


def products(rows: int, steps: int, columns: int, batch: Shape = ()) -> Iterator[Node]:
    """Products of two matrices, or of batches of them, of which one may be transposed."""
    turned = (*range(len(batch)), len(batch) + 1, len(batch))
    left, right = array((*batch, rows, steps)), array((*batch, steps, columns))
    yield matmul(left, right)
    yield matmul(left, permute(array((*batch, columns, steps)), turned))
    yield matmul(permute(array((*batch, steps, rows)), turned), right)


def squares(rows: int, steps: int) -> Iterator[Node]:
    """Products of a matrix and its transpose."""
    left, right = placeholder((rows, steps), float32), placeholder((steps, rows), float32)
    yield matmul(left, permute(left, (1, 0)))
    yield matmul(permute(right, (1, 0)), right)
