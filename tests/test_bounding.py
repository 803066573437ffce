"""Groups in parts, for devices whose kernels take few buffers: pure functions of graphs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from test_fusion import CPU, holds, random_graph, x_
from test_graph import at

from penstock.fusion.bounding import bounded
from penstock.fusion.groups import Group, partition
from penstock.fusion.splitting import split
from penstock.graph import contraction, elementwise, reducing, shaping
from penstock.graph.node import Node, topological
from penstock.graph.reference import computed


def parts(most: int, *wanted: Node) -> list[Group]:
    """The groups of some nodes within a bound; they hold what is wanted, in order."""
    result = bounded(partition(wanted, lambda node: True), most)
    holds(result, list(wanted))
    outputs = [node for group in result for node in group.outputs]
    assert len(outputs) == len(set(outputs)), "nothing is stored twice"
    assert all(len(group.inputs) + len(group.outputs) <= most for group in result)
    assert all(len({node.size for node in group.outputs}) == 1 for group in result if group.kind == "map")
    return result


def same_values(result: list[Group], wanted: list[Node]) -> None:
    """The groups compute what the graph means, each from what the groups before it stored."""
    stored: dict[Node, np.ndarray] = {}
    for group in result:
        values = {node: stored[node] if node.value is None else node.value for node in group.inputs}
        for node in group.nodes:
            values[node] = computed(node, [values[parent] for parent in node.inputs])
        stored.update({node: values[node] for node in group.outputs})
    plain: dict[Node, np.ndarray] = {}
    for node in topological(wanted):
        inputs = [plain[parent] for parent in node.inputs]
        plain[node] = node.value if node.value is not None else computed(node, inputs)
    for node in wanted:
        np.testing.assert_array_equal(stored[node], plain[node])


def test_a_group_that_fits_stays_as_it_is() -> None:
    x, y = x_(), x_()
    groups = partition([elementwise.add(x, y)], lambda node: True)
    assert bounded(groups, 3) == groups


def test_many_outputs_are_divided() -> None:
    x = x_()
    shared = elementwise.exp(x)
    outputs = [elementwise.multiply(shared, elementwise.like(x, k)) for k in range(10)]
    result = parts(4, *outputs)
    assert [len(group.outputs) for group in result] == [3, 3, 3, 1]
    assert all(group.inputs == (x,) for group in result), "what they share is computed again"


def test_many_inputs_are_added_up_in_parts() -> None:
    leaves = [at(np.full((4, 8), k, np.float32)) for k in range(20)]
    total = leaves[0]
    for leaf in leaves[1:]:
        total = elementwise.add(total, leaf)
    result = parts(5, total)
    assert len(result) == 7  # 4 values, then 3 more with each sum before
    same_values(result, [total])


def test_what_is_stored_is_read_by_the_parts_after_it() -> None:
    a, b = ([at(np.ones((4, 8), np.float32)) for _ in range(3)] for _ in range(2))
    first = elementwise.add(elementwise.add(a[0], a[1]), a[2])
    second = elementwise.multiply(elementwise.add(elementwise.add(first, b[0]), b[1]), b[2])
    result = parts(5, first, second)
    assert [group.outputs for group in result] == [(first,), (second,)]
    assert set(result[1].inputs) == {first, *b}


@pytest.mark.parametrize("axes", [(1,), (0,)])
def test_reductions_are_divided(axes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    leaves = [at(rng.integers(0, 9, (4, 8)).astype(np.float32)) for _ in range(9)]
    total = leaves[0]
    for leaf in leaves[1:]:
        total = elementwise.add(total, leaf)
    sums = reducing.sum_(total, axes)
    centred = elementwise.subtract(total, reducing.restore(sums, total, axes))
    wanted = [sums, centred, reducing.max_(centred, axes)]
    result = parts(5, *wanted)
    assert {group.kind for group in result} == {"map", "row" if axes == (1,) else "column"}
    same_values(result, wanted)


def test_a_product_and_its_ending_are_divided() -> None:
    rng = np.random.default_rng(0)
    left, right = (at(rng.integers(0, 9, (4, 4)).astype(np.float32)) for _ in range(2))
    result = contraction.matmul(left, shaping.permute(right, (1, 0)))
    more = [at(rng.integers(0, 9, (4, 4)).astype(np.float32)) for _ in range(8)]
    for item in more:
        result = elementwise.add(result, item)
    actual = parts(5, result)
    assert [group.kind for group in actual].count("matmul") == 1
    same_values(actual, [result])


@pytest.mark.parametrize("most", [4, 5, 8])
@pytest.mark.parametrize("seed", range(20))
def test_random_graphs(seed: int, most: int) -> None:
    choice = random.Random(seed)
    nodes = random_graph(choice, 60)
    wanted = [node for node in (*choice.sample(nodes, 5), *nodes[-5:]) if node.value is None]
    parts(most, *dict.fromkeys(wanted))


def by_bytes(node: Node) -> int:
    """As many buffers as windows of 100 bytes."""
    return max(1, -(-node.nbytes // 100))


def weighed(most: int, wanted: list[Node]) -> list[Group]:
    """The same where large values count for several."""
    result = bounded(partition(wanted, lambda node: True), most, by_bytes)
    holds(result, wanted)
    outputs = [node for group in result for node in group.outputs]
    assert len(outputs) == len(set(outputs)), "nothing is stored twice"
    for group in result:
        assert sum(map(by_bytes, (*group.inputs, *group.outputs))) <= most or group.kind == "single"
    return result


def test_values_count_as_many_times_as_they_are_large() -> None:
    leaves = [at(np.full((4, 16), k, np.float32)) for k in range(4)]  # 3 each
    total = leaves[0]
    for leaf in leaves[1:]:
        total = elementwise.add(total, leaf)
    result = weighed(9, [total])
    assert [len(group.inputs) for group in result] == [2, 2, 2]
    same_values(result, [total])


def test_what_is_too_large_stands_alone_and_only_that() -> None:
    x, y = (at(np.full((8, 16), k, np.float32)) for k in (2, 3))  # 6 each
    wide = elementwise.multiply(x, shaping.permute(shaping.permute(y, (1, 0)), (1, 0)))
    rows = elementwise.exp(elementwise.negative(reducing.sum_(wide, (1,))))
    result = weighed(9, [rows])
    alone = {group.nodes[0].primitive.name for group in result if group.kind == "single"}
    assert alone == {"multiply", "permute"}
    assert [node.primitive.name for node in result[-1].nodes] == ["sum", "negative", "exp"]
    same_values(result, [rows])


def test_what_two_groups_compute_for_themselves_is_stored_once() -> None:
    leaves = [at(np.full((4, 16), k, np.float32)) for k in range(3)]
    shared = elementwise.negative(elementwise.add(leaves[0], leaves[1]))
    wanted = [
        reducing.sum_(elementwise.multiply(shared, leaves[2]), (1,)),
        reducing.max_(elementwise.add(shared, leaves[2]), (0,)),
        elementwise.multiply(elementwise.add(shared, leaves[2]), leaves[2]),
    ]
    for most in (6, 7, 9, 12):
        same_values(weighed(most, wanted), wanted)


@pytest.mark.parametrize("most", [6, 9, 16])
@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_of_values_that_count_for_several(seed: int, most: int) -> None:
    choice = random.Random(seed)
    nodes = random_graph(choice, 60)
    wanted = [node for node in (*choice.sample(nodes, 5), *nodes[-5:]) if node.value is None]
    weighed(most, list(dict.fromkeys(wanted)))


def test_large_values_are_joined_in_parts() -> None:
    leaves = [at(np.full((1, 5), k, np.int16)) for k in range(30)]
    joined = shaping.concat(leaves, 0)  # 300 bytes
    limits = replace(CPU, max_buffers=12, binding_bytes=100)
    (cut,) = split([joined], limits)
    assert [len(node.inputs) for node in topological([cut]) if node.value is None] == [10, 10, 10, 3]
    same_values(weighed(12, [cut]), [cut])
    assert split([joined], replace(limits, max_buffers=33)) == [joined]
    large = shaping.concat([at(np.full((5, 5), k, np.float32)) for k in range(8)], 0)
    assert split([large], limits) == [large], "no kernel can have what is read and written"


def test_many_values_are_joined_in_parts() -> None:
    leaves = [at(np.full((1 + k % 3, 2), k, np.float32)) for k in range(30)]
    joined = elementwise.add(shaping.concat(leaves, 0), at(np.ones((60, 2), np.float32)))
    (cut,) = split([joined], replace(CPU, max_buffers=6))
    assert split([joined], CPU) == [joined]
    same_values(parts(6, cut), [cut])
