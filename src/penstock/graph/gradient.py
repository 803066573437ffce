"""The backward pass: from a graph to the graph of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from penstock.graph.elementwise import add, like, positive
from penstock.graph.node import Node, topological


def gradients(
    output: Node, seed: Node | None, wanted: Sequence[Node], until: Container[Node] = ()
) -> list[Node | None]:
    """The gradient of `output` with respect to each wanted node; None if it does not depend on the node.

    `seed` is the gradient of the output itself, 1 by default. No gradient passes beyond nodes in `until`.
    """
    order = topological([output], through_values=True, until=until)
    targets = set(wanted)
    reaches = set()  # nodes through which a gradient has to pass
    for node in order:
        passes = not node.primitive.stop_gradient and any(parent in reaches for parent in node.inputs)
        if node in targets or passes:
            reaches.add(node)
    total: dict[Node, Node] = {output: like(output, 1) if seed is None else seed}
    for node in reversed(order):
        if node not in total or node not in reaches or not any(parent in reaches for parent in node.inputs):
            continue
        vjp = node.primitive.vjp
        if vjp is None:
            if node.dtype.kind != "f":
                continue  # booleans and integers have no gradient
            raise TypeError(f"{node.primitive.name} has no gradient; use detach() or no_grad() before it")
        grad = total[node] if node in targets else total.pop(node)
        for parent, part in zip(node.inputs, vjp(grad, node), strict=True):
            if part is not None and parent in reaches:
                total[parent] = add(total[parent], part) if parent in total else part
    return [total.get(node) for node in wanted]


def gradients_of(
    function: Callable[..., Node], inputs: Sequence[Node], seed: Node | None
) -> list[Node | None]:
    """The gradients of a function of nodes with respect to each input; a node may be given twice."""
    own = tuple(positive(node) for node in inputs)
    return gradients(function(*own), seed, own, until=own)
