"""Argmax and argmin: the index of the first extreme item; a NaN beats every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import UNROLLED
from penstock.kernels.ir.expressions import Const, Expr, Var
from penstock.kernels.source import KernelSource, item_size
from penstock.kernels.templates.launches import (
    SHORT_ROW,
    Launch,
    Lowering,
    Partials,
    Tasks,
    along,
    group_size,
    is_cpu,
    one_launch,
)

_WIDEST = 256  # columns of a CPU's task
_FEW = 8  # columns; fewer are processed separately
_STEP = 32  # items of a row in vectors that are compared independently, so that none waits for another
_EACH = 16  # items of a row per thread of a GPU: the barriers after them cost as much
_PART = 1024  # items of a part of a row, or more
_MOST_PARTS = 512  # of a row
_GROUPS = 2  # workgroups for each compute unit of a GPU; rows are divided where there are fewer


@dataclass(frozen=True)
class _Extreme:
    """The extreme to find, and the shape: `length` items along the axis."""

    largest: bool
    dtype: str
    outer: int
    length: int
    inner: int

    def builder(self, name: str, capabilities: Capabilities) -> KernelBuilder:
        """An empty kernel with the parameters."""
        return KernelBuilder(name, capabilities, ["int64"], [self.dtype])

    def wins(self, k: KernelBuilder, value: Expr, best: Expr) -> Expr:
        """Whether a value beats the best value before it."""
        return k.call("greater_or_nan" if self.largest else "less_or_nan", value, best)

    def take(self, k: KernelBuilder, best: Var, best_index: Var, value: Expr, index: Expr) -> None:
        """Compare one more value with the best."""
        value = k.let("value", value)
        wins = k.let("wins", self.wins(k, value, best))
        k.assign(best, k.select(wins, value, best))
        k.assign(best_index, k.select(wins, index, best_index))

    @property
    def floats(self) -> bool:
        """Whether there may be NaNs."""
        return "float" in self.dtype

    @property
    def loaded(self) -> str:
        """The dtype of an item that was loaded."""
        return "float32" if self.dtype in ir.HALF_PRECISION else self.dtype

    @property
    def reduction(self) -> str:
        """The reduction that gives the extreme value."""
        return "max" if self.largest else "min"

    @property
    def compared(self) -> str:
        """The dtype of a CPU's vectors, which have at least as many bytes as flags and indices."""
        if item_size(self.dtype) >= 4:
            return self.dtype
        return "float32" if self.floats else "int32"

    def better(self, k: KernelBuilder, value: Expr, best: Expr) -> Expr:
        """The extreme of two vectors by lane; NaNs in `value` are ignored, in one instruction of a CPU."""
        return k.call(f"{self.reduction}imum{'_number' if self.floats else ''}", value, best)


def extreme(node: Node, capabilities: Capabilities) -> Lowering | None:
    """Kernels of `argmax` and `argmin`; None where a loop would have too many iterations."""
    x = node.inputs[0]
    # Booleans are compared as the integers 0 and 1 that they are in memory.
    dtype = "uint8" if x.dtype == np.bool_ else str(x.dtype)
    shape = along(x.shape, node.attributes["axis"])
    kind = _Extreme(node.primitive.name == "argmax", dtype, *shape)
    if is_cpu(capabilities):
        rows, few = kind.inner == 1 and kind.length >= _STEP, kind.inner < _FEW
        build = _rows_on_cpu if rows else _separately if few else _columns_on_cpu
    elif kind.inner == 1 and kind.length > SHORT_ROW:
        if (parts := _row_parts(kind, capabilities)) > 1:
            return _in_parts(kind, capabilities, parts)
        build = _row
    elif kind.length <= UNROLLED * dialect_of(capabilities).most_steps(capabilities):
        build = _separately
    else:
        return None
    return one_launch(build(kind, capabilities))


