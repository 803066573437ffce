"""Convolutions by decomposition for a library, and the pass that keeps their channels last, by NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_products import GPU

from penstock.graph import convolution, elementwise, reducing, shaping
from penstock.graph.channels_last import channels_last
from penstock.graph.convolution_reference import Geometry
from penstock.graph.decompose import decompose
from penstock.graph.node import Kind, Node, leaf, topological
from penstock.graph.reference import computed
from penstock.graph.shaping import PERMUTE
from penstock.graph.simplify import simplify

LIBRARY = replace(GPU, matmul_library=True)
FLOAT64 = np.dtype("float64")


def array(random: np.random.Generator, *shape: int) -> Node:
    return leaf(random.standard_normal(shape), shape, FLOAT64)


def value(node: Node) -> np.ndarray[Any, Any]:
    """By NumPy alone."""
    known: dict[Node, np.ndarray[Any, Any]] = {}
    for part in topological([node]):
        inputs = [known[parent] for parent in part.inputs]
        known[part] = part.value if part.value is not None else computed(part, inputs, part.attributes)
    return known[node]


@st.composite
def settings(draw: st.DrawFn) -> tuple[Geometry, tuple[int, ...], tuple[int, ...], tuple[int, int]]:
    """A geometry, the lengths of images, those of windows, and the channels of a group and its outputs."""
    axes = draw(st.integers(1, 2))
    sizes = tuple(draw(st.integers(1, 4)) for _ in range(axes))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(axes))
    padding = tuple((draw(st.integers(0, 2)), draw(st.integers(-1, 2))) for _ in range(axes))
    lengths = tuple(draw(st.integers(9, 12)) for _ in range(axes))
    groups = draw(st.sampled_from([1, 1, 2]))
    return Geometry(stride, padding, dilation, groups), lengths, sizes, (draw(st.integers(1, 9)), 3)


@given(settings())
@pytest.mark.parametrize("library", [False, True])
def test_decompositions_are_what_numpy_computes(library: bool, given: Any) -> None:
    geometry, lengths, sizes, (channels, outputs) = given
    random, groups = np.random.default_rng(1), geometry.groups
    x, weight = (
        array(random, 2, channels * groups, *lengths),
        array(random, outputs * groups, channels, *sizes),
    )
    g = array(random, 2, outputs * groups, *geometry.counts(lengths, sizes))
    nodes = [
        convolution.convolution(x, weight, geometry),
        convolution.convolution_transpose(g, weight, geometry, lengths),
        convolution.convolution_weight(x, g, geometry, sizes),
    ]
    capabilities = replace(LIBRARY, matmul_library=library)
    for node in nodes:
        (parts,) = simplify(decompose([node], capabilities))
        assert not any(part.primitive.name.startswith("convolution") for part in topological([parts]))
        assert parts.shape == node.shape
        np.testing.assert_allclose(value(parts), value(node), 1e-12, 1e-12)
        (last,) = channels_last([parts])
        np.testing.assert_allclose(value(last), value(node), 1e-12, 1e-12)


def block(x: Node, weight: Node, geometry: Geometry) -> Node:
    """A convolution, a batch norm and a ReLU."""
    y = convolution.convolution(x, weight, geometry)
    count = elementwise.full((y.shape[1],), FLOAT64, y.size / y.shape[1])
    mean = elementwise.divide(reducing.sum_(y, (0, 2, 3)), count)
    centred = elementwise.subtract(y, reducing.restore(mean, y, (0, 2, 3)))
    squares = reducing.sum_(elementwise.multiply(centred, centred), (0, 2, 3))
    scaled = elementwise.divide(centred, reducing.restore(elementwise.divide(squares, count), y, (0, 2, 3)))
    return elementwise.maximum(scaled, elementwise.full(y.shape, FLOAT64, 0))


def test_channels_stay_last_between_convolutions() -> None:
    random = np.random.default_rng(2)
    near, far = (Geometry((stride,) * 2, ((1, 1),) * 2, (1, 1)) for stride in (1, 2))
    x = array(random, 2, 3, 8, 8)
    first = block(x, array(random, 16, 3, 3, 3), near)
    second = elementwise.add(block(first, array(random, 16, 16, 3, 3), near), first)
    third = block(second, array(random, 8, 16, 3, 3), far)
    pooled = reducing.sum_(third, (2, 3))
    (parts,) = simplify(decompose([pooled], LIBRARY))
    (last,) = channels_last([parts])
    np.testing.assert_allclose(value(last), value(pooled), 1e-12, 1e-12)
    # Every sum is over leading axes, and nothing but windows, weights and vectors is permuted.
    sums = [node for node in topological([last]) if node.primitive.kind is Kind.REDUCTION]
    assert [node.attributes["axes"] for node in sums] == [(0, 1, 2)] * 6 + [(1, 2)]
    images = [node for node in topological([last]) if node.primitive is PERMUTE and node.ndim == 4]
    assert {node.inputs[0].shape for node in images} <= {
        (16, 3, 3, 3),
        (16, 16, 3, 3),
        (8, 16, 3, 3),
        x.shape,
    } | {(1, channels, 1, 1) for channels in (8, 16)}


def test_what_meets_stored_values_is_not_reordered() -> None:
    """The update of a weight: its gradient comes with the channels last, the weight is stored otherwise."""
    random = np.random.default_rng(3)
    product = elementwise.exp(array(random, 4, 3, 3, 2))
    gradient = shaping.permute(product, (0, 3, 1, 2))
    weight = array(random, 4, 2, 3, 3)
    updated = elementwise.subtract(weight, gradient)
    (new,) = channels_last([updated])
    assert new.inputs[0] is weight
    np.testing.assert_array_equal(value(new), value(updated))


@given(st.data())
def test_random_graphs_keep_their_values(data: st.DataObject) -> None:
    """Operations on a view with the channels last, in random order."""
    random = np.random.default_rng(4)
    node = shaping.permute(elementwise.exp(array(random, 2, 4, 6, 4)), (0, 3, 1, 2))
    for _ in range(data.draw(st.integers(1, 6))):
        kind = data.draw(
            st.sampled_from(["map", "sum", "pad", "slice", "reshape", "permute", "concat", "expand"])
        )
        if kind == "map":
            node = elementwise.multiply(node, elementwise.full(node.shape, FLOAT64, 0.5))
        elif kind == "sum" and node.ndim > 1:
            node = reducing.sum_(node, (data.draw(st.integers(0, node.ndim - 1)),))
        elif kind == "pad":
            slices = tuple((1, n, 1) for n in node.shape)
            node = shaping.pad(node, slices, tuple(n + 2 for n in node.shape))
        elif kind == "slice":
            node = shaping.slice_(node, tuple((0, max(1, n - 1), 1) for n in node.shape))
        elif kind == "reshape":
            flat = [part for n in node.shape for part in ((2, n // 2) if n % 2 == 0 else (n, 1))]
            if data.draw(st.booleans()) and len(flat) > 2:
                flat[1:3] = [flat[1] * flat[2]]
            node = shaping.reshape(node, tuple(flat)) if len(flat) <= 8 else node
        elif kind == "permute":
            node = shaping.permute(node, tuple(data.draw(st.permutations(range(node.ndim)))))
        elif kind == "concat":
            node = shaping.concat(
                [node, elementwise.negative(node)], data.draw(st.integers(0, node.ndim - 1))
            )
        elif kind == "expand":
            mean = reducing.sum_(node, (0,))
            node = elementwise.add(node, reducing.restore(mean, node, (0,)))
    (new,) = channels_last([node])
    np.testing.assert_allclose(value(new), value(node), 1e-10, 1e-10)
