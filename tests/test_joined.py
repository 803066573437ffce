"""Products of the same rows as one: which there are, their values, how a library computes them, and where."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from test_cuda_sources import Imagined
from test_products import GPU

import penstock as ps
from penstock import Device
from penstock.compiler.passes import fused
from penstock.graph.contraction import matmul
from penstock.graph.dtypes import bfloat16, float32
from penstock.graph.elementwise import add, multiply
from penstock.graph.joined import JOINED, join_products
from penstock.graph.node import DType, Node, leaf, placeholder, topological
from penstock.graph.reference import computed
from penstock.graph.shaping import permute, reshape, slice_axis
from penstock.kernels.library.cublaslt import WORKSPACE, JoinedLaunch
from penstock.kernels.lower import write
from penstock.kernels.source import ALIGNMENT
from penstock.models.adjoining import adjoin

ROWS, INNER = 256, 128


def product(x: Node, weight: Node) -> Node:
    return matmul(x, permute(weight, (1, 0)))


def weight(columns: int = 128, inner: int = INNER, dtype: DType = bfloat16) -> Node:
    return placeholder((columns, inner), dtype)


def leaves(*wanted: Node) -> list[Node]:
    return [node for node in topological(wanted) if not node.inputs]


def joined(*wanted: Node, capabilities: Any = GPU) -> list[int]:
    """How many matrices each joined product has."""
    order = topological(join_products(wanted, leaves(*wanted), capabilities))
    return [len(node.inputs) - 1 for node in order if node.primitive is JOINED]


def test_which_products_are_joined() -> None:
    x = placeholder((ROWS, INNER), bfloat16)
    first, second, third = (product(x, weight(columns)) for columns in (256, 128, 128))
    part = slice_axis(first, 1, 0, 128)
    assert joined(add(part, second)) == [2]
    assert joined(multiply(add(part, second), third)) == [3]
    assert joined(add(part, second), capabilities=replace(GPU, matmul_library=False)) == []
    assert joined(second, third) == [], "they are results, which would be copied"
    assert joined(add(second, third), product(reshape(second, (64, 512)), weight(64, 512))) == [], (
        "one is multiplied, which would be copied"
    )
    assert joined(add(second, product(placeholder((ROWS, INNER), bfloat16), weight()))) == [], "other rows"
    few = placeholder((64, INNER), bfloat16)
    assert joined(add(product(few, weight()), product(few, weight()))) == [], "few rows"
    computed_weight = add(weight(), weight())
    assert joined(add(second, product(x, computed_weight))) == [], "where it lies is not known to a model"
    shared = weight()
    again = product(placeholder((ROWS, INNER), bfloat16), shared)
    assert joined(add(add(second, product(x, shared)), again)) == [], "gradients read matrices, too"
    narrow = product(x, weight(96)), product(x, weight(96))
    assert joined(add(*narrow)) == [], "columns that begin where a library may not write"
    exact = placeholder((ROWS, INNER), float32)
    assert joined(add(*(product(exact, weight(dtype=float32)) for _ in range(2)))) == [], "float32"


def test_smaller_matrices_come_first() -> None:
    """As they lie in memory, in whatever order they are used."""
    x = placeholder((ROWS, INNER), bfloat16)
    large, *small = weight(256), weight(), weight()
    part = slice_axis(product(x, large), 1, 0, 128)
    wanted = add(part, multiply(*(product(x, each) for each in small)))
    (node,) = (
        node
        for node in topological(join_products([wanted], [x, large, *small], GPU))
        if node.primitive is JOINED
    )
    assert node.inputs == (x, *small, large)


def test_a_joined_product_has_the_values_of_its_products() -> None:
    draw = np.random.default_rng(0)
    shapes = (ROWS, INNER), (128, INNER), (256, INNER), (128, INNER)
    x, first, second, third = inputs = [
        leaf(draw.normal(size=shape).astype(bfloat16.numpy), shape, bfloat16) for shape in shapes
    ]
    half = slice_axis(product(x, second), 1, 128, 128)
    wanted = [multiply(product(x, first), add(half, product(x, third)))]

    def values(nodes: list[Node]) -> Any:
        known: dict[Node, Any] = {}
        for node in topological(nodes):
            known[node] = node.value
            if node.value is None:
                known[node] = computed(node, [known[parent] for parent in node.inputs], node.attributes)
        return known[nodes[0]]

    together = join_products(wanted, inputs, GPU)
    assert sum(node.primitive is JOINED for node in topological(together)) == 1
    assert np.array_equal(values(together), values(wanted))


class FakeProduct:
    """Notes calls in place of a library."""

    def __init__(self, problem: Any, call: Any) -> None:
        self.product, self._call = problem, call

    def __call__(self, *args: int) -> None:
        self._call(*args)


@pytest.mark.parametrize(("adjoining", "allocations"), [(True, 1), (True, 2), (False, 1)])
def test_a_library_computes_them_at_once_where_matrices_adjoin(adjoining: bool, allocations: int) -> None:
    x, large, small = placeholder((ROWS, INNER), bfloat16), weight(256), weight()
    wanted = add(slice_axis(product(x, large), 1, 128, 128), product(x, small))
    both, sums = fused(join_products([wanted], [x, large, small], GPU), GPU)
    assert [group.kind for group in (both, sums)] == ["single", "map"]
    lowering = write(both, GPU, "")
    assert lowering is not None
    launch: Any = lowering.function
    assert isinstance(launch, JoinedLaunch)
    assert lowering.scratch == (WORKSPACE,)
    calls: list[tuple[int, ...]] = []

    def call_of(part: Any) -> Any:
        problem = part.product
        assert (problem.rows, problem.inner, problem.leading) == (ROWS, INNER, 384)
        assert part.buffers == {"out": 0, "left": 1, "right": 2, "workspace": 3}
        return lambda stream, *args: calls.append((problem.columns, *args))

    launch._each = {columns: call_of(part) for columns, part in launch._each.items()}
    launch._all = FakeProduct(launch._all.product, call_of(launch._all))
    launch._allocation_of = lambda address: address if allocations > 1 else 0
    out, left, first, workspace = (number << 30 for number in range(1, 5))
    second = first + (2 * 128 * INNER if adjoining else 1 << 20)
    launch(7, out, left, first, second, workspace, 1, 2, 3, 3, 4)
    out, left, first, second, workspace = (
        start + moved * ALIGNMENT
        for start, moved in zip((out, left, first, second, workspace), (1, 2, 3, 3, 4), strict=True)
    )
    none = (0, 0, 0, 0)
    if adjoining and allocations == 1:
        assert calls == [(384, out, left, first, workspace, *none)]
    else:
        assert calls == [
            (128, out, left, first, workspace, *none),
            (256, out + 2 * 128, left, second, workspace, *none),
        ]


def test_weights_with_the_same_inputs_adjoin() -> None:
    driver = Imagined(tensor_cores=True)
    driver.capabilities = replace(driver.capabilities, matmul_library=True)
    device = Device.over(driver, ps.config.Settings(compile_ahead=False))

    class Block(ps.nn.Module):
        def __init__(self) -> None:
            self.q, self.k = ps.nn.Linear(64, 128, device=device), ps.nn.Linear(64, 32, device=device)
            self.v = ps.nn.Linear(64, 32, device=device)
            self.down = ps.nn.Linear(128, 64, device=device)

    block = Block()
    values = {name: tensor.numpy() for name, tensor in block.named_parameters()}
    adjoin(block)
    starts = [layer.weight._node.value for layer in (block.k, block.v, block.q)]
    assert len({id(buffer.whole) for buffer in starts}) == 1
    sizes = [layer.weight._node.nbytes for layer in (block.k, block.v)]
    assert [later.offset - buffer.offset for buffer, later in pairwise(starts)] == sizes
    assert block.down.weight._node.value.whole is block.down.weight._node.value, "it is alone"
    for name, tensor in block.named_parameters():
        assert np.array_equal(tensor.numpy(), values[name])
    adjoin(block)
    assert [layer.weight._node.value for layer in (block.k, block.v, block.q)] == starts, "they stay there"
    device.close()
