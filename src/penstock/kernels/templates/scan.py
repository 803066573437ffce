"""Scans: cumulative sums, products and maxima, and linear recurrences, from either end of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.graph.reducing import BLOCK
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import UNROLLED
from penstock.kernels.ir.expressions import Const, Expr, Identity, Operand, Type, Var, all_of
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import (
    CPU_SHARES,
    SHORT_ROW,
    Lowering,
    Tasks,
    along,
    group_size,
    is_cpu,
    one_launch,
)

_ROWS_AT_ONCE = 4  # of a CPU's task: a sum waits for the previous sum of its row, so rows are interleaved
_WIDEST = 2048  # columns of a CPU's task, so that their running sums stay in the cache
_ITEMS = 4  # of a thread in a workgroup's step
_ROW_STEP = 256  # items of a row per iteration, at least
_LARGEST = 1e30  # of a recurrence's values that can be joined: infinite products would give NaNs


@dataclass(frozen=True)
class Scan:
    """The scan to compute. A linear recurrence has no operation, and the factors as a second input."""

    dtype: str
    operation: str = ""  # the primitive: add, multiply or maximum
    reverse: bool = False

    def builder(self, name: str, capabilities: Capabilities) -> KernelBuilder:
        """An empty kernel with the scan's parameters."""
        return KernelBuilder(name, capabilities, [self.dtype], [self.dtype] * (1 if self.operation else 2))

    def origin(self, index: Expr, length: int, stride: int = 1) -> Expr:
        """The index where the scan begins, given that of the row's first item."""
        return index + (length - 1) * stride if self.reverse else index

    def moved(self, index: Expr, distance: Operand) -> Expr:
        """An index moved along the scan's direction."""
        return index - distance if self.reverse else index + distance

    def following(self, k: KernelBuilder, carry: Expr, index: Expr, *inputs: Memory) -> Expr:
        """The result at an index, from the result before it. `inputs` may replace the kernel's."""
        part = [k.load(memory, index).cast(carry.type.dtype) for memory in inputs or k.inputs]
        return self.after(k, carry, part)

    def part(self, k: KernelBuilder, begin: Expr, position: Expr) -> list[Expr]:
        """An item by its position along the scan. The first factor is not used."""
        value, *factors = (k.load(memory, self.moved(begin, position)) for memory in k.inputs)
        return [value, *(k.select(position > 0, factor, 1.0) for factor in factors)]

    def after(self, k: KernelBuilder, result: Expr, part: Sequence[Expr]) -> Expr:
        """The result after a part, from the result before it.

        A part is the result of neighbouring items alone, and in a recurrence the product of their factors.
        """
        if self.operation:
            return k.call(self.operation, result, part[0])
        value, factor = part
        return k.call("add", value, k.call("multiply", factor, result))

    def joined(self, k: KernelBuilder, left: Sequence[Expr], right: Sequence[Expr]) -> list[Expr]:
        """Two neighbouring parts joined."""
        factors = (k.call("multiply", *pair) for pair in zip(left[1:], right[1:], strict=True))
        return [self.after(k, left[0], right), *factors]

    @property
    def identity(self) -> Expr:
        """The identity element: for a sum -0, since 0 would turn -0 into 0."""
        if self.operation == "maximum":
            return Identity(Type(self.dtype), "max")
        return Const(1.0 if self.operation == "multiply" else -0.0, Type(self.dtype))

    @property
    def empty(self) -> dict[str, Expr]:
        """A part without items: its values, by the suffixes of their variables."""
        value: dict[str, Expr] = {"": self.identity}
        return value if self.operation else value | {"_factor": Const(1.0, Type(self.dtype))}


def scan(node: Node, capabilities: Capabilities) -> Lowering | None:
    """Kernels of a scan along an axis; None where a loop would have too many iterations."""
    kind = Scan(str(node.dtype), node.primitive.combine, node.attributes["reverse"])
    outer, length, inner = along(node.shape, node.attributes["axis"])
    most = dialect_of(capabilities).most_steps(capabilities)
    if is_cpu(capabilities):
        build = _rows_on_cpu if inner == 1 else _columns_on_cpu
        source = build(kind, outer, length, inner, capabilities)
    elif inner == 1 and SHORT_ROW < length <= (_ROW_STEP if kind.operation else UNROLLED) * most:
        source = row_scan("scan_row", kind, outer, length, capabilities)
    elif length <= UNROLLED * most:
        source = _columns(kind, outer, length, inner, capabilities)
    else:
        return None
    return one_launch(source)


