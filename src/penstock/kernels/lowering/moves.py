"""Primitives that move items: what a fused kernel computes for slices, padding, concatenations and look-ups.

Each function gives the value of a node at coordinates, by the emitter that is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.fusion.index import ZERO, Coords, Index, flat, variable
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Node, Shape
from penstock.kernels import ir
from penstock.kernels.lowering.values import (
    BorderCrossed,
    LanesImpossible,
    Value,
    affine,
    computed_dtype,
    merged,
)

if TYPE_CHECKING:
    from penstock.kernels.lowering.emitter import Emitter

_FEW_PARTS = 4  # of a concatenation, of which a CPU reads all and selects one


def pad(emitter: Emitter, node: Node, coords: Coords) -> Value:
    """An item of a padded array: 0 outside of the slices."""
    source, inside = node.inputs[0], []
    conditions: list[tuple[ir.Expr, int]] = []
    masks: list[tuple[ir.Expr, int]] = []  # of lanes
    for index, (start, count, step) in zip(coords, node.attributes["slices"], strict=True):
        first = start if step > 0 else start + (count - 1) * step
        extent = (count - 1) * abs(step) + 1
        digits = _digits(emitter, index + Index((), -first), abs(step))
        if digits is not None:
            condition, moved, own_depth = _inside(emitter, digits[0], 0, count)
            on, _, on_depth = _of_lanes(emitter, digits[1], 0, 1) or _inside(emitter, digits[1], 0, 1)
            (masks if on.type.width > 1 else conditions).append((on, on_depth))
        else:
            condition, moved, own_depth = _inside(emitter, index, first, extent)
        if abs(step) > 1 and digits is None:
            on, moved = _on_step(emitter, moved, abs(step))
            own_depth = max(own_depth, emitter.index(moved)[1])
            conditions.append((on, own_depth))
        conditions.append((condition, own_depth))
        inside.append(moved if step > 0 else moved * -1 + Index((), count - 1))
    if any(condition == ir.FALSE for condition, _ in conditions):
        return emitter.let(ir.Broadcast(ir.Type(computed_dtype(node)), ir.Const(0)), 0)
    with emitter.masked(*conditions):
        value = emitter.value(source, tuple(inside))
    real = [condition for condition, _ in conditions if condition != ir.TRUE]
    if not real and not masks:
        return value
    zero = emitter.let(ir.Broadcast(value.type, ir.Const(0)), 0)
    for mask, own_depth in masks:
        value = emitter.select(mask, own_depth, value, zero)
    return emitter.select(ir.all_of(real), max(d for _, d in conditions), value, zero) if real else value


def pad_at(emitter: Emitter, node: Node, coords: Coords) -> Value:
    """The same where some starts of the slices are arguments."""
    moved = list(coords)
    for axis, start in _starts(emitter, node, node.shape):
        moved[axis] += start * -1
    return pad(emitter, node, tuple(moved))


def slice_at(emitter: Emitter, node: Node, coords: Coords) -> Value:
    """An item of a slice some of whose starts are arguments."""
    source, slices = node.inputs[0], node.attributes["slices"]
    moved = [at * n + Index((), start) for at, (start, _, n) in zip(coords, slices, strict=True)]
    for axis, start in _starts(emitter, node, source.shape):
        moved[axis] += start
    return emitter.value(source, tuple(moved))


def _starts(emitter: Emitter, node: Node, shape: Shape) -> Iterator[tuple[int, Index]]:
    """The starts that are arguments, with their axes, of slices of a shape."""
    for given, axis in zip(node.inputs[1:], node.attributes["axes"], strict=True):
        _, count, step = node.attributes["slices"][axis]
        least, reach = emitter.value(given, ()), (count - 1) * step
        first = emitter.integer(least.var, least.depth, shape[axis] - abs(reach))
        yield axis, first + Index((), max(-reach, 0))


def _digits(emitter: Emitter, index: Index, step: int) -> tuple[Index, Index] | None:
    """An index divided by a step: quotient and remainder, where variables tell them on a CPU."""
    if step == 1 or not emitter.vectors:
        return None
    whole, part = divmod(index.constant, step)
    quotient = Index(tuple((name, n // step) for name, n in index.terms if n % step == 0), whole)
    remainder = Index(tuple((name, n) for name, n in index.terms if n % step), part)
    low, high = emitter.variables.bounds(remainder)
    return (quotient, remainder) if low >= 0 and high < step else None


def _on_step(emitter: Emitter, index: Index, step: int) -> tuple[ir.Expr, Index]:
    """Whether an index is a multiple of a step, and the quotient."""
    number, depth, lane_step = emitter.index(index)
    if lane_step:
        raise LanesImpossible
    length = emitter.variables.bounds(index)[1] // step + 1
    return (number % step).eq(0), emitter.integer(number // step, depth, length)


def concat(emitter: Emitter, node: Node, coords: Coords) -> Value:
    """An item of a concatenation."""
    axis, start = node.attributes["axis"], 0
    result, pointed = _by_pointer(emitter, node, coords)
    for at, part in enumerate(node.inputs):
        length = part.shape[axis]
        if not length or at in pointed:
            start += length
            continue
        condition, moved, depth = _of_lanes(emitter, coords[axis], start, length) or _inside(
            emitter, coords[axis], start, length
        )
        start += length
        if condition == ir.FALSE:
            continue
        with emitter.masked((condition, depth)):
            value = emitter.value(part, (*coords[:axis], moved, *coords[axis + 1 :]))
        if result is None or condition == ir.TRUE:
            result = value
        else:
            result = emitter.select(condition, depth, value, result)
    assert result is not None
    return result


def _by_pointer(emitter: Emitter, node: Node, coords: Coords) -> tuple[Value | None, set[int]]:
    """On a CPU, an item of the inputs of which whole rows are read, and which of the inputs these are.

    A pointer into the row's input is chosen once for the row, so that no other is read.
    """
    axis, start, pointer = node.attributes["axis"], 0, ""
    pointed: set[int] = set()
    inner = Index((), 0)
    if not emitter.vectors or len(node.inputs) <= _FEW_PARTS or emitter.index(coords[axis])[1:] != (0, 0):
        return None, pointed
    for at, part in enumerate(node.inputs):
        first, start = start, start + part.shape[axis]
        if part not in emitter.group.inputs or part.dtype in HALF_PRECISION or not part.size:
            continue
        inside, moved, _ = _inside(emitter, coords[axis], first, part.shape[axis])
        if inside == ir.FALSE:
            continue
        # The first is read in rows of none of them too, so it is not read out of bounds.
        own = coords[axis] + Index((), -first) if pointer else moved
        place = flat((*coords[:axis], own, *coords[axis + 1 :]), part.shape)
        emitter.used.add(place)
        whole = merged(place, emitter.merges)
        near = Index(tuple(term for term in whole.terms if emitter.index(variable(term[0]))[1]), 0)
        if pointer and near != inner:
            continue
        number, stored = emitter.group.inputs.index(part), str(part.dtype)
        emitter.loads.setdefault(number, set()).add((emitter.stage, place))
        choice = (inside, pointer) if pointer and inside != ir.TRUE else (None, "")
        pointer, inner = emitter.name("part"), near
        offset = affine(whole + near * -1)
        emitter.bodies[0].append(ir.Pointer(pointer, f"in{number}", stored, offset, *choice))
        pointed.add(at)
    value = emitter.load(pointer, computed_dtype(node), str(node.dtype), inner) if pointed else None
    return value, pointed


def gather(emitter: Emitter, node: Node, coords: Coords) -> Value:
    """An item of the rows at an index."""
    source, index = node.inputs
    number = emitter.value(index, coords[: index.ndim])
    if number.type.width > 1:
        raise LanesImpossible
    length = source.shape[0]
    # An index out of range must not read outside of the buffer.
    row = emitter.integer(ir.Clamp(number.var, ir.Const(length), ir.Const(length - 1)), number.depth, length)
    return emitter.value(source, (row, *coords[index.ndim :]))


def _inside(emitter: Emitter, index: Index, start: int, count: int) -> tuple[ir.Expr, Index, int]:
    """Whether an index is in a range of an axis, the index in the range (0 outside), and the depth."""
    moved = index + Index((), -start)
    low, high = emitter.variables.bounds(moved)
    if low >= 0 and high < count:
        return ir.TRUE, moved, 0
    if high < 0 or low >= count:
        return ir.FALSE, ZERO, 0
    number, depth, step = emitter.index(moved)
    if step:
        others = [factor for name, factor in index.terms if not emitter.lane_steps.get(name)]
        whole = step == 1 and all(n % emitter.lanes == 0 for n in (start, count, index.constant, *others))
        if not whole:
            _cross(emitter, moved, count)
    inside = emitter.integer((number >= 0) & (number < count), depth, 2)
    condition = ir.Var(inside.terms[0][0], ir.BOOL)
    return (
        condition,
        emitter.integer(ir.Select(ir.INT, condition, number, ir.Const(0)), depth, count, step),
        depth,
    )


def _of_lanes(emitter: Emitter, index: Index, start: int, length: int) -> tuple[ir.Expr, Index, int] | None:
    """The same as `_inside` where lanes differ in it: of a part that has a single item along the axis."""
    low, high = emitter.variables.bounds(index)
    if not emitter.vectors or length != 1 or not low <= start <= high or low == high:
        return None
    if not emitter.index(index)[2]:
        return None
    number = emitter.number(index, "int32")
    place = emitter.widened(Value(ir.Const(start), 0), emitter.lanes)
    same = ir.Call(ir.Type("bool", emitter.lanes), "equal", (number.var, place.var), number.type)
    return emitter.let(same, number.depth).var, ZERO, number.depth


def _cross(emitter: Emitter, index: Index, count: int) -> None:
    """Refuse vectors that could be inside a range in some of their lanes only."""
    index = merged(index, emitter.merges)
    if len(index.terms) == 1 and index.terms[0][1] == 1:
        raise BorderCrossed(index.terms[0][0], (-index.constant, count - index.constant))
    raise LanesImpossible
