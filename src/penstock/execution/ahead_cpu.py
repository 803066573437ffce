"""The single operations whose kernels are compiled ahead for a CPU, beside those of `ahead_operations`.

Kernels for a CPU differ in whether rows end with a partial vector, and those of sums and products in how rows
are divided. All else that differs are sizes, which are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from penstock.execution.ahead_operations import array, half_precision, moves, sorts
from penstock.graph.contraction import matmul
from penstock.graph.convolution import padded
from penstock.graph.dtypes import HALF_PRECISION, bool_, float32, uint64
from penstock.graph.elementwise import erf, full
from penstock.graph.node import Node, Shape, placeholder
from penstock.graph.reducing import (
    any_,
    argmax,
    argmin,
    expand,
    max_,
    min_,
    sort,
    sum_,
)
from penstock.graph.shaping import permute, reshape

# A pair of lengths for each way to reduce a row: short and long rows, with and without a remainder after the
# last 32 and the last 8 items.
ROWS = ((3, 5), (16, 40), (19, 45), (128, 256), (104, 208), (99, 165), (107, 213))
ROW_COUNTS = 101, 5000  # reduced by a single task, and shared by several
# Rows, steps and columns of products: one, few, and more than tiles, spans of sums or all cores take at once.
PRODUCTS = (1, 2, 3, 6, 77, 1031), (1, 3, 7, 19, 700, 3001), (1, 2, 3, 7, 77, 1031)
_BATCHED = (1, 2, 5, 77, 300), (3, 19, 64, 700), (1, 2, 6, 77, 300)
_LONG_SUMS = (6, 3001, 77)  # which are divided in spans
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
# Images and groups of channels; outputs and items of a window of each group, and windows.
_CONVOLVED = (
    ((1, 1), (2, 1), (5, 1), (1, 3), (1, 5), (2, 3), (5, 4)),
    (
        *((1, 5, 3), (3, 27, 6), (2, 700, 3), (3, 27, 77), (1, 5, 1300), (2, 700, 99), (1, 900, 1300)),
        *((6, 5, 3), (77, 27, 6), (9, 700, 3), (6, 27, 77), (77, 5, 1300), (9, 700, 99), (77, 900, 1300)),
    ),
)
_IMAGES = (
    ((2, 5, 20, 33), (3, 7, 31, 45), (5, 3, 17, 29)),
    ((2, 5, 20, 32), (3, 7, 31, 48), (5, 3, 17, 24)),
    ((1, 5, 20, 33), (1, 7, 31, 45), (1, 3, 17, 29)),
    ((1, 5, 20, 32), (1, 7, 31, 48), (1, 3, 17, 24)),
    ((2, 5, 3, 4), (3, 7, 4, 5), (5, 3, 5, 3)),
)
_SORTED = ((101, 103), (211, 307)), ((104, 96), (168, 320))
_SUMS, _MATRICES = (
    (ROWS, ROW_COUNTS, _LONG, _LONG_COUNTS, _COLUMNS, _WIDE),
    (PRODUCTS, _BATCHED, _LONG_SUMS, _DOTS, _SQUARES, _CONVOLVED),
)
LIST = _SUMS, _MATRICES, _CUBES, _IMAGES, _SORTED, 4  # counts what else changed


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
    batched = [*enumerate([*product(*_BATCHED), _LONG_SUMS], 2)]
    yield [node for at, sizes in batched for node in products(*sizes, batch=(at,))]
    yield [node for at, sizes in batched for node in products(*sizes, batch=(at % 7 + 2, at % 5 + 2))]
    yield [node for sizes in product(*_SQUARES) for node in squares(*sizes)]
    for first, second in _CUBES:
        yield from zip(moves(*first), moves(*second), strict=True)
        yield from zip(half_precision(*first[1:]), half_precision(*second[1:]), strict=True)
        yield [erf(array(shape[1:])) for shape in (first, second)]
    yield [node for first, second in product(*_CONVOLVED) for node in _convolved(*first, *second)]
    for several in _IMAGES:
        yield [node for shape in several for node in _padded(*shape)]
        yield [full(shape, float32, 1) for shape in several]
    for one, other in _SORTED:
        yield from zip(sorts(*one), sorts(*other), strict=True)
        yield from zip(_single_rows(*one), _single_rows(*other), strict=True)


def _convolved(images: int, groups: int, outputs: int, inner: int, windows: int) -> Iterator[Node]:
    """The products of convolutions: of weights, which all images have in common, and columns of windows."""
    weights = array((groups, outputs, inner)), permute(array((groups, inner, outputs)), (0, 2, 1))
    for left in weights:
        repeated = expand(reshape(left, (1, groups, outputs, inner)), (images, groups, outputs, inner))
        yield matmul(repeated, array((images, groups, inner, windows)))
    yield matmul(array((images, groups, outputs, inner)), array((images, groups, inner, windows)))
    steps = 3 * outputs * windows  # of the gradient of weights, over the windows of all images
    yield matmul(array((groups, outputs, steps)), array((groups, steps, inner)))


def _padded(*shape: int) -> Iterator[Node]:
    """Images with zeros around them, and what tells these from the images."""
    for pairs in (((1, 1), (1, 1)), ((2, 2), (3, 3)), ((1, 0), (1, 0))):
        yield padded(array(shape), pairs)
        yield padded(full(shape, bool_, True), pairs)


def _single_rows(rows: int, columns: int) -> Iterator[Node]:
    """What a CPU does in another way for a single row, and for short ones."""
    for descending in (False, True):
        yield sort(array((rows * columns,)), 0, descending)
    for dtype in (float32, *HALF_PRECISION):
        for find in (argmax, argmin):
            yield find(array((rows, 5 + columns % 2), dtype), 1)


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
