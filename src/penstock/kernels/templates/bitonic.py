"""Bitonic networks, by which a workgroup of a GPU sorts unsigned integers.

Merge k of a network turns blocks of 2^(k-1) items that are sorted in turn upwards and downwards into blocks
of 2^k. It compares items whose indices differ in bit k - 1, then in bit k - 2, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Binary, Const, Expr, Operand, Type

_BITS = 4  # of the number of an item among those of a thread
EACH = 1 << _BITS  # items that a thread holds in registers
_WORD, _ONES = Type("uint32"), (1 << 32) - 1


def greater(left: Sequence[Expr], right: Sequence[Expr]) -> Expr:
    """Whether an unsigned integer is greater than another, given their words, the lowest first."""
    result = left[0] > right[0]
    for a, b in zip(left[1:], right[1:], strict=True):
        result = (a > b) | (a.eq(b) & result)
    return result


def sort_in_local_memory(k: KernelBuilder, arrays: Sequence[Memory], length: Operand, threads: int) -> None:
    """Sort integers in local memory, given the arrays of their words, the lowest first.

    The length is a power of two.
    """
    half = length // 2
    size = k.variable("size", 2)
    with k.repeat(size <= length):
        step = k.variable("step", size // 2)
        with k.repeat(step > 0):
            k.barrier()
            with k.loop("i", k.thread, half, threads) as i:
                low = k.let("low", i * 2 - (i & (step - 1)))
                high = k.let("high", low + step)
                a, b = (
                    [k.let(f"{name}_{word}", k.load(array, at)) for word, array in enumerate(arrays)]
                    for name, at in (("a", low), ("b", high))
                )
                falls = k.let("falls", greater(a, b))
                with k.when(falls.eq((low & size).eq(0))):
                    for array, first, second in zip(arrays, a, b, strict=True):
                        k.store(array, low, second)
                        k.store(array, high, first)
            k.assign(step, step // 2)
        k.assign(size, size * 2)
    k.barrier()


class RegisterSort:
    """Sorts blocks of 2^`bits` words of 32 bits, of which each thread of a workgroup has `EACH` in variables.

    In the layout with the stride 2^s, an item's number among those of its thread is bits s to s + 3 of its
    index, and the thread's number is the other bits. So comparisons by these four bits are within a thread;
    before those by other bits, threads exchange items in local memory.

    Where a block is to be sorted downwards, its items are inverted and sorted upwards: so an item costs half
    an instruction for each comparison with another, and two more for each merge.
    """

    def __init__(self, k: KernelBuilder, bits: int, threads: int, padded: bool) -> None:
        """`bits`: more than four; `padded`: an unused word of local memory after each 16.

        Without those, threads whose items are far apart would access the same bank of local memory.
        """
        self._k, self._bits, self._padded = k, bits, padded
        self.memory = k.shared("exchanged", "uint32", local_words(threads * EACH, padded))
        self.items = [k.variable(f"item{number}", 0, "uint32") for number in range(EACH)]
        self._share = 1 << bits - _BITS  # threads of a block

    def sort(self) -> None:
        """Sort each block; before and after, its thread t of T has the items t, t + T, t + 2 T, ..."""
        for merge in range(1, _BITS):
            for bit in reversed(range(merge)):
                self._compare(bit, merge)
        stride = 1  # at first, any order will do
        for merge in range(_BITS, self._bits + 1):
            self._invert(merge)
            rest = merge  # bits that are still to be compared
            while rest:
                low = max(rest - _BITS, 0)
                if stride != 1 << low:
                    self.exchange(stride, 1 << low)
                    stride = 1 << low
                for bit in reversed(range(rest - low)):
                    self._compare(bit)
                rest = low
        self.exchange(stride, self._share)

    def exchange(self, stride: int, other: int) -> None:
        """Change the layout to another stride.

        A thread writes only to places that it has read itself, so no barrier is needed before.
        """
        k = self._k
        for item, place in zip(self.items, self.places(stride), strict=True):
            k.store(self.memory, place, item)
        k.barrier()
        for item, place in zip(self.items, self.places(other), strict=True):
            k.assign(item, k.load(self.memory, place))

    def places(self, stride: int) -> list[Expr]:
        """Where in local memory a thread's items lie, in the layout with a stride."""
        k = self._k
        low = k.thread & stride - 1
        first = k.let(k.fresh("first"), self.place((k.thread - low) * EACH + low))
        return [first + local_words(stride * number, self._padded) for number in range(EACH)]

    def place(self, item: Expr) -> Expr:
        """Where in local memory an item lies."""
        return item + Binary(">>", item, Const(_BITS)) if self._padded else item

    def _compare(self, bit: int, down: int = _BITS) -> None:
        """Order the pairs of a thread's items whose numbers differ in a bit: downwards if bit `down` is 1."""
        k = self._k
        for number in range(EACH):
            if number >> bit & 1:
                continue
            low, high = self.items[number], self.items[number | 1 << bit]
            if number >> down & 1:
                low, high = high, low
            least = k.let(k.fresh("least"), k.call("minimum", low, high))
            k.assign(high, k.call("maximum", low, high))
            k.assign(low, least)

    def _invert(self, merge: int) -> None:
        """Invert the items whose direction in a merge is not that of the merge before.

        In the layout with stride 1, the direction of a thread's items is a bit of the thread's number.
        """
        k = self._k
        before, now = (
            k.thread >> bit if 0 <= bit < self._bits - _BITS else Const(0)
            for bit in (merge - _BITS - 1, merge - _BITS)
        )
        turns = k.let(k.fresh("turns"), ((before ^ now) & 1).ne(0))
        mask = k.let(k.fresh("mask"), k.select(turns, Const(_ONES, _WORD), Const(0, _WORD)))
        for item in self.items:
            k.assign(item, item ^ mask)


def local_words(items: int, padded: bool) -> int:
    """The words of local memory before an item, or of so many items."""
    return items + (items >> _BITS) if padded else items
