"""Sorting on a CPU: a radix sort of row after row, and a bitonic network of 8 or 16 rows at a time.

In the radix sort a pair is an integer of 64 bits, with the index in the upper half and the key in the lower
half. A key of 64 bits is followed by the index.

In the network a vector has an item of each of these rows, so two instructions order as many pairs. It sorts
the items without their indices. Nothing tells equal items apart, except for NaNs and zeros of both signs;
so rows that have a NaN or a -0 are sorted by radix.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import BOOL, Binary, Const, Expr, Operand, Var
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import CPU_SHARES, Launch, Lowering
from penstock.kernels.templates.sort_rows import SortedRows
from penstock.kernels.transposing import transposed

_DIGITS = 256  # values of a digit, which is a byte
_ROWS = 8  # that a network sorts at a time, at least: the width of vectors
_BITS = 4  # of the number of an item among those that are in registers
_LONGEST = 1 << 13  # row, padded to a power of two, that a network sorts: 16 fit into a second-level cache
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


def sort_on_cpu(rows: SortedRows, capabilities: Capabilities) -> Lowering:
    """The launch that sorts rows, with scratch memory for each of a few tasks."""
    pairs = 2 * rows.length * rows.pair * 8  # bytes
    wide = rows.values and rows.bytes == 4 and rows.inner == 1 and rows.count >= _ROWS
    if not wide or rows.length > _LONGEST:
        slots = min(rows.count, CPU_SHARES * capabilities.compute_units)
        return Lowering((Launch(_by_radix(rows, slots, capabilities), (0, 2, 1)),), (slots * pairs,))
    width = 2 * _ROWS if min(rows.count, capabilities.vector_width) >= 2 * _ROWS else _ROWS
    groups = -(-rows.count // width)
    slots = min(groups, CPU_SHARES * capabilities.compute_units)
    bits = max(_BITS + 1, (rows.length - 1).bit_length())
    items = slots * (width << bits) * 4
    launch = Launch(_by_network(rows, bits, slots, width, capabilities), (0, 2, 3, 1))
    return Lowering((launch,), (slots * pairs, items))


def _by_radix(rows: SortedRows, slots: int, capabilities: Capabilities) -> KernelSource:
    each = -(-rows.count // slots)
    k = KernelBuilder("sort_rows", capabilities, [rows.result, "uint64"], [rows.dtype])
    begin = k.let("begin", k.group() * each)
    end = k.let("end", k.call("minimum", begin + each, rows.count))
    pairs = _pairs(k, rows)
    with k.loop("row", begin, end) as row:
        _radix_sort(k, rows, row, pairs)
    return k.source((-(-rows.count // each),), (1,))


def _pairs(k: KernelBuilder, rows: SortedRows) -> Memory:
    """The task's part of the scratch memory: the pairs of a row before and after a pass."""
    return k.pointer("pairs", k.outputs[1], k.group().cast("int64") * (2 * rows.length * rows.pair))


def _radix_sort(k: KernelBuilder, rows: SortedRows, row: Expr, pairs: Memory) -> None:
    """Sort a row and store it."""
    n = rows.length
    counts = k.registers("counts", "int32", rows.bytes * _DIGITS)
    with k.loop("i", 0, rows.bytes * _DIGITS) as i:
        k.store(counts, i, 0)
    with k.loop("i", 0, n) as i:
        (key,) = rows.key(k, row, i)
        words = _packed(rows, key, i)
        for word, value in enumerate(words):
            k.store(pairs, i * rows.pair + word, value)
        for byte in range(rows.bytes):
            counter = k.let(f"counter_{byte}", byte * _DIGITS + _digit(key, 8 * byte))
            k.store(counts, counter, k.load(counts, counter) + 1)
    # The pairs change sides with every digit. The offset of a side may exceed an int32.
    source = k.variable("source", 0, "int64")
    with k.loop("digit", 0, rows.bytes) as digit:
        _pass(k, rows, pairs, counts, source, digit)
    with k.loop("i", 0, n) as i:
        last = k.load(pairs, Binary("+", source, i * rows.pair + (rows.pair - 1)))
        place = last if rows.pair == 2 else Binary(">>", last, Const(32))
        rows.store(k, row, i, k.let("place", place.cast("int32")))


def _packed(rows: SortedRows, key: Expr, position: Expr) -> list[Expr]:
    """A pair as integers of 64 bits."""
    index = position.cast("uint64")
    return [key, index] if rows.pair == 2 else [index << 32 | key.cast("uint64")]


def _digit(word: Expr, shift: Operand) -> Expr:
    """A byte of a word, by the position of its lowest bit."""
    by = shift if isinstance(shift, Expr) else Const(shift)
    return (Binary(">>", word, by) & (_DIGITS - 1)).cast("int32")


