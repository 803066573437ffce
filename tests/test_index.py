"""Indices through views, evaluated with concrete values and compared with NumPy's views."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_graph import at, evaluate

from penstock.fusion.index import (
    ZERO,
    Coords,
    Index,
    SplitNeeded,
    Variables,
    flat,
    source_coords,
    unflatten,
    variable,
)
from penstock.fusion.views import operand_index
from penstock.graph import elementwise, reducing, shaping
from penstock.graph.node import Node, Shape

few = settings(max_examples=100, deadline=None, derandomize=True)


def numbered(shape: Shape) -> Node:
    """A node whose items are their flat indices."""
    return at(np.arange(math.prod(shape)).reshape(shape))


class Loops:
    """Variables of nested loops over a shape, some of them split, and all their values at once."""

    def __init__(self, shape: Shape, splits: list[tuple[str, int]], splittable: bool = True) -> None:
        lengths: dict[str, int] = {}
        self.coords: Coords = ()
        for axis, length in enumerate(shape):
            parts = [(f"a{axis}", length)] if length > 1 else []
            for name, inner in splits:
                if name in dict(parts):
                    where = [part for part, _ in parts].index(name)
                    outer = parts[where][1] // inner
                    parts[where : where + 1] = [(f"{name}o", outer), (f"{name}i", inner)]
            index, stride = ZERO, 1
            for name, n in reversed(parts):
                index += variable(name) * stride
                stride *= n
            lengths.update(parts)
            self.coords += (index,)
        self.variables = Variables(lengths, splittable)
        counts = np.indices(tuple(lengths.values())).reshape(len(lengths), math.prod(shape))
        self.values = dict(zip(lengths, counts, strict=True))
        self.size = math.prod(shape)

    def value(self, index: Index) -> np.ndarray:
        """What an index is in every turn of the loops, in their order."""
        total = np.full(self.size, index.constant)
        for name, factor in index.terms:
            if name not in self.values:
                whole, operation, divisor = self.variables.computed[name]
                numbers = self.value(whole)
                assert numbers.min() >= 0
                self.values[name] = numbers // divisor if operation == "/" else numbers % divisor
            total = total + self.values[name] * factor
        low, high = self.variables.bounds(index)
        assert low <= total.min()
        assert total.max() <= high
        return total


def looked_at(view: Node, source: Node, loops: Loops) -> np.ndarray:
    """The numbers in `source` of a view's items, by the rules of indices."""
    coords = loops.coords
    while view is not source:
        coords = source_coords(view, coords, loops.variables)
        view = view.inputs[0]
        for index, length in zip(coords, view.shape, strict=True):
            numbers = loops.value(index)
            assert numbers.min() >= 0
            assert numbers.max() < length
    return loops.value(flat(coords, source.shape))


def split_until_plain(view: Node, source: Node) -> tuple[np.ndarray, Loops]:
    """As a kernel is lowered: restarted whenever a variable has to be split."""
    splits: list[tuple[str, int]] = []
    while True:
        loops = Loops(view.shape, splits)
        try:
            return looked_at(view, source, loops), loops
        except SplitNeeded as needed:
            splits.append((needed.name, needed.inner))
        length = loops.variables.lengths[splits[-1][0]]
        assert 1 < splits[-1][1] < length
        assert length % splits[-1][1] == 0
        assert len(splits) < 20


@st.composite
def view_chains(draw: st.DrawFn) -> tuple[Node, Node]:
    """A view of a view of ... a node, and that node."""
    lengths = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])
    node = source = numbered(tuple(draw(st.lists(lengths, max_size=4))))
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["reshape", "permute", "slice", "expand"]))
        if kind == "reshape":
            node = shaping.reshape(node, draw(shapes_of_size(node.size)))
        elif kind == "permute":
            node = shaping.permute(node, tuple(draw(st.permutations(range(node.ndim)))))
        elif kind == "slice":
            node = shaping.slice_(node, tuple(draw(parts(length)) for length in node.shape))
        elif node.size <= 600:
            wide = tuple(n if n > 1 else draw(st.integers(1, 4)) for n in node.shape)
            node = reducing.expand(node, wide)
    return node, source


@st.composite
def shapes_of_size(draw: st.DrawFn, size: int) -> Shape:
    shape: list[int] = []
    while size > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from([d for d in range(2, size + 1) if size % d == 0])))
        size //= shape[-1]
    shape += [size] if size > 1 else []
    if draw(st.booleans()):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return tuple(shape)