class _Carry:
    """The running result of a scan.

    A long floating-point sum has three parts, so that its error grows more slowly: the sum since the last
    whole block, that of the blocks since the last block of blocks, and that of everything before.
    """

    def __init__(self, k: KernelBuilder, kind: Scan, first: Expr, count: int) -> None:
        self._k = k
        self.value = k.variable("carry", first)
        self._blocked = kind.operation == "add" and kind.dtype.startswith("float") and count > BLOCK
        if self._blocked:
            self._near = k.variable("near", self.value)
            self._blocks, self._far, self._before = (
                k.variable(name, kind.identity) for name in ("blocks", "far", "before_near")
            )
            self._near_count = k.variable("near_count", 1)
            self._block_count = k.variable("block_count", 0)

    def take(self, value: Expr, following: Expr) -> None:
        """Add a value; `following` is the result with it, computed directly."""
        k = self._k
        if not self._blocked:
            k.assign(self.value, following)
            return
        near, blocks = self._near, self._blocks
        k.assign(near, near + value)
        k.assign(self.value, self._before + near)
        k.assign(self._near_count, self._near_count + 1)
        with k.when(self._near_count.eq(BLOCK)):
            k.assign(blocks, blocks + near)
            k.assign(near, -0.0)
            k.assign(self._near_count, 0)
            k.assign(self._block_count, self._block_count + 1)
            with k.when(self._block_count.eq(BLOCK)):
                k.assign(self._far, self._far + blocks)
                k.assign(blocks, -0.0)
                k.assign(self._block_count, 0)
            k.assign(self._before, self._far + blocks)


