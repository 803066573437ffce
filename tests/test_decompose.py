"""Graphs that are the same on every device, and what becomes of them on each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from test_graph import at

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
