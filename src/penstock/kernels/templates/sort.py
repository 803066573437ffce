"""Sort and argsort: the sorted items of rows, or their indices; equal items keep their order.

Items of every dtype are sorted by keys: unsigned integers in the same order. A pair is a key and the item's
index in its row. A thread sorts a short row by insertion; a workgroup of a GPU sorts a row that fits into
local memory by a bitonic network (`bitonic.py`). Other rows are sorted by radix: digit by digit, each pass
being stable.

Keys are words of 32 bits on a GPU, the lowest first, and of up to 64 on a CPU. A pair in a GPU's memory is
the index, followed by the words of the key.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.graph.reducing import SORT
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Binary, Const, Expr, Operand, Type, Var
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.bitonic import EACH, RegisterSort, greater, local_words
from penstock.kernels.templates.launches import (
    CPU_SHARES,
    Launch,
    Lowering,
    Tasks,
    along,
    is_cpu,
    one_launch,
)
from penstock.kernels.templates.scan import Scan, row_scan

_DIGITS = 256  # values of a digit, which is a byte; on a GPU a thread for each
_BLOCK = 2048  # items that a workgroup counts and scatters
_INSERTED_ON_CPU = 32  # items of the longest row sorted by insertion
_INSERTED_ON_GPU = 16
_LONGEST = 1 << 12  # row that a workgroup sorts: of 256 threads, which every GPU has
_FEW_THREADS = 128  # of a workgroup that sorts several short rows
_WORD = 4  # bytes
_MOST_WORDS = 1 << 31  # of all pairs, so that indices are int32


def sort(node: Node, capabilities: Capabilities) -> Lowering | None:
    """Kernels of `sort` and `argsort`; None where workgroups are too small or indices too large."""
    rows = _Rows(node, capabilities)
    if rows.length <= (_INSERTED_ON_CPU if is_cpu(capabilities) else _INSERTED_ON_GPU):
        return one_launch(_insertion(rows, capabilities))
    if is_cpu(capabilities):
        slots = min(rows.count, CPU_SHARES * capabilities.compute_units)
        scratch = slots * 2 * rows.length * rows.pair * 8
        return Lowering((Launch(_row_by_row(rows, slots, capabilities), (0, 2, 1)),), (scratch,))
    shares = _Shares(rows, capabilities)
    if shares.fit:
        return one_launch(_in_registers(rows, shares, capabilities))
    small = capabilities.max_group_size < _DIGITS or capabilities.local_bytes < _BLOCK * _WORD
    if small or rows.count * rows.length * rows.pair > _MOST_WORDS:
        return None
    return _by_digits(rows, capabilities)


class _Rows:
    """The rows to sort: their number, where their items are, and their keys."""

    def __init__(self, node: Node, capabilities: Capabilities) -> None:
        dtype = node.inputs[0].dtype
        outer, self.length, self.inner = along(node.shape, node.attributes["axis"])
        self.count = outer * self.inner
        self.bytes = dtype.itemsize  # of a key, and its digits
        wide, cpu = self.bytes == 8, is_cpu(capabilities)
        self.words = 2 if wide and not cpu else 1
        self.word = "uint64" if wide and cpu else "uint32"
        # Items of scratch memory: words of 32 bits on a GPU, of 64 on a CPU.
        self.pair = 1 + int(wide) if cpu else 1 + self.words
        # Items are read as bits.
        self.dtype = "uint32" if self.words == 2 else f"uint{8 * self.bytes}"
        self._kind, self._descending = dtype.kind, node.attributes["descending"]
        self._bits = 8 * self.bytes // self.words  # of the highest word
        self.largest = Const((1 << self._bits) - 1, Type(self.word))
        self._values = node.primitive is SORT
        self.result = self.dtype if self._values else "int64"

    def index(self, row: Expr, position: Expr) -> Expr:
        """The index of an item of a row."""
        length, inner = self.length, self.inner
        if inner == 1:
            return row * length + position
        return row // inner * (length * inner) + row % inner + position * inner

    def key(self, k: KernelBuilder, row: Expr, position: Expr) -> list[Var]:
        """The key of an item, the lowest word first."""
        index, x = self.index(row, position), k.inputs[0]
        places = [index * 2, index * 2 + 1] if self.words == 2 else [index]
        bits = [k.let(k.fresh("bits"), k.load(x, place).cast(self.word)) for place in places]
        return [k.let(k.fresh("key"), word) for word in self._ordered(k, bits)]

    def store(self, k: KernelBuilder, row: Expr, position: Expr, place: Expr) -> None:
        """Store what is sorted to a position: the item of the row that was at a place, or that place."""
        to, y = self.index(row, position), k.outputs[0]
        if not self._values:
            k.store(y, to, place)
            return
        source = self.index(row, place)
        for word in range(self.words):
            item = k.load(k.inputs[0], source * self.words + word)
            k.store(y, to * self.words + word, k.let(k.fresh("bits"), item))

    def _ordered(self, k: KernelBuilder, bits: Sequence[Expr]) -> Sequence[Expr]:
        """The bits of an item as an unsigned integer in the order of the items' values."""
        *low, high = bits
        sign = Const(1 << self._bits - 1, Type(self.word))
        ordered = bits
        if self._kind == "i":
            ordered = [*low, high ^ sign]
        if self._kind == "f":
            # NaNs are the largest; -0 equals 0; the order of negative numbers is that of their inverted bits.
            zeros = [Const(0, Type(self.word)) for _ in low]
            infinity = 0xFF << 24 if self.bytes == 4 else 0x7FF << self._bits - 11  # without its sign
            is_nan = greater([*low, high << 1], [*zeros, Const(infinity, Type(self.word))])
            is_negative = greater(bits, [*zeros, sign])
            ordered = [
                k.select(is_nan, self.largest, k.select(is_negative, ~word, positive))
                for word, positive in zip(bits, [*low, high | sign], strict=True)
            ]
        return [word ^ self.largest for word in ordered] if self._descending else ordered