def _row(kind: _Extreme, capabilities: Capabilities) -> KernelSource:
    """For a GPU: a workgroup for each row."""
    length, threads = kind.length, group_size(max(kind.length // _EACH, 32), capabilities)
    k = kind.builder("extreme_of_row", capabilities)
    begin = k.let("begin", k.group() * length)
    _, best_index = _best(kind, k, begin, ir.Const(0), ir.Const(length), threads)
    with k.when(k.thread.eq(0)):
        k.store(k.outputs[0], k.group(), best_index)
    return k.source((kind.outer,), (threads,))


def _row_parts(kind: _Extreme, capabilities: Capabilities) -> int:
    """Into how many parts rows are divided, so that few long rows keep a GPU busy."""
    wanted = _GROUPS * capabilities.compute_units // kind.outer
    return max(1, min(wanted, kind.length // _PART, group_size(_MOST_PARTS, capabilities)))


def _in_parts(kind: _Extreme, capabilities: Capabilities, parts: int) -> Lowering:
    """For a GPU: a workgroup for each part of a row, and then one for each row, which compares the parts."""
    share = -(-kind.length // parts)
    parts = -(-kind.length // share)
    compared = group_size(2 * parts - 1, capabilities)
    threads = max(group_size(max(share // _EACH, 32), capabilities), compared)  # so that the last can compare
    k = KernelBuilder("extreme_of_part", capabilities, [kind.loaded, "int32"], [kind.dtype])
    begin = k.let("begin", k.group() // parts * kind.length)
    start = k.let("start", k.group() % parts * share)
    stop = k.let("stop", k.call("minimum", start + share, kind.length))
    best, best_index = _best(kind, k, begin, start, stop, threads)
    with k.when(k.thread.eq(0)):
        k.store(k.outputs[0], k.group(), best)
        k.store(k.outputs[1], k.group(), best_index)
    of_parts = k.source((kind.outer * parts,), (threads,), block=1)
    k = KernelBuilder("extreme_of_parts", capabilities, ["int64"], [kind.loaded, "int32"])
    place = k.let("place", k.group() * parts + k.call("minimum", k.thread, parts - 1))
    best = k.variable("best", k.load(k.inputs[0], place))
    best_index = k.variable("best_index", k.load(k.inputs[1], place))
    _compare(kind, k, best, best_index, compared)
    with k.when(k.thread.eq(0)):
        k.store(k.outputs[0], k.group(), best_index)
    joined = k.source((kind.outer,), (compared,), block=1)
    scratch = (kind.outer * parts * item_size(kind.loaded), kind.outer * parts * 4)
    own = Partials(kind.outer, parts, parts_first=False)
    last = Launch(joined, (0, 2, 3), operations=0, reads_own=own)
    return Lowering((Launch(of_parts, (2, 3, 1)), last), scratch)


def _best(
    kind: _Extreme, k: KernelBuilder, begin: Expr, start: Expr, stop: Expr, threads: int
) -> tuple[Var, Var]:
    """The extreme of a row's items from `start` to below `stop`, and its index, in the first thread."""
    x = k.inputs[0]
    first = k.let("first_item", k.call("minimum", start + k.thread, stop - 1))
    best = k.variable("best", k.load(x, begin + first))
    best_index = k.variable("best_index", first)
    with k.loop("i", start + k.thread + threads, stop, threads, unrolled=UNROLLED) as i:
        kind.take(k, best, best_index, k.load(x, begin + i), i)
    _compare(kind, k, best, best_index, threads)
    return best, best_index


def _compare(kind: _Extreme, k: KernelBuilder, best: Var, best_index: Var, threads: int) -> None:
    """Give the first thread the extreme of all threads, the first if there are several."""
    bests, indices = k.shared("bests", kind.loaded, threads), k.shared("indices", "int32", threads)
    k.store(bests, k.thread, best)
    k.store(indices, k.thread, best_index)
    apart = k.variable("apart", threads // 2)
    with k.repeat(apart > 0):
        k.barrier()
        with k.when(k.thread < apart):
            value = k.let("value", k.load(bests, k.thread + apart))
            index = k.let("index", k.load(indices, k.thread + apart))
            earlier = (index < best_index) & ~kind.wins(k, best, value)
            with k.when(kind.wins(k, value, best) | earlier):
                k.assign(best, value)
                k.assign(best_index, index)
                k.store(bests, k.thread, best)
                k.store(indices, k.thread, best_index)
        k.assign(apart, apart // 2)


def _separately(kind: _Extreme, capabilities: Capabilities) -> KernelSource:
    """A task for each short row, or for each column."""
    length, inner = kind.length, kind.inner
    tasks, k = Tasks(kind.outer * inner, capabilities), kind.builder("extreme_of_each", capabilities)
    x = k.inputs[0]
    with tasks.each(k) as task:
        begin = k.let("begin", task // inner * (length * inner) + task % inner)
        best = k.variable("best", k.load(x, begin))
        best_index = k.variable("best_index", 0)
        with k.loop("i", 1, length, unrolled=0 if is_cpu(capabilities) else UNROLLED) as i:
            kind.take(k, best, best_index, k.load(x, begin + i * inner), i)
        k.store(k.outputs[0], task, best_index)
    return k.source(tasks.grid, tasks.group)


def _rows_on_cpu(kind: _Extreme, capabilities: Capabilities) -> KernelSource:
    """A task for each row. Every lane of some vectors has its extreme and the step where it was first."""
    tasks, k = Tasks(kind.outer, capabilities), kind.builder("extreme_of_rows", capabilities)
    x, length, width = k.inputs[0], kind.length, _width(kind, capabilities)
    whole, vectors = length // _STEP * _STEP, range(_STEP // width)
    with tasks.each(k) as task:
        begin = k.let("begin", task * length)
        extremes = [k.variable(f"extreme{at}", _vector(kind, k, begin + at * width, width)) for at in vectors]
        steps = [k.variable(f"step{at}", k.broadcast(Const(0), width)) for at in vectors]
        nans = [k.variable("nans", _any_nan(k, extremes))] if kind.floats else []
        with k.loop("i", _STEP, whole, _STEP) as i:
            here = k.let("here", k.broadcast(i, width))
            values = [k.let(f"value{at}", _vector(kind, k, begin + i + at * width, width)) for at in vectors]
            for at, value in enumerate(values):
                wins = k.let(f"wins{at}", k.call("greater" if kind.largest else "less", value, extremes[at]))
                k.assign(extremes[at], k.select(wins, value, extremes[at]))
                k.assign(steps[at], k.select(wins, here, steps[at]))
            for has_nan in nans:
                k.assign(has_nan, k.call("logical_or", has_nan, _any_nan(k, values)))
        best, best_index = _first(kind, k, extremes, steps)
        for has_nan in nans:
            with k.when(k.block_reduce("any_nan", "any", has_nan, 1, 1)):
                _find_nan(k, begin, best, best_index)
        with k.loop("i", whole, length) as i:
            value = k.let("value", k.load(x, begin + i).cast(kind.compared))
            with k.when(kind.wins(k, value, best)):
                k.assign(best, value)
                k.assign(best_index, i)
        k.store(k.outputs[0], task, best_index)
    return k.source(tasks.grid, tasks.group)


def _width(kind: _Extreme, capabilities: Capabilities) -> int:
    """Of a CPU's vectors."""
    wide = capabilities.vector_width >= 16 and item_size(kind.compared) <= 4
    return 16 if wide else 8


def _vector(kind: _Extreme, k: KernelBuilder, index: Expr, width: int) -> Expr:
    """Neighbouring items, in the dtype in which they are compared."""
    items = k.load_vector(k.inputs[0], index, width)
    return items if items.type.dtype == kind.compared else k.call("cast", items, dtype=kind.compared)


def _first(kind: _Extreme, k: KernelBuilder, extremes: list[Var], steps: list[Var]) -> tuple[Var, Var]:
    """The extreme of all lanes, and the index of the first item that has it."""
    width, none = extremes[0].type.width, k.broadcast(Const(kind.length), extremes[0].type.width)
    whole = k.variable("whole", extremes[0])
    for other in extremes[1:]:
        k.assign(whole, kind.better(k, other, whole))
    best = k.variable("best", k.block_reduce("extreme", kind.reduction, whole, 1, 1))
    first = k.variable("first", none)
    for at, (value, step) in enumerate(zip(extremes, steps, strict=True)):
        lanes = ir.Broadcast(step.type, Const(at * width), 1)
        has_best = k.let(f"has_best{at}", k.call("equal", value, k.broadcast(best, width)))
        index = k.let(f"index{at}", k.call("add", step, lanes))
        k.accumulate(first, "min", k.let(f"place{at}", k.select(has_best, index, none)))
    return best, k.variable("best_index", k.block_reduce("first_index", "min", first, 1, 1))


def _find_nan(k: KernelBuilder, begin: Expr, best: Var, best_index: Var) -> None:
    """The first NaN of a row that has one."""
    k.assign(best_index, 0)
    k.assign(best, k.load(k.inputs[0], begin))
    with k.repeat(k.call("equal", best, best)):
        k.assign(best_index, best_index + 1)
        k.assign(best, k.load(k.inputs[0], begin + best_index))


def _any_nan(k: KernelBuilder, vectors: Sequence[Expr]) -> Expr:
    """Whether any of some vectors has a NaN, by lane."""
    # Joined first, because one comparison tells whether either of its sides is a NaN.
    return _joined(k, [k.call("not_equal", vector, vector) for vector in vectors])


def _joined(k: KernelBuilder, flags: list[Expr]) -> Expr:
    """Whether any of some flags is true, by lane."""
    while len(flags) > 1:
        flags = [k.call("logical_or", a, b) for a, b in zip(flags[::2], flags[1::2], strict=True)]
    return flags[0]


def _columns_on_cpu(kind: _Extreme, capabilities: Capabilities) -> KernelSource:
    """A task for neighbouring columns, which loops over rows."""
    length, inner, width = kind.length, kind.inner, min(kind.inner, _WIDEST)
    parts = -(-inner // width)
    tasks, k = Tasks(kind.outer * parts, capabilities), kind.builder("extreme_of_columns", capabilities)
    x = k.inputs[0]
    with tasks.each(k) as task:
        start = k.let("start", task % parts * width)
        count = k.let("count", k.call("minimum", inner - start, width))
        begin = k.let("begin", task // parts * (length * inner) + start)
        bests, indices = k.registers("bests", kind.loaded, width), k.registers("indices", "int32", width)
        with k.loop("j", 0, count) as j:
            k.store(bests, j, k.load(x, begin + j))
            k.store(indices, j, 0)
        with k.loop("i", 1, length) as i:
            row = k.pointer("row", x, begin + i * inner)
            with k.loop("j", 0, count) as j:
                value, best = k.let("value", k.load(row, j)), k.let("best", k.load(bests, j))
                wins = k.let("wins", kind.wins(k, value, best))
                k.store(bests, j, k.select(wins, value, best))
                k.store(indices, j, k.select(wins, i, k.load(indices, j)))
        with k.loop("j", 0, count) as j:
            k.store(k.outputs[0], task // parts * inner + start + j, k.load(indices, j))
    return k.source(tasks.grid, tasks.group)
