"""Sort and argsort: the sorted items of rows, or their indices; equal items keep their order.

Items of every dtype are sorted by keys: unsigned integers in the same order. A pair is a key and the item's
index in its row. A thread sorts a short row by insertion; a workgroup of a GPU sorts a row that fits into
local memory by a bitonic network (`bitonic.py`). Other rows are sorted by radix: digit by digit, each pass
being stable; those of a CPU in `sort_cpu.py`.

Keys are words of 32 bits on a GPU, the lowest first, and of up to 64 on a CPU. A pair in a GPU's memory is
the index, followed by the words of the key.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.graph.reducing import TOP
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Expr, Var
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.bitonic import EACH, RegisterSort, greater, local_words
from penstock.kernels.templates.launches import Launch, Lowering, Tasks, is_cpu, one_launch
from penstock.kernels.templates.scan import Scan, row_scan
from penstock.kernels.templates.sort_cpu import sort_on_cpu
from penstock.kernels.templates.sort_rows import SortedRows
from penstock.kernels.templates.top import top_on_cpu

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
    if node.primitive is TOP:
        return top_on_cpu(node, capabilities)
    rows = SortedRows(node, capabilities)
    if rows.length <= (_INSERTED_ON_CPU if is_cpu(capabilities) else _INSERTED_ON_GPU):
        return one_launch(_insertion(rows, capabilities))
    if is_cpu(capabilities):
        return sort_on_cpu(rows, capabilities)
    shares = _Shares(rows, capabilities)
    if shares.fit:
        return one_launch(_in_registers(rows, shares, capabilities))
    small = capabilities.max_group_size < _DIGITS or capabilities.local_bytes < _BLOCK * _WORD
    if small or rows.count * rows.length * rows.pair > _MOST_WORDS:
        return None
    return _by_digits(rows, capabilities)


def _insertion(rows: SortedRows, capabilities: Capabilities) -> KernelSource:
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

    def __init__(self, rows: SortedRows, capabilities: Capabilities) -> None:
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


def _in_registers(rows: SortedRows, shares: _Shares, capabilities: Capabilities) -> KernelSource:
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


def _by_digits(rows: SortedRows, capabilities: Capabilities) -> Lowering:
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


def _loading(rows: SortedRows, capabilities: Capabilities) -> KernelSource:
    tasks = Tasks(rows.count * rows.length, capabilities)
    k = KernelBuilder("load_keys", capabilities, ["uint32"], [rows.dtype])
    with tasks.each(k) as task:
        position = k.let("position", task % rows.length)
        key = rows.key(k, task // rows.length, position)
        for word, value in enumerate((position.cast("uint32"), *key)):
            k.store(k.outputs[0], task * rows.pair + word, value)
    return k.source(tasks.grid, tasks.group)


def _storing(rows: SortedRows, capabilities: Capabilities) -> KernelSource:
    tasks = Tasks(rows.count * rows.length, capabilities)
    k = KernelBuilder("store_sorted", capabilities, [rows.result], [rows.dtype, "uint32"])
    with tasks.each(k) as task:
        place = k.let("place", k.load(k.inputs[1], task * rows.pair).cast("int32"))
        rows.store(k, task // rows.length, task % rows.length, place)
    return k.source(tasks.grid, tasks.group)


class _Block:
    """A workgroup's block of a row: its pairs, their digits, and its item of the counts."""

    def __init__(self, k: KernelBuilder, rows: SortedRows, blocks: int, pairs: Memory) -> None:
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


def _counting(rows: SortedRows, blocks: int, capabilities: Capabilities) -> KernelSource:
    k = KernelBuilder("count_digits", capabilities, ["int32"], ["uint32"], ["int32"])
    block = _Block(k, rows, blocks, k.inputs[0])
    count = k.variable("count", 0)
    with k.loop("i", 0, block.length) as i:
        k.assign(count, count + k.select(block.is_own(i), 1, 0))
    k.store(k.outputs[0], block.slot, count)
    return k.source((rows.count * blocks,), (_DIGITS,))


def _placing(rows: SortedRows, blocks: int, capabilities: Capabilities) -> KernelSource:
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
