"""Gradients as functions, checkpoints, and custom gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from penstock.graph import checkpoint as checkpoints
from penstock.graph import custom_vjp as vjps
from penstock.graph import elementwise
from penstock.graph.gradient import gradients
from penstock.graph.node import Node, Primitive, topological
from penstock.runtime import Device
from penstock.tensor import backward as backward  # which gives tensors the method
from penstock.tensor.core import Tensor, record
from penstock.tensor.leaves import leaf_of


def value_and_grad(
    function: Callable[..., Tensor], argnums: int | tuple[int, ...] = 0
) -> Callable[..., tuple[Tensor, Any]]:
    """A function that returns the value of `function` and its gradient by the arguments `argnums`.

    `argnums` is the position of an argument, or a tuple of positions, for which the gradients are a tuple.

    >>> value, slope = ps.value_and_grad(lambda x: (x * x).sum())(ps.asarray([1.0, 2.0]))
    >>> value.item(), slope.tolist()
    (5.0, [2.0, 4.0])
    """
    positions = (argnums,) if isinstance(argnums, int) else argnums

    def both(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        inputs = list(args)
        wanted: list[Node] = []
        for position in positions:
            given = inputs[position]
            if not isinstance(given, Tensor) or given.dtype.kind != "f":
                raise TypeError(
                    f"argument {position} must be a floating-point tensor, and {given!r} was given"
                )
            # A new node: only uses of the tensor inside the function contribute to its gradient.
            leaf = elementwise.positive(given._node)
            leaf.tracked = True
            wanted.append(leaf)
            inputs[position] = Tensor(leaf, given.device, requires_grad=True)
        value = function(*inputs, **kwargs)
        if not isinstance(value, Tensor) or value.size != 1:
            raise ValueError(f"the function must return a single value, and it returned {value!r}")
        computed = gradients(value._node, None, wanted)
        parts = [
            Tensor(
                elementwise.like(node, 0) if part is None else part,
                inputs[position].device,
                value.requires_grad,
            )
            for position, node, part in zip(positions, wanted, computed, strict=True)
        ]
        return value, parts[0] if isinstance(argnums, int) else tuple(parts)

    return both


def grad(function: Callable[..., Tensor], argnums: int | tuple[int, ...] = 0) -> Callable[..., Any]:
    """A function that returns the gradient of `function`; see `value_and_grad`.

    >>> ps.grad(lambda x: (x * x).sum())(ps.asarray([1.0, 2.0])).tolist()
    [2.0, 4.0]
    """
    both = value_and_grad(function, argnums)
    return lambda *args, **kwargs: both(*args, **kwargs)[1]


def checkpoint(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)`, whose intermediate values are not kept, but recomputed in the backward pass.

    >>> ps.grad(lambda x: ps.checkpoint(ps.exp, x).sum())(ps.zeros(2)).tolist()
    [1.0, 1.0]
    """
    value = function(*args)
    if not value.requires_grad:
        return value
    given = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    nodes = {tensor._node: None for tensor in given}
    for node in topological([value._node], through_values=True, until=nodes):
        if leaf_of(node) is not None:
            nodes[node] = None  # a parameter that the function uses
    return record(checkpoints.checkpoint(value._node, list(nodes)), value)


Rule = Callable[..., Sequence[Tensor | None]]


def custom_vjp(value: Tensor, inputs: Sequence[Tensor], vjp: Rule) -> Tensor:
    """`value` with a gradient of its own, in place of that of the operations that compute it.

    `vjp` takes the gradient of the value, the value, and the inputs, and returns the gradient of each input
    or None. It has to use the inputs that it is given, since a checkpoint may have recomputed them.
    """
    return _with_rule(value, inputs, lambda: _primitive(vjp, value.device, transient=True))


def lasting_vjp(value: Tensor, inputs: Sequence[Tensor], vjp: Rule) -> Tensor:
    """Like `custom_vjp`, with a function that lives for ever and holds no tensors; it is recorded once.

    `vjp` must be the same object in every call.
    """
    return _with_rule(value, inputs, lambda: _lasting(vjp, value.device))


def _with_rule(value: Tensor, inputs: Sequence[Tensor], primitive: Callable[[], Primitive]) -> Tensor:
    if not any(tensor.requires_grad for tensor in inputs):
        return value
    node = Node(primitive(), (value._node, *(tensor._node for tensor in inputs)), {})
    return record(node, *inputs)


def _primitive(vjp: Rule, device: Device, transient: bool = False) -> Primitive:
    def nodes(g: Node, n: Node) -> list[Node | None]:
        passed = [Tensor(node, device, node.tracked) for node in n.inputs[1:]]
        parts = vjp(Tensor(g, device, g.tracked), Tensor(n, device, n.tracked), *passed)
        return [None if part is None else part._node for part in parts]

    return vjps.custom_vjp("given", nodes, transient)


_lasting = lru_cache(256)(_primitive)