def row_scan(name: str, kind: Scan, rows: int, length: int, capabilities: Capabilities) -> KernelSource:
    """For a GPU: a workgroup for each row, in steps. Sums and products may be computed in place."""
    threads = group_size(max(length // _ITEMS, 32), capabilities)
    k = kind.builder(name, capabilities)
    parts = {end: k.shared(f"parts{end}", kind.dtype, threads) for end in kind.empty}

    def part_of(thread: Operand) -> list[Expr]:
        """The part of the step up to a thread."""
        return [k.load(memory, thread) for memory in parts.values()]

    def named(name: str, part: Sequence[Expr]) -> list[Var]:
        return [k.let(f"{name}{end}", value) for end, value in zip(parts, part, strict=True)]

    begin = k.let("begin", kind.origin(k.group() * length, length))
    carry = _Carry(k, kind, kind.identity, -(-length // (threads * _ITEMS)))
    with k.loop("start", 0, length, threads * _ITEMS) as start:
        first = k.let("first", start + k.thread * _ITEMS)
        total = [k.variable(f"total{end}", empty) for end, empty in kind.empty.items()]
        prefixes = []
        for item in range(_ITEMS):
            with k.when(first + item < length):
                _assign(k, total, kind.joined(k, total, kind.part(k, begin, first + item)))
            prefixes.append(named(f"prefix{item}", total))
        _join_threads(k, kind, [*parts.values()], total, threads)
        before = k.variable("before", carry.value)
        with k.when(k.thread > 0):
            k.assign(before, kind.after(k, carry.value, part_of(k.thread - 1)))

        def store_results() -> None:
            for item, prefix in enumerate(prefixes):
                with k.when(first + item < length):
                    k.store(k.outputs[0], kind.moved(begin, first + item), kind.after(k, before, prefix))

        if kind.operation:
            store_results()
            last = k.let("last", k.load(parts[""], threads - 1))
            carry.take(last, kind.after(k, carry.value, [last]))
        else:
            part = named("last", part_of(threads - 1))
            with k.when(all_of([k.call("abs", value) <= _LARGEST for value in (carry.value, *part)])):
                store_results()
                k.assign(carry.value, kind.after(k, carry.value, part))
            with k.otherwise():
                stop = k.let("stop", k.call("minimum", start + threads * _ITEMS, length))
                _recur(k, kind, begin, start, stop, carry.value)
        k.barrier()
    return k.source((rows,), (threads,))


def _assign(k: KernelBuilder, variables: Sequence[Var], values: Sequence[Expr]) -> None:
    for variable, value in zip(variables, values, strict=True):
        k.assign(variable, value)


def _join_threads(
    k: KernelBuilder, kind: Scan, parts: Sequence[Memory], total: Sequence[Var], threads: int
) -> None:
    """Replace the part of each thread by that of all threads up to it."""

    def put() -> None:
        for memory, value in zip(parts, total, strict=True):
            k.store(memory, k.thread, value)
        k.barrier()

    put()
    reach = k.variable("reach", 1)
    with k.repeat(reach < threads):
        with k.when(k.thread >= reach):
            _assign(k, total, kind.joined(k, [k.load(memory, k.thread - reach) for memory in parts], total))
        k.barrier()
        put()
        k.assign(reach, reach * 2)


def _recur(k: KernelBuilder, kind: Scan, begin: Expr, start: Expr, stop: Expr, carry: Var) -> None:
    """Item after item, where values are too large to join parts: all threads compute, the first stores."""
    with k.loop("i", start, stop, unrolled=UNROLLED) as i:
        k.assign(carry, kind.after(k, carry, kind.part(k, begin, i)))
        with k.when(k.thread.eq(0)):
            k.store(k.outputs[0], kind.moved(begin, i), carry)


def _columns(kind: Scan, outer: int, length: int, inner: int, capabilities: Capabilities) -> KernelSource:
    """For a GPU: a thread for each short row, or for each column."""
    tasks, k = Tasks(outer * inner, capabilities), kind.builder("scan_columns", capabilities)
    x, y = k.inputs[0], k.outputs[0]
    with tasks.each(k) as task:
        begin = k.let("begin", kind.origin(task // inner * (length * inner) + task % inner, length, inner))
        carry = _Carry(k, kind, k.load(x, begin), length)
        k.store(y, begin, carry.value)
        with k.loop("i", 1, length, unrolled=UNROLLED) as i:
            index = k.let("index", kind.moved(begin, i * inner))
            carry.take(k.load(x, index), kind.following(k, carry.value, index))
            k.store(y, index, carry.value)
    return k.source(tasks.grid, tasks.group)


def _accumulator(kind: Scan, capabilities: Capabilities) -> str:
    """The dtype of a CPU's running results: a long sum in float32 would be inexact."""
    wide = (kind.dtype, kind.operation) == ("float32", "add") and capabilities.float64
    return "float64" if wide else kind.dtype


def _rows_on_cpu(kind: Scan, outer: int, length: int, inner: int, capabilities: Capabilities) -> KernelSource:
    """A task for several rows. Where the last task has fewer, it computes its last row several times."""
    lanes = range(min(_ROWS_AT_ONCE, outer))
    tasks, k = Tasks(-(-outer // len(lanes)), capabilities), kind.builder("scan_rows", capabilities)
    x, y, wide = k.inputs[0], k.outputs[0], _accumulator(kind, capabilities)
    with tasks.each(k) as task:
        begins: list[Var] = []
        for lane in lanes:
            row = k.call("minimum", task * len(lanes) + lane, outer - 1)
            begins.append(k.let(f"begin{lane}", kind.origin(row * length, length)))
        carries = [
            k.variable(f"carry{lane}", k.load(x, begin).cast(wide)) for lane, begin in enumerate(begins)
        ]
        for begin, carry in zip(begins, carries, strict=True):
            k.store(y, begin, carry.cast(kind.dtype))
        with k.loop("i", 1, length) as i:
            for begin, carry in zip(begins, carries, strict=True):
                k.assign(carry, kind.following(k, carry, kind.moved(begin, i)))
            for begin, carry in zip(begins, carries, strict=True):
                k.store(y, kind.moved(begin, i), carry.cast(kind.dtype))
    return k.source(tasks.grid, tasks.group)


def _columns_on_cpu(
    kind: Scan, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    """A task for neighbouring columns, which loops over rows."""
    parts = -(-CPU_SHARES * capabilities.compute_units // outer)
    width = min(-(-inner // (16 * parts)) * 16, inner, _WIDEST)
    parts = -(-inner // width)
    tasks, k = Tasks(outer * parts, capabilities), kind.builder("scan_columns", capabilities)
    wide = _accumulator(kind, capabilities)
    sums = k.shared("sums", wide, width)
    with tasks.each(k) as task:
        start = k.let("start", task % parts * width)
        count = k.let("count", k.call("minimum", inner - start, width))
        begin = k.let("begin", kind.origin(task // parts * (length * inner) + start, length, inner))
        with k.loop("j", 0, count) as j:
            first = k.let("first", k.load(k.inputs[0], begin + j))
            k.store(sums, j, first.cast(wide))
            k.store(k.outputs[0], begin + j, first)
        with k.loop("i", 1, length) as i:
            row = k.let("row", kind.moved(begin, i * inner))
            inputs = [k.pointer(f"row_{memory.name}", memory, row) for memory in k.inputs]
            result = k.pointer("result", k.outputs[0], row)
            with k.loop("j", 0, count) as j:
                total = k.let("total", kind.following(k, k.load(sums, j), j, *inputs))
                k.store(sums, j, total)
                k.store(result, j, total.cast(kind.dtype))
    return k.source(tasks.grid, tasks.group)
