"""Argmax and argmin: the index of the first extreme item; a NaN beats every number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import UNROLLED
from penstock.kernels.ir.expressions import BOOL, Const, Expr, Var
from penstock.kernels.source import KernelSource, item_size
from penstock.kernels.templates.launches import (
    SHORT_ROW,
    Launch,
    Lowering,
    Tasks,
    along,
    group_size,
    is_cpu,
    one_launch,
)

_WIDEST = 256  # columns of a CPU's task
_FEW = 8  # columns; fewer are processed separately
_VECTORS = 4  # of a row, compared independently, so that none waits for another
_EACH = 16  # items of a row per thread of a GPU: the barriers after them cost as much
_PART = 1024  # items of a part of a row, or more
_MOST_PARTS = 512  # of a row
_GROUPS = 2  # workgroups for each compute unit of a GPU; rows are divided where there are fewer
_SEGMENT = 512  # items of a row that are searched a second time if they hold the extreme


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
    def width(self) -> int:
        """Of a CPU's vectors."""
        return 8 if np.dtype(self.dtype).itemsize >= 4 else 16

    @property
    def step(self) -> int:
        """Items of a row that a CPU compares at a time."""
        return self.width * _VECTORS

    @property
    def floats(self) -> bool:
        """Whether there may be NaNs."""
        return self.dtype.startswith("float")

    @property
    def reduction(self) -> str:
        """The reduction that gives the extreme value."""
        return "max" if self.largest else "min"

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
        rows, few = kind.inner == 1 and kind.length >= kind.step, kind.inner < _FEW
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
    k = KernelBuilder("extreme_of_part", capabilities, [kind.dtype, "int32"], [kind.dtype])
    begin = k.let("begin", k.group() // parts * kind.length)
    start = k.let("start", k.group() % parts * share)
    stop = k.let("stop", k.call("minimum", start + share, kind.length))
    best, best_index = _best(kind, k, begin, start, stop, threads)
    with k.when(k.thread.eq(0)):
        k.store(k.outputs[0], k.group(), best)
        k.store(k.outputs[1], k.group(), best_index)
    of_parts = k.source((kind.outer * parts,), (threads,))
    k = KernelBuilder("extreme_of_parts", capabilities, ["int64"], [kind.dtype, "int32"])
    place = k.let("place", k.group() * parts + k.call("minimum", k.thread, parts - 1))
    best = k.variable("best", k.load(k.inputs[0], place))
    best_index = k.variable("best_index", k.load(k.inputs[1], place))
    _compare(kind, k, best, best_index, compared)
    with k.when(k.thread.eq(0)):
        k.store(k.outputs[0], k.group(), best_index)
    joined = k.source((kind.outer,), (compared,))
    scratch = (kind.outer * parts * item_size(kind.dtype), kind.outer * parts * 4)
    return Lowering((Launch(of_parts, (2, 3, 1)), Launch(joined, (0, 2, 3), operations=0)), scratch)


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
    bests, indices = k.shared("bests", kind.dtype, threads), k.shared("indices", "int32", threads)
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
    """A task for each row. The extremes of segments are computed in vectors; the best is searched for."""
    tasks, k = Tasks(kind.outer, capabilities), kind.builder("extreme_of_rows", capabilities)
    x, length = k.inputs[0], kind.length
    whole = length // kind.step * kind.step
    with tasks.each(k) as task:
        begin = k.let("begin", task * length)
        best = k.variable("best", k.load(x, begin))
        best_index = k.variable("best_index", 0)  # at first that of the segment's first item
        with k.loop("start", 0, whole, _SEGMENT) as start:
            stop = k.let("stop", k.call("minimum", start + _SEGMENT, whole))
            candidate = _segment(kind, k, begin + start, begin + stop, best)
            with k.when(kind.wins(k, candidate, best)):
                k.assign(best, candidate)
                k.assign(best_index, start)
        _search(kind, k, begin, best, best_index)
        with k.loop("i", whole, length) as i:
            value = k.let("value", k.load(x, begin + i))
            with k.when(kind.wins(k, value, best)):
                k.assign(best, value)
                k.assign(best_index, i)
        k.store(k.outputs[0], task, best_index)
    return k.source(tasks.grid, tasks.group)


def _segment(kind: _Extreme, k: KernelBuilder, start: Expr, stop: Expr, best: Expr) -> Var:
    """The extreme of the best value so far and a segment: a NaN if the segment has a NaN."""
    width, lanes = kind.width, range(_VECTORS)
    extremes = [k.variable(f"extreme{lane}", k.broadcast(best, width)) for lane in lanes]
    nans = [k.variable("nans", k.broadcast(Const(False, BOOL), width))] if kind.floats else []
    with k.loop("i", start, stop, kind.step) as i:
        vectors = [
            k.let(f"vector{lane}", k.load_vector(k.inputs[0], i + lane * width, width)) for lane in lanes
        ]
        for extreme, vector in zip(extremes, vectors, strict=True):
            k.assign(extreme, kind.better(k, vector, extreme))
        for has_nan in nans:
            # Joined first, because one comparison tells whether either of its sides is a NaN.
            any_nan = _joined(k, [k.call("not_equal", vector, vector) for vector in vectors])
            k.assign(has_nan, k.call("logical_or", has_nan, any_nan))
    for other in extremes[1:]:
        k.assign(extremes[0], kind.better(k, other, extremes[0]))
    result = k.block_reduce("candidate", kind.reduction, extremes[0], 1, 1)
    for has_nan in nans:
        with k.when(k.block_reduce("any_nan", "any", has_nan, 1, 1)):
            k.assign(result, float("nan"))
    return result


def _search(kind: _Extreme, k: KernelBuilder, begin: Expr, best: Expr, best_index: Var) -> None:
    """Increase an index to that of the first item that equals the best: by steps, then by single items."""
    x, width, step = k.inputs[0], kind.width, kind.step

    def is_best(value: Expr, best: Expr) -> Expr:
        equal = k.call("equal", value, best)
        if not kind.floats:
            return equal
        # If the best is a NaN, every NaN counts as equal; if it is not, there are no NaNs.
        return k.call("logical_or", equal, k.call("not_equal", value, value))

    k.assign(best_index, best_index - step)
    found = k.variable("found", Const(False, BOOL))
    with k.repeat(~found):
        k.assign(best_index, best_index + step)
        vectors = [
            k.let(f"vector{lane}", k.load_vector(x, begin + best_index + lane * width, width))
            for lane in range(_VECTORS)
        ]
        flags = [is_best(vector, k.broadcast(best, width)) for vector in vectors]
        any_lane = k.let("any_lane", _joined(k, flags))
        k.assign(found, k.block_reduce("any_best", "any", any_lane, 1, 1))
    item = k.variable("item", k.load(x, begin + best_index))
    with k.repeat(~is_best(item, best)):
        k.assign(best_index, best_index + 1)
        k.assign(item, k.load(x, begin + best_index))


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
        bests, indices = k.registers("bests", kind.dtype, width), k.registers("indices", "int32", width)
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
