"""From recorded graphs to values on the device.

Every node is computed by its meaning in NumPy, on the device's own memory where the host shares it. That is
how a small expression that is seen once should run, since it waits for no compiler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from penstock.graph.node import Array, Node, topological
from penstock.graph.simplify import simplify
from penstock.runtime import Device


def realize(nodes: Sequence[Node], device: Device) -> None:
    """Compute the nodes that have no value yet, and keep the results on the device."""
    asked = [node for node in dict.fromkeys(nodes) if node.value is None]
    wanted = simplify(asked)
    order = topological(wanted)
    uses = Counter(parent for node in order if node.value is None for parent in node.inputs)
    uses.update(wanted)
    arrays: dict[Node, Array] = {}
    with ExitStack() as views, np.errstate(all="ignore"):
        for node in order:
            if node.value is not None:
                arrays[node] = views.enter_context(device.view(node.value, node.dtype, node.shape))
            else:
                arrays[node] = _computed(node, arrays)
                _let_go(node.inputs, uses, arrays)
        results = {node: np.ascontiguousarray(arrays[node]) for node in wanted if node.value is None}
        arrays.clear()
    made = {node: device.upload(result) for node, result in results.items()}
    for node, simple in zip(asked, wanted, strict=True):
        node.settle(made.get(simple, simple.value))


def _computed(node: Node, arrays: dict[Node, Array]) -> Array:
    inputs = [arrays[parent] for parent in node.inputs]
    result = np.asarray(node.primitive.numpy(*inputs, **node.attributes))
    return result.astype(node.dtype, copy=False)


def _let_go(inputs: Sequence[Node], uses: Counter[Node], arrays: dict[Node, Array]) -> None:
    """Free the inputs that nothing else needs, so that the peak is not the whole graph."""
    for parent in inputs:
        uses[parent] -= 1
        if not uses[parent]:
            arrays.pop(parent, None)