def _pass(
    k: KernelBuilder, rows: SortedRows, pairs: Memory, counts: Memory, source: Var, digit: Expr
) -> None:
    """Sort the pairs of a row by a digit, unless all have the same digit."""
    n, size = rows.length, rows.length * rows.pair
    first, shift = k.let("first", digit * _DIGITS), k.let("shift", digit * 8)

    def counter(word: Expr) -> Expr:
        return first + _digit(word, shift)

    with k.when(k.load(counts, counter(k.load(pairs, source))).ne(n)):
        total = k.variable("total", 0)
        with k.loop("i", first, first + _DIGITS) as i:
            count = k.let("count", k.load(counts, i))
            k.store(counts, i, total)
            k.assign(total, total + count)
        target = k.let("target", size - source)
        with k.loop("i", 0, n) as i:
            at = k.let("at", Binary("+", source, i * rows.pair))
            words = [
                k.let(f"word_{word}", k.load(pairs, Binary("+", at, Const(word))))
                for word in range(rows.pair)
            ]
            own = k.let("own", counter(words[0]))
            place = k.let("place", k.load(counts, own))
            k.store(counts, own, place + 1)
            for word, value in enumerate(words):
                k.store(pairs, Binary("+", target, place * rows.pair + word), value)
        k.assign(source, target)


