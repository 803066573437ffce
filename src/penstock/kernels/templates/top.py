"""The first items of sorted rows, on a CPU: few are kept in order, while a row is read once.

Eight or sixteen neighbours are compared with the last of the kept at once. A key comes before another as
described in `sort_rows`; what is kept moves one place back where an item is inserted.
"""

from __future__ import annotations

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Binary, Const, Expr, Type, Var
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import Lowering, Tasks, one_launch
from penstock.kernels.templates.sort_rows import SortedRows


def top_on_cpu(node: Node, capabilities: Capabilities) -> Lowering:
    """The launch that finds the indices of the first items."""
    rows = SortedRows(node, capabilities)
    return one_launch(_top(rows, node.attributes["count"], capabilities))


def _top(rows: SortedRows, count: int, capabilities: Capabilities) -> KernelSource:
    tasks = Tasks(rows.count, capabilities)
    k = KernelBuilder("top_of_rows", capabilities, ["int64"], [rows.dtype])
    keys, places = k.registers("keys", rows.word, count), k.registers("places", "int32", count)
    with tasks.each(k) as row:
        with k.loop("i", 0, count) as i:
            _insert(k, keys, places, rows.key(k, row, i)[0], i, i)
        last = k.variable("last", k.load(keys, count - 1))

        def take(i: Expr) -> None:
            (key,) = rows.key(k, row, i)
            with k.when(key < last):
                _insert(k, keys, places, key, i, Const(count - 1))
                k.assign(last, k.load(keys, count - 1))

        rest: Expr = Const(count)
        if rows.inner == 1 and rows.bytes >= 4:
            width = capabilities.vector_width * 4 // rows.bytes if rows.bytes == 4 else 8
            rest = k.let("rest", count + Const(rows.length - count) // width * width)
            with k.loop("begin", count, rest, width) as begin:
                found = _may_precede(k, rows, row * rows.length + begin, last, width)
                with k.when(found), k.loop("at", begin, begin + width) as at:
                    take(at)
        with k.loop("i", rest, rows.length) as i:
            take(i)
        with k.loop("i", 0, count) as i:
            place = k.let("place", k.load(places, i))
            k.store(k.outputs[0], rows.index_among(row, i, count), place)
    return k.source(tasks.grid, tasks.group)


def _insert(k: KernelBuilder, keys: Memory, places: Memory, key: Expr, place: Expr, end: Expr) -> None:
    """Insert a key and its place before the keys after it, of which the last is at `end` or falls out."""
    j = k.variable("j", end)
    with k.repeat((j > 0) & (k.load(keys, j - 1) > key)):
        for array in (keys, places):
            k.store(array, j, k.load(array, j - 1))
        k.assign(j, j - 1)
    k.store(keys, j, key)
    k.store(places, j, place)


def _may_precede(k: KernelBuilder, rows: SortedRows, index: Expr, last: Var, width: int) -> Expr:
    """Whether any of neighbouring items may come before the last that is kept. All that do are found."""
    word = f"int{8 * rows.bytes}"
    most = Const((1 << 8 * rows.bytes - 1) - 1, Type(word))
    bits = k.let("items", k.load_vector(Memory(k.inputs[0].name, word), index, width))
    ordered: Expr = bits
    if rows.floats:  # as integers, but for zeros and NaNs
        shift = k.broadcast(Const(8 * rows.bytes - 1, Type(word)), width)
        ordered = bits ^ (Binary(">>", bits, shift) & k.broadcast(most, width))
    elif rows.unsigned:
        ordered = bits ^ -1 ^ k.broadcast(most, width)
    limit = last ^ rows.largest if rows.descending else last
    limit = limit.cast(word) ^ -1 ^ most
    limits = k.broadcast(k.let("limit", limit), width)
    found = k.call("greater" if rows.descending else "less", ordered, limits)
    if rows.floats and rows.descending:
        infinity = 0x7F800000 if rows.bytes == 4 else 0x7FF0000000000000
        sizes = bits & k.broadcast(most, width)
        is_nan = k.call("greater", sizes, k.broadcast(Const(infinity, Type(word)), width))
        found = k.call("logical_or", found, is_nan)
    return k.block_reduce("any_found", "any", k.let("found", found), 1, 1)
