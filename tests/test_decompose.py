"""Graphs that are the same on every device, and what becomes of them on each."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from test_graph import at

import penstock as ps
from penstock.drivers.driver import Capabilities
from penstock.drivers.host import HostDriver
from penstock.graph import contraction, elementwise, shaping
from penstock.graph.decompose import decompose
from penstock.graph.dtypes import bfloat16, float32
from penstock.graph.node import Node, topological

PLAIN = HostDriver("decompose").capabilities
LIBRARY = replace(PLAIN, matmul_library=True)


def names(node: Node, capabilities: Capabilities) -> list[str]:
    (found,) = decompose([node], capabilities)
    assert (found.shape, found.dtype) == (node.shape, node.dtype)
    return [one.primitive.name for one in topological([found]) if one.value is None]


def test_what_every_device_has_stays_as_it_is() -> None:
    x = at(np.ones((2, 3), np.float32))
    node = elementwise.exp(contraction.matmul(x, shaping.permute(x, (1, 0))))
    assert decompose([node], PLAIN) == [node]


def test_products_of_bfloat16_are_in_float32_where_there_is_no_library() -> None:
    x = elementwise.cast(at(np.ones((2, 3), np.float32)), bfloat16)
    product = contraction.matmul(x, shaping.permute(x, (1, 0)))
    assert decompose([product], LIBRARY) == [product]
    assert names(product, PLAIN) == ["cast", "cast", "cast", "permute", "matmul", "cast"]
    (found,) = decompose([elementwise.negative(product)], PLAIN)
    assert found.inputs[0].inputs[0].dtype == float32


def test_the_error_function_is_made_of_others() -> None:
    x = at(np.linspace(-3, 3, 9))
    assert "erf" not in names(elementwise.erf(x), PLAIN)
    assert "erf" not in names(elementwise.erf(elementwise.cast(x, bfloat16)), PLAIN)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_error_function(device: ps.Device, dtype: type) -> None:
    spread = np.logspace(math.log10(np.finfo(dtype).tiny), 1, 500)
    x = np.concatenate([np.linspace(-7, 7, 5001), spread, -spread]).astype(dtype)
    expected = np.array([math.erf(float(value)) for value in x])
    for function in (ps.erf, ps.jit(ps.erf)):
        found = function(ps.asarray(x, device=device)).numpy().astype(np.float64)
        steps = np.abs(found - expected) / np.spacing(np.abs(expected).astype(dtype)).astype(np.float64)
        assert steps.max() <= 3


def test_the_error_function_of_special_values(device: ps.Device) -> None:
    x = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 30, -30], np.float32)
    found = ps.jit(ps.erf)(ps.asarray(x, device=device)).numpy()
    np.testing.assert_array_equal(found, np.array([0, -0.0, 1, -1, math.nan, 1, -1], np.float32))
    assert np.signbit(found[:2]).tolist() == [False, True]


def test_the_gradient_of_the_error_function(device: ps.Device) -> None:
    x = np.linspace(-4, 4, 101).astype(np.float32)
    found = ps.grad(lambda x: ps.sum(ps.erf(x)))(ps.asarray(x, device=device)).numpy()
    np.testing.assert_allclose(found, 2 / math.sqrt(math.pi) * np.exp(-(x.astype(np.float64) ** 2)), 1e-5)
