"""Pairs of products of the same rows: which there are, what they are, and how a library computes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_products import GPU

from penstock.compiler.passes import fused
from penstock.graph.contraction import matmul
from penstock.graph.dtypes import bfloat16, float32
from penstock.graph.elementwise import add, multiply
from penstock.graph.node import DType, Node, leaf, placeholder, topological
from penstock.graph.pairs import PAIR, in_pairs
from penstock.graph.reference import computed
from penstock.graph.shaping import permute, slice_axis
from penstock.kernels.library.cublaslt import WORKSPACE, PairLaunch
from penstock.kernels.lower import write
from penstock.kernels.source import ALIGNMENT

ROWS, INNER, COLUMNS = 256, 64, 128


def product(x: Node, weight: Node) -> Node:
    return matmul(x, permute(weight, (1, 0)))


def weight(*shape: int, dtype: DType = bfloat16) -> Node:
    return placeholder(shape or (COLUMNS, INNER), dtype)


def pairs(*wanted: Node, capabilities: Any = GPU) -> int:
    order = topological(in_pairs(wanted, capabilities))
    return sum(node.primitive is PAIR for node in order)


def test_which_products_are_pairs() -> None:
    x = placeholder((ROWS, INNER), bfloat16)
    first, second, third = (product(x, weight()) for _ in range(3))
    assert pairs(add(first, second)) == 1
    assert pairs(add(add(first, second), third)) == 1, "the third stays alone"
    assert pairs(add(first, second), capabilities=replace(GPU, matmul_library=False)) == 0
    assert pairs(first, second) == 0, "they are results, which would be copied"
    assert pairs(add(first, product(placeholder((ROWS, INNER), bfloat16), weight()))) == 0, "other rows"
    wide = product(x, weight(2 * COLUMNS, INNER))
    assert pairs(multiply(first, slice_axis(wide, 1, 0, COLUMNS))) == 0, "other shapes"
    many = placeholder((132 * 128, INNER), bfloat16)
    assert pairs(add(product(many, weight()), product(many, weight()))) == 0, "each fills the GPU"
    few = placeholder((16, INNER), bfloat16)
    assert pairs(add(product(few, weight()), product(few, weight()))) == 0, "few rows"
    exact = placeholder((ROWS, INNER), float32)
    plain = [product(exact, weight(COLUMNS, INNER, dtype=float32)) for _ in range(2)]
    assert pairs(add(*plain)) == 0, "float32"


def test_a_pair_has_the_values_of_its_products() -> None:
    draw = np.random.default_rng(0)
    arrays = [draw.normal(size=shape) for shape in ((ROWS, INNER), (COLUMNS, INNER), (COLUMNS, INNER))]
    x, first, second = (leaf(array.astype(bfloat16.numpy), array.shape, bfloat16) for array in arrays)
    wanted = [multiply(product(x, first), add(product(x, second), product(x, first)))]

    def values(nodes: list[Node]) -> Any:
        known: dict[Node, Any] = {}
        for node in topological(nodes):
            known[node] = node.value if node.value is not None else None
            if known[node] is None:
                known[node] = computed(node, [known[parent] for parent in node.inputs], node.attributes)
        return known[nodes[0]]

    together = in_pairs(wanted, GPU)
    assert pairs(*wanted) == 1
    assert np.array_equal(values(together), values(wanted))


def test_a_pair_is_one_call_of_the_library() -> None:
    x = placeholder((ROWS, INNER), bfloat16)
    wanted = in_pairs([add(product(x, weight()), product(x, weight()))], GPU)
    pair, sums = fused(wanted, GPU)
    lowering = write(pair, GPU, "")
    assert lowering is not None
    assert isinstance(lowering.function, PairLaunch)
    assert lowering.scratch == (WORKSPACE,)
    assert [group.kind for group in (pair, sums)] == ["single", "map"]
    problem = lowering.function.product
    assert (problem.batch, problem.rows, problem.columns, problem.inner) == (2, ROWS, COLUMNS, INNER)
    assert (problem.left.batch_stride, problem.right.transposed) == (0, True)


@pytest.mark.parametrize("distance", [3 * COLUMNS * INNER, -COLUMNS * INNER])
def test_matrices_lie_anywhere(distance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = placeholder((ROWS, INNER), bfloat16)
    (pair, _) = fused(in_pairs([add(product(x, weight()), product(x, weight()))], GPU), GPU)
    lowering = write(pair, GPU, "")
    assert lowering is not None
    launch: Any = lowering.function
    calls: list[tuple[str, int, int, int]] = []

    class Strides:
        right = 7

        def set_stride(self, layout: int, items: int) -> None:
            calls.append(("stride", layout, items, 0))

    def multiply_of(name: str) -> Any:
        return lambda stream, right, left, out, workspace: calls.append((name, right, left, out))

    launch.descriptors = Strides()
    monkeypatch.setattr(launch, "multiply", multiply_of("pair"))
    monkeypatch.setattr(launch._single, "multiply", multiply_of("single"))
    out, left, first = 1 << 30, 2 << 30, 3 << 30
    second = first + 2 * distance
    for _ in range(2):
        launch(1, out, left, first, second, 4 << 30, 1, 2, 3, 3, 0)
    at = [out + ALIGNMENT, left + 2 * ALIGNMENT, first + 3 * ALIGNMENT, second + 3 * ALIGNMENT]
    if distance > 0:
        assert calls == [("stride", 7, distance, 0), *[("pair", at[2], at[1], at[0])] * 2], "set once"
    else:
        half = 2 * ROWS * COLUMNS
        assert calls == [("single", at[2], at[1], at[0]), ("single", at[3], at[1], at[0] + half)] * 2
