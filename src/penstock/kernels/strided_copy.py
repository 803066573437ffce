"""A copy through views as one kernel for all shapes: lengths and strides are its arguments.

A kernel for a shape is faster. This one exists before a shape is known.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.fusion.index import SplitNeeded
from penstock.graph.node import Kind
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.dialects import dialect_of
from penstock.kernels.lowering.loop_nest import GROUP_THREADS
from penstock.kernels.lowering.map_loops import MapLoops
from penstock.kernels.lowering.values import merged
from penstock.kernels.source import WORD
from penstock.kernels.templates.launches import CPU_SHARES, Launch, Lowering, is_cpu

_AXES = 6
_MOST_ITEM_BYTES = 8


class _Strides(NamedTuple):
    """What a copy reads for each item that it writes, in order."""

    lengths: tuple[int, ...]  # of `_AXES` axes
    strides: tuple[int, ...]  # along them
    offset: int


def strided_copy(group: Group, capabilities: Capabilities, name: str) -> Lowering | None:
    """The copy of a group's input through views; None if it is none, or not of so many axes."""
    nbytes = group.outputs[0].dtype.itemsize
    # Items that share a word are written by a kernel that has all of the word's.
    alone = nbytes >= WORD or not dialect_of(capabilities).word_access
    read = _strides(group, capabilities) if alone and nbytes <= _MOST_ITEM_BYTES and _is_copy(group) else None
    if read is None:
        return None
    rows = math.prod(read.lengths[:-1])
    dtype = f"uint{8 * nbytes}"
    k = KernelBuilder(name, capabilities, [dtype], [dtype], ["int32"] * (2 * _AXES + 3))
    if is_cpu(capabilities):
        share = -(-rows // (CPU_SHARES * capabilities.compute_units))
        _copy_rows(k)
        source, counts = k.source((-(-rows // share),), (1,)), (rows, share)
    else:
        size = rows * read.lengths[-1]
        _copy_item(k)
        source, counts = k.source((-(-size // GROUP_THREADS),), (GROUP_THREADS,)), (size, 0)
    scalars = (*read.lengths, *read.strides, read.offset, *counts)
    return Lowering((Launch(source, (0, 1), scalars),), may_alias=((),))


def _is_copy(group: Group) -> bool:
    views = all(node.primitive.kind is Kind.VIEW for node in group.nodes)
    return views and len(group.outputs) == len(group.inputs) == 1


def _strides(group: Group, capabilities: Capabilities) -> _Strides | None:
    """The axes of the copy, as few as possible; None if they are too many, or indices have to be divided."""
    splits: list[tuple[str, int]] = []
    while True:
        try:
            single = MapLoops(group, capabilities, 1, splits, [])
            single.build()
            break
        except SplitNeeded as needed:
            splits.append((needed.name, needed.inner))
    if single.emitter.variables.computed:
        return None
    merges = single.merges()
    lengths = MapLoops(group, capabilities, 1, splits, merges).axis_lengths()
    ((_, read),) = single.emitter.loads[0]
    index, more = merged(read, merges), _AXES - len(lengths)
    if more < 0:
        return None
    strides = (0,) * more + tuple(index.factor(axis) for axis in lengths)
    return _Strides((1,) * more + tuple(lengths.values()), strides, index.constant)


def _copy_rows(k: KernelBuilder) -> None:
    """A CPU's task copies neighbouring rows."""
    rows, share = k.scalars[-2:]
    length, stride = k.scalars[_AXES - 1], k.scalars[2 * _AXES - 1]
    (target,), (source,) = k.outputs, k.inputs
    first = k.let("first", k.group() * share)
    last = k.let("last", k.call("minimum", first + share, rows))
    with k.loop("row", first, last) as row:
        start, begin = k.let("start", _read(k, row, _AXES - 1)), k.let("begin", row * length)
        with k.when(stride.eq(1)), k.loop("item", 0, length) as item:
            k.store(target, begin + item, k.load(source, start + item))
        with k.otherwise(), k.loop("item", 0, length) as item:
            k.store(target, begin + item, k.load(source, start + item * stride))


def _copy_item(k: KernelBuilder) -> None:
    """A GPU's thread copies an item."""
    (target,), (source,) = k.outputs, k.inputs
    item = k.let("item", k.group() * GROUP_THREADS + k.thread)
    with k.when(item < k.scalars[-2]):
        k.store(target, item, k.load(source, _read(k, item, _AXES)))


def _read(k: KernelBuilder, number: ir.Expr, axes: int) -> ir.Expr:
    """The index that is read for the first item along the axes behind the first `axes`."""
    lengths, strides = k.scalars[:_AXES], k.scalars[_AXES : 2 * _AXES]
    index: ir.Expr = k.scalars[2 * _AXES]
    for axis in reversed(range(axes)):
        index = index + (number % lengths[axis] if axis else number) * strides[axis]
        number = k.let(k.fresh("outer"), number // lengths[axis]) if axis else number
    return index