@st.composite
def parts(draw: st.DrawFn, length: int) -> tuple[int, int, int]:
    step = draw(st.sampled_from([1, 1, 2, 3, -1, -2]))
    count = draw(st.integers(1, -(-length // abs(step))))
    reach = (count - 1) * abs(step)
    start = draw(st.integers(0, length - 1 - reach))
    return start + (reach if step < 0 else 0), count, step


@few
@given(view_chains())
def test_views_lead_to_where_numpy_finds_the_items(chain: tuple[Node, Node]) -> None:
    view, source = chain
    result, _ = split_until_plain(view, source)
    np.testing.assert_array_equal(result, evaluate(view).reshape(-1))


@few
@given(view_chains())
def test_without_splits_quotients_are_computed(chain: tuple[Node, Node]) -> None:
    view, source = chain
    loops = Loops(view.shape, [], splittable=False)
    np.testing.assert_array_equal(looked_at(view, source, loops), evaluate(view).reshape(-1))


def test_a_transpose_that_is_reshaped_splits_a_variable() -> None:
    x = numbered((4, 6))
    view = shaping.reshape(shaping.permute(x, (1, 0)), (24,))
    with pytest.raises(SplitNeeded) as needed:
        looked_at(view, x, Loops(view.shape, []))
    assert (needed.value.name, needed.value.inner) == ("a0", 4)
    result, loops = split_until_plain(view, x)
    assert loops.variables.lengths == {"a0o": 6, "a0i": 4}
    assert result.tolist() == evaluate(view).tolist()


def test_what_no_split_makes_even_is_computed() -> None:
    x = numbered((5, 6))
    part = shaping.slice_(shaping.reshape(shaping.permute(x, (1, 0)), (30,)), ((1, 28, 1),))
    result, loops = split_until_plain(part, x)
    assert [operation for _, operation, _ in loops.variables.computed.values()] == ["/", "%"]
    assert result.tolist() == evaluate(part).tolist()


def test_reshapes_touch_only_the_axes_that_change() -> None:
    x = numbered((3, 4, 5))
    coords = Loops((3, 2, 2, 5), []).coords
    inside = source_coords(shaping.reshape(x, (3, 2, 2, 5)), coords, Variables({}))
    assert inside == (coords[0], coords[1] * 2 + coords[2], coords[3])


@few
@given(
    st.lists(st.tuples(st.integers(2, 9), st.integers(-12, 12)), max_size=4),
    st.integers(0, 30),
    st.integers(1, 12),
    st.booleans(),
)
@example([(6, 1)], 0, 3, True)
def test_division(factors: list[tuple[int, int]], extra: int, divisor: int, splittable: bool) -> None:
    shape = tuple(length for length, _ in factors)
    loops = Loops(shape, [], splittable)
    index = Index((), extra)
    for value, (length, factor) in zip(loops.coords, factors, strict=True):
        index += value * factor + Index((), max(0, -factor * (length - 1)))
    numbers = loops.value(index)
    try:
        quotient, remainder = loops.variables.divide(index, divisor)
    except SplitNeeded:
        assert splittable
        return
    np.testing.assert_array_equal(loops.value(quotient), numbers // divisor)
    np.testing.assert_array_equal(loops.value(remainder), numbers % divisor)
    assert loops.variables.divide(index, divisor) == (quotient, remainder), "equal questions, one variable"


@few
@given(shapes_of_size(24))
def test_flat_and_unflatten_are_opposites(shape: Shape) -> None:
    loops = Loops((24,), [], splittable=False)
    coords = unflatten(loops.coords[0], shape, loops.variables)
    np.testing.assert_array_equal(loops.value(flat(coords, shape)), np.arange(24))
    for index, expected in zip(coords, np.indices(shape).reshape(len(shape), -1), strict=True):
        np.testing.assert_array_equal(loops.value(index), expected)


def test_sums_of_variables() -> None:
    x, y = variable("x"), variable("y")
    index = x * 3 + y + Index((), 2)
    assert (index.factor("x"), index.factor("z")) == (3, 0)
    assert index + x * -3 + y * -1 == Index((), 2)
    assert x + y == y + x
    assert index.replaced({"x": y * 2 + Index((), 1)}) == y * 7 + Index((), 5)
    assert [str(expression) for expression in (ZERO, x, x * 2, index)] == [
        "0",
        "x",
        "(x * 2)",
        "(x * 3 + y + 2)",
    ]
    assert eval(str(x * -2 + y * -1), {"x": 5, "y": 3}) == -13


def test_operands_of_matrices_are_read_where_they_lie() -> None:
    x = numbered((2, 3, 4, 5))
    heads = shaping.permute(shaping.slice_(x, ((0, 2, 1), (2, 3, -1), (1, 2, 2), (0, 5, 1))), (0, 2, 3, 1))
    result = operand_index(heads, ())
    assert result is not None
    node, index = result
    assert node is x
    loops = Loops(heads.shape, [])
    names = {"b0": "a0", "b1": "a1", "i": "a2", "j": "a3"}
    moved = index.replaced({old: variable(new) for old, new in names.items()})
    np.testing.assert_array_equal(loops.value(moved), evaluate(heads).reshape(-1))


def test_operands_that_no_strides_describe_are_written_out() -> None:
    x = numbered((4, 6))
    assert operand_index(shaping.reshape(shaping.permute(x, (1, 0)), (3, 8)), ()) is None
    assert operand_index(elementwise.full((4, 6), np.dtype(np.float32), 1.0), ()) is None
    wide = reducing.expand(numbered((1, 6)), (4, 6))
    result = operand_index(wide, ())
    assert result is not None
    assert result[1] == variable("j")


def test_views_of_one_item() -> None:
    x = numbered(())
    view = shaping.reshape(reducing.expand(shaping.reshape(x, (1, 1)), (2, 3)), (6,))
    result, loops = split_until_plain(view, x)
    assert result.tolist() == [0] * 6
    assert not loops.variables.computed
