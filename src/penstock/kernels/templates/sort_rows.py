"""The rows that templates sort, and the keys by which they do."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.graph.reducing import SORT
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.ir.expressions import Const, Expr, Type, Var
from penstock.kernels.templates.bitonic import greater
from penstock.kernels.templates.launches import along, is_cpu


class SortedRows:
    """The rows to sort: their number, where their items are, and their keys."""

    def __init__(self, node: Node, capabilities: Capabilities) -> None:
        dtype = node.inputs[0].dtype
        outer, self.length, self.inner = along(node.inputs[0].shape, node.attributes["axis"])
        self.count = outer * self.inner
        self.bytes = dtype.itemsize  # of a key, and its digits
        wide, cpu = self.bytes == 8, is_cpu(capabilities)
        self.words = 2 if wide and not cpu else 1
        self.word = "uint64" if wide and cpu else "uint32"
        # Items of scratch memory: words of 32 bits on a GPU, of 64 on a CPU.
        self.pair = 1 + int(wide) if cpu else 1 + self.words
        # Items are read as bits.
        self.dtype = "uint32" if self.words == 2 else f"uint{8 * self.bytes}"
        self._kind, self.descending = dtype.kind, node.attributes["descending"]
        self._bits = 8 * self.bytes // self.words  # of the highest word
        self.largest = Const((1 << self._bits) - 1, Type(self.word))
        self.values = node.primitive is SORT
        self.result = self.dtype if self.values else "int64"

    @property
    def floats(self) -> bool:
        """Whether there may be NaNs."""
        return self._kind == "f"

    @property
    def unsigned(self) -> bool:
        """Whether the items are unsigned integers."""
        return self._kind == "u"

    def index(self, row: Expr, position: Expr) -> Expr:
        """The index of an item of a row."""
        return self.index_among(row, position, self.length)

    def index_among(self, row: Expr, position: Expr, length: int) -> Expr:
        """The same where rows have another length."""
        inner = self.inner
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
        if not self.values:
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
        if self.floats:
            # NaNs are the largest; -0 equals 0; the order of negative numbers is that of their inverted bits.
            zeros = [Const(0, Type(self.word)) for _ in low]
            infinity = 0xFF << 24 if self.bytes == 4 else 0x7FF << self._bits - 11  # without its sign
            is_nan = greater([*low, high << 1], [*zeros, Const(infinity, Type(self.word))])
            is_negative = greater(bits, [*zeros, sign])
            ordered = [
                k.select(is_nan, self.largest, k.select(is_negative, ~word, positive))
                for word, positive in zip(bits, [*low, high | sign], strict=True)
            ]
        return [word ^ self.largest for word in ordered] if self.descending else ordered