def _by_network(
    rows: SortedRows, bits: int, slots: int, width: int, capabilities: Capabilities
) -> KernelSource:
    """`width` rows at a time, padded at their ends to 2^`bits` items."""
    groups = -(-rows.count // width)
    each, n = -(-groups // slots), rows.length
    k = KernelBuilder("sort_rows", capabilities, ["int32", "uint64", "int32"], ["int32"])
    pairs = _pairs(k, rows)
    items = k.pointer("items", k.outputs[2], k.group().cast("int64") * (width << bits))
    begin = k.let("begin", k.group() * each)
    end = k.let("end", k.call("minimum", begin + each, groups))
    with k.loop("group", begin, end) as group:
        # The last row takes the place of those beyond it.
        own = [
            k.let(f"row{lane}", k.call("minimum", group * width + lane, rows.count - 1))
            for lane in range(width)
        ]
        starts = [k.let(f"start{lane}", row * n) for lane, row in enumerate(own)]
        special = _load_rows(k, rows, starts, items)
        with k.loop("i", n, 1 << bits) as i:
            k.store(items, i * width, k.broadcast(Const(_MOST), width))
        with k.when(special), k.loop("row", own[0], own[-1] + 1) as row:
            _radix_sort(k, rows, row, pairs)
        with k.otherwise():
            _network(k, items, bits, width)
            _store_rows(k, rows, starts, items)
    return k.source((-(-groups // each),), (1,))


def _load_rows(k: KernelBuilder, rows: SortedRows, starts: Sequence[Expr], items: Memory) -> Expr:
    """Copy the keys of rows to vectors across them; returns whether there is a -0 or a NaN."""
    width = len(starts)
    x, n, whole = k.inputs[0], rows.length, rows.length // width * width
    special = k.variable("special", k.broadcast(Const(False, BOOL), width))

    def note(bits: Expr) -> None:
        if rows.floats:
            is_zero = k.call("equal", bits, k.broadcast(Const(_LEAST), width))
            is_nan = k.call("greater", bits & _MOST, k.broadcast(Const(0x7F800000), width))
            k.assign(special, k.call("logical_or", special, k.call("logical_or", is_zero, is_nan)))

    with k.loop("i", 0, whole, width) as i:
        parts = [k.let(f"part{lane}", k.load_vector(x, at + i, width)) for lane, at in enumerate(starts)]
        for part in parts:
            note(part)
        keys = [k.let(f"key{lane}", _key(rows, part)) for lane, part in enumerate(parts)]
        for at, vector in enumerate(transposed(keys, lambda value: k.let(k.fresh("mixed"), value))):
            k.store(items, (i + at) * width, vector)
    with k.loop("i", whole, n) as i:
        across = k.let("across", k.vector([k.load(x, at + i) for at in starts]))
        note(across)
        k.store(items, i * width, _key(rows, across))
    return k.block_reduce("any_special", "any", special, 1, 1)


def _store_rows(k: KernelBuilder, rows: SortedRows, starts: Sequence[Expr], items: Memory) -> None:
    """Copy vectors across rows back to these."""
    width = len(starts)
    y, n, whole = k.outputs[0], rows.length, rows.length // width * width
    with k.loop("i", 0, whole, width) as i:
        vectors = [k.let(f"vector{at}", k.load_vector(items, (i + at) * width, width)) for at in range(width)]
        for at, part in zip(starts, transposed(vectors, lambda v: k.let(k.fresh("mixed"), v)), strict=True):
            k.store(y, at + i, _bits(rows, part))
    with k.loop("i", whole, n) as i:
        across = k.let("across", k.load_vector(items, i * width, width))
        bits = k.let("bits", _bits(rows, across))
        for lane, at in enumerate(starts):
            k.store(y, at + i, k.lane(bits, lane))


def _key(rows: SortedRows, bits: Expr) -> Expr:
    """Items, given as bits, as signed integers in the order in which they are sorted."""
    return _signed(rows, bits) ^ -1 if rows.descending else _signed(rows, bits)


def _bits(rows: SortedRows, key: Expr) -> Expr:
    """The bits of items, given their keys."""
    return _signed(rows, key ^ -1 if rows.descending else key)


def _signed(rows: SortedRows, bits: Expr) -> Expr:
    """Signed integers in the order of items that are given as bits, and the other way round."""
    if rows.floats:  # the order of negative numbers is that of their inverted bits
        return bits ^ (Binary(">>", bits, Const(31)) & _MOST)
    return bits ^ -1 ^ _MOST if rows.unsigned else bits  # its sign bit is no literal in C


def _network(k: KernelBuilder, items: Memory, bits: int, width: int) -> None:
    """Sort vectors by lane, upwards.

    Merge k turns sorted blocks of 2^(k-1) items into blocks of 2^k: it compares each item of the first half
    with its mirror image in the second, and then items whose indices differ in bit k - 2, k - 3, ... As many
    of these comparisons as possible are made while items are in registers.
    """
    size = 1 << bits
    with k.loop("i", 0, size, 1 << _BITS) as i:
        places: list[Expr] = [i + number for number in range(1 << _BITS)]
        block = _Block(k, items, places, width)
        for merge in range(1, _BITS + 1):
            block.mirror((1 << merge) - 1, 1 << merge - 1)
            block.merge(merge - 1)
        block.store()
    length = k.variable("length", 2 << _BITS)  # of blocks after a merge
    taken = k.variable("taken", 1)  # bits of the first comparisons, so that those of all others are four
    with k.repeat(length <= size):
        for own_bits in range(1, _BITS + 1):
            with k.when(taken.eq(own_bits)), k.loop("unit", 0, size >> own_bits) as unit:
                _mirrored(k, items, unit, length, own_bits, width)
        stride = k.variable("stride", Binary(">>", length, taken) // (1 << _BITS))
        with k.repeat(stride > 0):
            with k.loop("unit", 0, size >> _BITS) as unit:
                low = k.let("low", unit & (stride - 1))
                first = k.let("first", (unit - low) * (1 << _BITS) + low)
                block = _Block(k, items, [first + stride * number for number in range(1 << _BITS)], width)
                block.merge(_BITS)
                block.store()
            k.assign(stride, stride // (1 << _BITS))
        k.assign(length, length * 2)
        k.assign(taken, taken % _BITS + 1)


def _mirrored(k: KernelBuilder, items: Memory, unit: Expr, length: Expr, bits: int, width: int) -> None:
    """The comparisons of a merge by mirror images, and then by the next bits, for 2^`bits` items."""
    stride = k.let("near", length // (1 << bits))
    low = k.let("low", unit & (stride - 1))
    first = k.let("first", (unit - low) * (1 << bits) + low)
    last = k.let("last", (unit - low) * (1 << bits) + length - 1 - low)
    half = 1 << bits - 1
    places = [first + stride * number for number in range(half)]
    places += [last - stride * number for number in reversed(range(half))]
    block = _Block(k, items, places, width)
    block.mirror((1 << bits) - 1, half)
    block.merge(bits - 1)
    block.store()


class _Block:
    """Vectors that are in registers, in the order of their indices."""

    def __init__(self, k: KernelBuilder, items: Memory, places: Sequence[Expr], width: int) -> None:
        self._k, self._items = k, items
        self._places = [k.let(k.fresh("place"), place * width) for place in places]
        self._vectors: list[Expr] = [
            k.let(k.fresh("vector"), k.load_vector(items, place, width)) for place in self._places
        ]

    def mirror(self, mask: int, bit: int) -> None:
        """Compare vectors whose numbers differ in all bits of a mask, of which `bit` is the highest."""
        for number in range(len(self._vectors)):
            if not number & bit:
                self._order(number, number ^ mask)

    def merge(self, bits: int) -> None:
        """Compare vectors whose numbers differ in a bit, from the highest of `bits` on."""
        for bit in reversed(range(bits)):
            self.mirror(1 << bit, 1 << bit)

    def store(self) -> None:
        """Write the vectors to where they were read."""
        for place, vector in zip(self._places, self._vectors, strict=True):
            self._k.store(self._items, place, vector)

    def _order(self, low: int, high: int) -> None:
        k, pair = self._k, (self._vectors[low], self._vectors[high])
        self._vectors[low] = k.let(k.fresh("least"), k.call("minimum", *pair))
        self._vectors[high] = k.let(k.fresh("most"), k.call("maximum", *pair))
