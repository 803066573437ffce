"""The graph without a device: every primitive's gradient against finite differences, and the walks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from penstock.graph import contraction, elementwise, reducing, shaping
from penstock.graph.gradient import gradients
from penstock.graph.node import Node, leaf, topological

F64 = np.dtype(np.float64)


def evaluate(node: Node) -> np.ndarray:
    """The value of a graph whose leaves hold arrays, by NumPy references."""
    values: dict[Node, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for array in topological([node]):
            inputs = [values[parent] for parent in array.inputs]
            if array.value is not None:
                values[array] = array.value
            else:
                values[array] = np.asarray(array.primitive.reference(*inputs, **array.attributes))
            assert values[array].shape == array.shape
            assert values[array].dtype == array.dtype
    return values[node]


def at(array: np.ndarray) -> Node:
    return leaf(array, array.shape, array.dtype)


def slopes(function: Callable[..., Node], arrays: list[np.ndarray], weights: np.ndarray) -> list[np.ndarray]:
    """Central differences of the weighted sum of the result, by every item of every array."""
    results = []
    for which, array in enumerate(arrays):
        slope = np.empty(array.shape)
        for place in np.ndindex(array.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [array.copy() for array in arrays]
                moved[which][place] += step
                ends.append((evaluate(function(*map(at, moved))) * weights).sum())
            slope[place] = (ends[0] - ends[1]) / 2e-6
        results.append(slope)
    return results


def check_gradient(function: Callable[..., Node], *arrays: np.ndarray) -> None:
    leaves = [at(array) for array in arrays]
    output = function(*leaves)
    weights = np.random.default_rng(1).uniform(0.5, 1.5, output.shape)
    result = gradients(output, at(weights), leaves)
    for part, slope in zip(result, slopes(function, list(arrays), weights), strict=True):
        assert part is not None
        np.testing.assert_allclose(evaluate(part), slope, rtol=1e-4, atol=1e-6)


def sample(*shape: int, low: float = 0.3, high: float = 0.9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape)


UNARY = """negative abs_ exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh
           atanh positive"""
BINARY = "add subtract multiply divide remainder pow_ atan2 hypot logaddexp maximum minimum"


@pytest.mark.parametrize("name", UNARY.split())
def test_gradients_of_one_input(name: str) -> None:
    check_gradient(getattr(elementwise, name), sample(2, 3))


def test_gradient_of_acosh() -> None:
    check_gradient(elementwise.acosh, sample(4, low=1.5, high=3))


@pytest.mark.parametrize("name", BINARY.split())
def test_gradients_of_two_inputs(name: str) -> None:
    check_gradient(getattr(elementwise, name), sample(2, 3), sample(2, 3, low=1.0, high=1.9, seed=5))


def test_the_gradient_of_copysign_goes_to_the_size() -> None:
    sign = at(np.array([-1.0, 1.0]))
    check_gradient(lambda x: elementwise.copysign(x, sign), np.array([0.5, -0.25]))


def test_gradients_of_steps_are_nothing() -> None:
    for step in (elementwise.sign, elementwise.floor, elementwise.ceil, elementwise.trunc, elementwise.stop):
        x = at(sample(3))
        assert gradients(step(x), None, [x]) == [None]


def test_equal_items_share_the_gradient_of_a_maximum() -> None:
    x, y = at(np.array([1.0, 2.0])), at(np.array([1.0, 1.0]))
    to_x, to_y = gradients(elementwise.maximum(x, y), None, [x, y])
    assert evaluate(to_x).tolist() == [0.5, 1.0]
    assert evaluate(to_y).tolist() == [0.5, 0.0]


def test_pow_has_finite_gradients_at_zero() -> None:
    x, y = at(np.array([0.0, 0.0, 2.0])), at(np.array([2.0, 0.0, 0.0]))
    for part in gradients(elementwise.pow_(x, y), None, [x, y]):
        assert np.all(np.isfinite(evaluate(part)))


@pytest.mark.parametrize("power", [0, 1, 2, 3])
def test_pow_has_gradients_of_any_order_at_zero(power: int) -> None:
    x, y = at(np.array([0.0, 2.0])), at(np.full(2, float(power)))
    node = elementwise.pow_(x, y)
    for order in range(1, 5):
        (node,) = gradients(node, None, [x])
        exponent = max(power - order, 0)
        assert evaluate(node).tolist() == [math.perm(power, order) * item**exponent for item in (0, 2)]


def test_where_sends_the_gradient_to_the_side_taken() -> None:
    condition = at(np.array([True, False, True]))
    check_gradient(lambda x, y: elementwise.where(condition, x, y), sample(3), sample(3, seed=2))


SHAPING = {
    "reshape": lambda x: shaping.reshape(x, (3, 4)),
    "permute": lambda x: shaping.permute(x, (2, 0, 1)),
    "slice": lambda x: shaping.slice_(x, ((1, 1, 1), (2, 3, -1), (0, 1, 2))),
    "pad": lambda x: shaping.pad(x, ((1, 2, 2), (0, 3, 1), (2, 2, -1)), (5, 4, 3)),
    "concat": lambda x: shaping.concat([x, x], 1),
    "expand": lambda x: reducing.expand(shaping.reshape(x, (2, 3, 2, 1)), (2, 3, 2, 4)),
    "sum": lambda x: reducing.sum_(x, (0, 2)),
    "prod": lambda x: reducing.prod(x, (1, 2)),
    "max": lambda x: reducing.max_(x, (1,)),
    "min": lambda x: reducing.min_(x, (0, 1)),
    "cumulative_sum": lambda x: reducing.cumulative_sum(x, 1),
    "cumulative_prod": lambda x: reducing.cumulative_prod(x, 1),
    "cumulative_sum from the end": lambda x: reducing.cumulative_sum(x, 1, reverse=True),
    "cumulative_prod from the end": lambda x: reducing.cumulative_prod(x, 1, reverse=True),
}


@pytest.mark.parametrize("name", SHAPING)
def test_gradients_along_axes(name: str) -> None:
    check_gradient(SHAPING[name], sample(2, 3, 2))


def test_the_gradient_of_a_product_with_zeros() -> None:
    check_gradient(lambda x: reducing.prod(x, (0,)), np.array([[0.0, 0.0, 2.0], [3.0, 0.0, 4.0]]))


def test_the_gradient_of_cumulative_products_with_zeros() -> None:
    check_gradient(lambda x: reducing.cumulative_prod(x, 0), np.array([[2.0, 0.0], [0.0, 3.0], [4.0, 0.0]]))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradient_of_linear_recurrences(reverse: bool) -> None:
    factor = sample(2, 5, 3, seed=4)
    factor[:, 2] = 0
    check_gradient(lambda x, y: reducing.linear_recurrence(x, y, 1, reverse), sample(2, 5, 3), factor)


def test_the_gradient_of_a_long_cumulative_product_takes_few_nodes() -> None:
    x = at(np.ones(100_000))
    x.tracked = True
    (result,) = gradients(reducing.cumulative_prod(x, 0), None, [x])
    assert result is not None
    assert len(topological([result])) < 20


def test_what_has_no_gradient_says_so() -> None:
    x = at(sample(3))
    with pytest.raises(TypeError, match="nextafter has no gradient"):
        gradients(elementwise.nextafter(x, x), None, [x])


def test_gradients_of_products_and_lookups() -> None:
    check_gradient(contraction.matmul, sample(2, 3, 4), sample(2, 4, 2, seed=3))
    index = at(np.array([[0, 2], [2, 1]]))
    check_gradient(lambda x: contraction.gather(x, index), sample(3, 2))
    check_gradient(lambda x: contraction.scatter_add(x, index, 4), sample(2, 2, 3))


def test_second_order() -> None:
    x = at(np.array([0.5, 1.5]))
    (first,) = gradients(elementwise.multiply(x, elementwise.multiply(x, x)), None, [x])
    (second,) = gradients(first, None, [x])
    np.testing.assert_allclose(evaluate(second), [3.0, 9.0])


def test_shared_parts_are_walked_once_however_often_they_are_used() -> None:
    node = at(np.ones(2))
    for _ in range(200):
        node = elementwise.add(node, node)  # two to the power of 200 paths
    assert len(topological([node])) == 201
    (part,) = gradients(node, None, [topological([node])[0]])
    assert evaluate(part)[0] == 2.0**200


def test_a_deep_graph_needs_no_recursion() -> None:
    node = at(np.zeros(1))
    start = node
    for _ in range(20_000):
        node = elementwise.positive(node)
    assert len(topological([node])) == 20_001
    assert gradients(node, None, [start])[0] is not None


def test_computed_nodes_end_the_walk() -> None:
    x = at(np.ones(1))
    y = elementwise.exp(x)
    y.value = np.ones(1)
    z = elementwise.log(y)
    assert topological([z]) == [y, z]
    assert topological([z], through_values=True) == [x, y, z]
