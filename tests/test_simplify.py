"""Simplification as a pure function: fewer nodes, the same bits."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graph import at, evaluate

from penstock.graph import elementwise, reducing, shaping
from penstock.graph.node import Node, leaf, topological
from penstock.graph.simplify import simplify

F32 = np.dtype(np.float32)


def number(value: float, shape: tuple[int, ...] = (2, 3)) -> Node:
    return elementwise.full(shape, F32, value)


def x_(shape: tuple[int, ...] = (2, 3)) -> Node:
    return at(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


def count(*nodes: Node) -> int:
    return len(topological(nodes))


def test_equal_nodes_become_one() -> None:
    x = x_()
    first, second = (elementwise.exp(elementwise.add(x, number(1))) for _ in range(2))
    (product,) = simplify([elementwise.multiply(first, second)])
    assert product.inputs[0] is product.inputs[1]
    assert count(product) == 5  # x, 1, the sum, the exponential, the product


def test_outputs_share_what_they_have_in_common() -> None:
    x = x_()
    first, second = simplify([elementwise.exp(x), elementwise.negative(elementwise.exp(x))])
    assert second.inputs[0] is first


def test_a_constant_that_is_moved_is_a_constant() -> None:
    x = x_((2, 3, 4))
    moved = reducing.expand(shaping.reshape(number(5), (2, 3, 1)), (2, 3, 4))
    (node,) = simplify([elementwise.add(x, moved)])
    constant = node.inputs[1]
    assert constant.primitive is elementwise.FULL
    assert (constant.shape, constant.attributes["number"]) == ((2, 3, 4), 5)
    turned = shaping.permute(number(5), (1, 0))
    assert simplify([turned])[0].primitive is elementwise.FULL


def test_no_rule_looks_at_the_value_of_a_constant() -> None:
    x = x_()
    shapes = set()
    for value in (0.0, 1.0, 2.0, float("nan")):
        outputs = [
            elementwise.add(x, number(value)),
            elementwise.multiply(x, number(value)),
            elementwise.exp(elementwise.add(number(value), number(4))),
        ]
        simple = simplify(outputs)
        shapes.add(tuple(node.primitive.name for node in topological(simple)))
    assert len(shapes) == 1, "a program is the same for all constants"


def test_a_reduction_of_single_items_only_reshapes() -> None:
    x = x_((2, 1, 3))
    for reduction in (reducing.sum_, reducing.prod, reducing.max_, reducing.min_):
        (node,) = simplify([reduction(x, (1,))])
        assert node.primitive is shaping.RESHAPE
        assert node.inputs == (x,)
        assert node.shape == (2, 3)
    (back,) = simplify([reducing.restore(reducing.sum_(x, (1,)), x, (1,))])
    assert back is x


def test_casts_to_the_own_dtype_are_left_out() -> None:
    x = x_()
    assert simplify([Node(elementwise.CAST, (x,), {"dtype": F32})]) == [x]
    there = elementwise.cast(x, np.dtype(np.int8))
    assert simplify([elementwise.cast(there, F32)])[0].inputs[0].dtype == np.int8, "what is lost stays lost"


def test_constants_are_told_apart_by_their_bits() -> None:
    x = at(np.ones((2, 3), np.float32))
    outputs = [elementwise.divide(x, number(value)) for value in (0.0, -0.0)]
    first, second = simplify(outputs)
    assert first is not second
    assert np.array_equal(np.signbit(evaluate(first)), ~np.signbit(evaluate(second)))


def test_what_changes_nothing_is_left_out() -> None:
    x = x_()
    node = elementwise.stop(elementwise.positive(shaping.reshape(shaping.reshape(x, (6,)), (2, 3))))
    assert simplify([node]) == [x]
    twice = shaping.permute(shaping.permute(x, (1, 0)), (1, 0))
    assert simplify([twice]) == [x]
    y = x_((2, 3, 4))
    (joined,) = simplify([shaping.permute(shaping.permute(y, (1, 2, 0)), (1, 2, 0))])
    assert joined.inputs == (y,)
    assert joined.attributes["axes"] == (2, 0, 1)


def test_successive_paddings_are_one() -> None:
    x = x_((2, 3))
    spread = shaping.pad(x, ((0, 2, 1), (1, 3, 2)), (2, 6))
    alone = shaping.reshape(spread, (2, 1, 6))
    whole = shaping.pad(alone, ((1, 2, 2), (0, 1, 1), (2, 6, 1)), (5, 1, 9))
    (simple,) = simplify([whole])
    assert [node.primitive.name for node in topological([simple]) if node.value is None] == ["reshape", "pad"]
    np.testing.assert_array_equal(evaluate(simple), evaluate(whole))


def test_computed_nodes_stay() -> None:
    x = x_()
    y = elementwise.exp(x)
    y.set_value(np.ones((2, 3), np.float32))
    (node,) = simplify([elementwise.log(y)])
    assert node.inputs == (y,)


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_random_graphs_keep_their_bits(data: st.DataObject) -> None:
    shape = (2, 3)
    nodes = [leaf(data.draw(_array), shape, F32), number(0.5), number(-1.0)]
    for _ in range(data.draw(st.integers(1, 40))):
        a, b = (data.draw(st.sampled_from(nodes)) for _ in range(2))
        nodes.append(
            data.draw(
                st.sampled_from(
                    [
                        lambda a, b: elementwise.add(a, b),
                        lambda a, b: elementwise.multiply(a, b),
                        lambda a, b: elementwise.tanh(a),
                        lambda a, b: elementwise.stop(a),
                        lambda a, b: elementwise.where(elementwise.less(a, b), a, b),
                        lambda a, b: shaping.permute(shaping.permute(a, (1, 0)), (1, 0)),
                        lambda a, b: shaping.reshape(shaping.reshape(a, (3, 2)), shape),
                        lambda a, b: reducing.restore(reducing.sum_(a, (1,)), a, (1,)),
                    ]
                )
            )(a, b)
        )
    outputs = nodes[-3:]
    simple = simplify(outputs)
    assert count(*simple) <= count(*outputs)
    for before, after in zip(outputs, simple, strict=True):
        np.testing.assert_array_equal(evaluate(before), evaluate(after))


_array = st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6).map(
    lambda numbers: np.array(numbers, np.float32).reshape(2, 3)
)
