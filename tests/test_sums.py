"""Long sums whose terms are joined, sums over axes that lie apart, and the borders of padded rows."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graph import at, evaluate

import penstock as ps
from penstock.graph.contraction import MATMUL, matmul
from penstock.graph.elementwise import add, exp
from penstock.graph.node import Node, topological
from penstock.graph.reducing import sum_
from penstock.graph.shaping import CONCAT, PAD, pad, permute, reshape
from penstock.graph.sums import join_sums
from penstock.runtime import Device


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def kinds(*nodes: Node) -> list[str]:
    return [node.primitive.name for node in topological(nodes)]


def padded(start: int, count: int, axis: int, whole: int, seed: int) -> Node:
    shape, slices = [2, 3, 4], [(0, 2, 1), (0, 3, 1), (0, 4, 1)]
    shape[axis], slices[axis] = count, (start, count, 1)
    part, result = tuple(shape), tuple(whole if at == axis else n for at, n in enumerate(shape))
    return pad(at(normal(*part, seed=seed)), tuple(slices), result)


@settings(deadline=None)
@given(st.integers(0, 2), st.lists(st.integers(1, 4), min_size=2, max_size=5), st.randoms())
def test_parts_that_follow_one_another_are_concatenated(axis: int, counts: list[int], random: object) -> None:
    starts = np.cumsum([0, *counts])
    parts = [
        padded(int(start), int(end - start), axis, sum(counts), number)
        for number, (start, end) in enumerate(pairwise(starts))
    ]
    random.shuffle(parts)  # type: ignore[attr-defined]
    total = reduce(add, parts)
    (joined,) = join_sums([total])
    assert joined.primitive is CONCAT
    assert PAD.name not in kinds(joined)
    np.testing.assert_array_equal(evaluate(joined), evaluate(total))


@pytest.mark.parametrize("second", [(1, 3), (3, 2), (2, 2)], ids=["overlap", "gap before", "gap after"])
def test_other_parts_are_added(second: tuple[int, int]) -> None:
    total = add(padded(0, 2, 1, 5, seed=0), padded(*second, 1, 5, seed=1))
    (same,) = join_sums([total])
    assert kinds(same) == kinds(total)
    np.testing.assert_array_equal(evaluate(same), evaluate(total))


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_few_steps_are_a_single_product(transposed: bool) -> None:
    products = []
    for step in range(5):
        left = at(normal(3, 8, seed=step) if transposed else normal(8, 3, seed=step))
        right = at(normal(3, 9, seed=10 + step))
        products.append(matmul(permute(left, (1, 0)) if transposed else left, right))
    total = reduce(add, [*products, at(normal(8, 9))])
    (joined,) = join_sums([total])
    assert kinds(joined).count(MATMUL.name) == 1
    np.testing.assert_allclose(evaluate(joined), evaluate(total), rtol=1e-5, atol=1e-5)


def test_what_is_used_elsewhere_or_long_stays() -> None:
    def sum_of(depth: int) -> tuple[list[Node], Node]:
        sides = [(at(normal(8, depth, seed=n)), at(normal(depth, 9, seed=n))) for n in range(5)]
        products = [matmul(*pair) for pair in sides]
        return products, reduce(add, products)

    products, total = sum_of(3)
    outputs = [total, *map(exp, products[:3])]
    assert kinds(*join_sums(outputs)).count(MATMUL.name) == 5
    _, total = sum_of(16)  # copying the operands would take longer than adding up
    assert kinds(*join_sums([total])).count(MATMUL.name) == 5


def test_a_weight_and_its_inputs_along_a_sequence(device: Device) -> None:
    arrays = normal(6, 2, 24) / 4, normal(24, 20, seed=1) / 4, normal(6, 2, 20, seed=2)

    def loss(x: ps.Tensor, w: ps.Tensor, g: ps.Tensor) -> ps.Tensor:
        return sum((ps.sum(x[step] @ w * g[step]) for step in range(6)), ps.asarray(0.0, device=device))

    tensors = [ps.asarray(array, device=device) for array in arrays]
    for function in (ps.grad(loss, (0, 1)), ps.jit(ps.grad(loss, (0, 1)))):
        slope_x, slope_w = function(*tensors)
        np.testing.assert_allclose(slope_x.numpy(), arrays[2] @ arrays[1].T, rtol=1e-4, atol=1e-4)
        wanted = np.einsum("tbi,tbo->io", arrays[0], arrays[2])
        np.testing.assert_allclose(slope_w.numpy(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "axes"), [((3, 5, 70), (0, 2)), ((4, 3, 8, 9), (0, 2, 3)), ((2, 3, 4, 5, 64), (1, 4))]
)
def test_reductions_of_axes_that_lie_apart(
    device: Device, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    x = normal(*shape)
    tensor = ps.asarray(x, device=device)
    functions = {np.sum: ps.sum, np.max: ps.max, np.prod: ps.prod}
    for wanted, function in functions.items():
        result = ps.jit(lambda x, function=function: function(x * 0.5 + 1.0, axis=axes))(tensor)
        np.testing.assert_allclose(result.numpy(), wanted(x * 0.5 + 1.0, axis=axes), rtol=1e-4, atol=1e-4)
    halves = ps.sum(tensor.to(ps.float16), axis=axes).numpy()
    np.testing.assert_allclose(halves, x.astype(np.float16).sum(axes, np.float32), rtol=2e-3, atol=2e-3)


@settings(max_examples=examples(20, 8), deadline=None)
@given(data=st.data())
def test_padded_and_concatenated_rows(data: st.DataObject) -> None:
    """Of lengths that are no multiple of a vector, with borders anywhere in a row."""
    width, before, after = (data.draw(st.integers(low, 40)) for low in (1, 0, 0))
    more = data.draw(st.integers(1, 20))
    x, y = normal(3, 5, width), normal(3, 5, more, seed=1)

    @ps.jit
    def both(x: ps.Tensor, y: ps.Tensor) -> tuple[ps.Tensor, ps.Tensor]:
        return ps.nn.functional.pad(x * 2.0, [before, after]) + 1.0, ps.concat([y, x, y * 3.0], axis=2) * 2.0

    padded, joined = both(ps.asarray(x), ps.asarray(y))
    wanted = np.pad(x * 2, [(0, 0), (0, 0), (before, after)]) + 1
    np.testing.assert_array_equal(padded.numpy(), wanted)
    np.testing.assert_array_equal(joined.numpy(), np.concatenate([y, x, y * 3], axis=2) * 2)


@pytest.mark.parametrize("rows", [(), (3,)])
@pytest.mark.parametrize("parts", [3, 40])
def test_rows_of_many_parts_and_a_single_row(rows: tuple[int, ...], parts: int) -> None:
    arrays = [normal(*rows, 3 + at % 9, seed=at) for at in range(parts)]
    joined = ps.jit(lambda arrays: ps.concat([array * 2.0 for array in arrays], axis=-1) + 1.0)
    result = joined([ps.asarray(array) for array in arrays])
    np.testing.assert_array_equal(result.numpy(), np.concatenate(arrays, axis=-1) * 2 + 1)


def test_sums_of_what_is_concatenated_are_sums_of_the_whole() -> None:
    """As the gradients of two biases are, one added to all steps at once and the other at each step."""
    steps = [exp(at(normal(3, 8, seed=step))) for step in range(5)]
    whole = reduce(
        add,
        [
            pad(reshape(step, (1, 3, 8)), ((n, 1, 1), (0, 3, 1), (0, 8, 1)), (5, 3, 8))
            for n, step in enumerate(steps)
        ],
    )
    both = [sum_(whole, (0, 1)), reduce(add, [sum_(step, (0,)) for step in reversed(steps)])]
    first, second = join_sums(both)
    assert first is second
    for wanted in both:
        np.testing.assert_allclose(evaluate(first), evaluate(wanted), rtol=1e-5)