def _insertion(rows: _Rows, capabilities: Capabilities) -> KernelSource:
    """A task for each row."""
    n, tasks = rows.length, Tasks(rows.count, capabilities)
    k = KernelBuilder("sort_short_rows", capabilities, [rows.result], [rows.dtype])
    with tasks.each(k) as row:
        keys = [k.registers(f"keys_{word}", rows.word, n) for word in range(rows.words)]
        places = k.registers("places", "int32", n)
        with k.loop("i", 0, n) as i:
            key = rows.key(k, row, i)
            j = k.variable("j", i)
            with k.repeat((j > 0) & greater([k.load(words, j - 1) for words in keys], key)):
                for array in (*keys, places):
                    k.store(array, j, k.load(array, j - 1))
                k.assign(j, j - 1)
            for array, value in zip((*keys, places), (*key, i), strict=True):
                k.store(array, j, value)
        with k.loop("i", 0, n) as i:
            rows.store(k, row, i, k.let("place", k.load(places, i)))
    return k.source(tasks.grid, tasks.group)


class _Shares:
    """For a GPU: the rows of a workgroup, each padded at its end to 2^`bits` items, and their threads."""

    def __init__(self, rows: _Rows, capabilities: Capabilities) -> None:
        self.bits = (rows.length - 1).bit_length()
        word_bits = 8 * rows.bytes // rows.words
        self.passes_of_word = -(-word_bits // (32 - self.bits))
        self.passes = rows.words * self.passes_of_word
        self.threads = max(1, (1 << self.bits) // EACH)  # of a row
        self.rows = max(1, _FEW_THREADS // self.threads)
        while self.rows > 1 and (self.rows >= 2 * rows.count or not self._fit(capabilities, False)):
            self.rows //= 2
        small = rows.length <= _LONGEST and self.threads <= capabilities.max_group_size
        self.fit = small and self._fit(capabilities, False)
        self.padded = self._fit(capabilities, True)

    def _fit(self, capabilities: Capabilities, padded: bool) -> bool:
        """Whether local memory holds the words to sort and, for more than one pass, their order."""
        items = self.rows << self.bits
        words = local_words(items, padded) + (items if self.passes > 1 else 0)
        return words * _WORD <= capabilities.local_bytes


def _in_registers(rows: _Rows, shares: _Shares, capabilities: Capabilities) -> KernelSource:
    """For a GPU: a workgroup sorts one or a few rows, in as many passes as its keys have digits.

    A pass sorts words of a digit and the item's place in the order before, so it is stable.
    """
    share, mask = shares.threads, (1 << shares.bits) - 1
    k = KernelBuilder("sort_row", capabilities, [rows.result], [rows.dtype])
    row, rank = k.let("row", k.group() * shares.rows + k.thread // share), k.let("rank", k.thread % share)
    own = [rank + number * share for number in range(EACH)]

    def is_inside(number: int) -> Expr:
        inside = own[number] < rows.length
        return inside & (row < rows.count) if rows.count % shares.rows else inside

    keys = [[k.variable(k.fresh("key"), rows.largest) for _ in range(rows.words)] for _ in own]
    for number, words in enumerate(keys):
        with k.when(is_inside(number)):
            for word, value in zip(words, rows.key(k, row, own[number]), strict=True):
                k.assign(word, value)
    network = RegisterSort(k, shares.bits, share * shares.rows, shares.padded)
    places = [k.variable(f"place{number}", place) for number, place in enumerate(own)]
    if shares.passes > 1:
        _digit_by_digit(k, shares, network, keys, places)
    else:
        for item, (key,), place in zip(network.items, keys, places, strict=True):
            k.assign(item, key << shares.bits | place.cast("uint32"))
        network.sort()
        for item, place in zip(network.items, places, strict=True):
            k.assign(place, (item & mask).cast("int32"))
    for number, place in enumerate(places):
        with k.when(is_inside(number)):
            rows.store(k, row, own[number], place)
    return k.source((-(-rows.count // shares.rows),), (share * shares.rows,))


def _digit_by_digit(
    k: KernelBuilder,
    shares: _Shares,
    network: RegisterSort,
    keys: Sequence[Sequence[Expr]],
    places: Sequence[Var],
) -> None:
    """Passes over digits of keys; `places`, of items in their row, become those in the sorted order."""
    bits, mask = shares.bits, (1 << shares.bits) - 1
    order = k.shared("order", "int32", shares.rows << bits)
    start = k.let("start", k.thread // shares.threads << bits)  # of the row in local memory
    own = [start + k.thread % shares.threads + number * shares.threads for number in range(EACH)]
    with k.loop("digit", 0, shares.passes, unrolled=1) as digit:
        k.barrier()
        shift = k.let("shift", (digit % shares.passes_of_word * (32 - bits)).cast("uint32"))
        for words, place, at, spot in zip(keys, places, own, network.places(shares.threads), strict=True):
            key = words[0] if len(words) == 1 else k.select(digit < shares.passes_of_word, *words)
            k.store(network.memory, spot, key >> shift << bits)
            k.store(order, at, place)
        k.barrier()
        for item, place, at in zip(network.items, places, own, strict=True):
            rank = (at - start).cast("uint32")
            k.assign(item, k.load(network.memory, network.place(start + place)) | rank)
        k.barrier()
        network.sort()
        for item, place in zip(network.items, places, strict=True):
            k.assign(place, k.load(order, start + (item & mask).cast("int32")))


def _by_digits(rows: _Rows, capabilities: Capabilities) -> Lowering:
    """For a GPU: a radix sort of the pairs by each byte of the keys, the lowest first.

    The scratch buffers hold the pairs before and after a pass, which alternate, and how many keys of each
    block have each digit.
    """
    blocks = -(-rows.length // _BLOCK)
    counts = _DIGITS * blocks
    count, place = _counting(rows, blocks, capabilities), _placing(rows, blocks, capabilities)
    sums = row_scan("sum_counts", Scan("int32", "add"), rows.count, counts, capabilities)
    launches = [Launch(_loading(rows, capabilities), (2, 1))]
    for digit in range(rows.bytes):
        here, there = 2 + digit % 2, 3 - digit % 2
        launches += [
            Launch(count, (4, here), (8 * digit,)),
            Launch(sums, (4, 4)),
            Launch(place, (there, here, 4), (8 * digit,)),
        ]
    launches.append(Launch(_storing(rows, capabilities), (0, 1, 2 + rows.bytes % 2)))
    pairs = rows.count * rows.length * rows.pair * _WORD
    return Lowering(tuple(launches), (pairs, pairs, 4 * rows.count * counts))


def _loading(rows: _Rows, capabilities: Capabilities) -> KernelSource:
    tasks = Tasks(rows.count * rows.length, capabilities)
    k = KernelBuilder("load_keys", capabilities, ["uint32"], [rows.dtype])
    with tasks.each(k) as task:
        position = k.let("position", task % rows.length)
        key = rows.key(k, task // rows.length, position)
        for word, value in enumerate((position.cast("uint32"), *key)):
            k.store(k.outputs[0], task * rows.pair + word, value)
    return k.source(tasks.grid, tasks.group)


def _storing(rows: _Rows, capabilities: Capabilities) -> KernelSource:
    tasks = Tasks(rows.count * rows.length, capabilities)
    k = KernelBuilder("store_sorted", capabilities, [rows.result], [rows.dtype, "uint32"])
    with tasks.each(k) as task:
        place = k.let("place", k.load(k.inputs[1], task * rows.pair).cast("int32"))
        rows.store(k, task // rows.length, task % rows.length, place)
    return k.source(tasks.grid, tasks.group)


class _Block:
    """A workgroup's block of a row: its pairs, their digits, and its item of the counts."""

    def __init__(self, k: KernelBuilder, rows: _Rows, blocks: int, pairs: Memory) -> None:
        self._k, self._rows, self._counts = k, rows, _DIGITS * blocks
        (shift,) = k.scalars
        block, self.row = k.let("block", k.group() % blocks), k.let("row", k.group() // blocks)
        self.start = k.let("start", self.row * rows.length + block * _BLOCK)
        self.length = k.let("n", k.call("minimum", rows.length - block * _BLOCK, _BLOCK))
        self.counts = k.let("counts", self.row * self._counts)
        self.slot = k.let("slot", self.counts + k.thread * blocks + block)
        self._digits = k.shared("digits", "uint8", _BLOCK)
        with k.loop("i", k.thread, self.length, _DIGITS) as i:
            word = k.load(pairs, (self.start + i) * rows.pair + 1 + shift // 32)
            digit = (word >> (shift % 32).cast("uint32")) & (_DIGITS - 1)
            k.store(self._digits, i, digit.cast("uint8"))
        k.barrier()

    def is_own(self, i: Expr) -> Expr:
        """Whether the digit of a key belongs to this thread."""
        return self._k.load(self._digits, i).cast("int32").eq(self._k.thread)


def _counting(rows: _Rows, blocks: int, capabilities: Capabilities) -> KernelSource:
    k = KernelBuilder("count_digits", capabilities, ["int32"], ["uint32"], ["int32"])
    block = _Block(k, rows, blocks, k.inputs[0])
    count = k.variable("count", 0)
    with k.loop("i", 0, block.length) as i:
        k.assign(count, count + k.select(block.is_own(i), 1, 0))
    k.store(k.outputs[0], block.slot, count)
    return k.source((rows.count * blocks,), (_DIGITS,))


def _placing(rows: _Rows, blocks: int, capabilities: Capabilities) -> KernelSource:
    k = KernelBuilder("place_by_digit", capabilities, ["uint32"], ["uint32", "int32"], ["int32"])
    pairs, sums = k.inputs
    block = _Block(k, rows, blocks, pairs)
    place = k.variable("place", block.row * rows.length)
    with k.when(block.slot > block.counts):
        k.assign(place, place + k.load(sums, block.slot - 1))
    with k.loop("i", 0, block.length) as i, k.when(block.is_own(i)):
        for word in range(rows.pair):
            value = k.load(pairs, (block.start + i) * rows.pair + word)
            k.store(k.outputs[0], place * rows.pair + word, value)
        k.assign(place, place + 1)
    return k.source((rows.count * blocks,), (_DIGITS,))


def _row_by_row(rows: _Rows, slots: int, capabilities: Capabilities) -> KernelSource:
    """For a CPU: a radix sort of row after row, in the thread's slot of the scratch buffer.

    A pair is an integer of 64 bits, with the index in the upper half and the key in the lower half. A key of
    64 bits is followed by the index.
    """
    n, each, size = rows.length, -(-rows.count // slots), rows.length * rows.pair
    k = KernelBuilder("sort_rows", capabilities, [rows.result, "uint64"], [rows.dtype])
    _, memory = k.outputs
    begin = k.let("begin", k.group() * each)
    end = k.let("end", k.call("minimum", begin + each, rows.count))
    pairs = k.pointer("pairs", memory, k.group().cast("int64") * (2 * size))
    with k.loop("row", begin, end) as row:
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
    return k.source((-(-rows.count // each),), (1,))


def _packed(rows: _Rows, key: Expr, position: Expr) -> list[Expr]:
    """A pair as integers of 64 bits."""
    index = position.cast("uint64")
    return [key, index] if rows.pair == 2 else [index << 32 | key.cast("uint64")]


def _digit(word: Expr, shift: Operand) -> Expr:
    """A byte of a word, by the position of its lowest bit."""
    by = shift if isinstance(shift, Expr) else Const(shift)
    return (Binary(">>", word, by) & (_DIGITS - 1)).cast("int32")


def _pass(k: KernelBuilder, rows: _Rows, pairs: Memory, counts: Memory, source: Var, digit: Expr) -> None:
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
