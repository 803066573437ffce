"""Operations that were recorded before, on other values: the shortest way to their nodes.

What was recorded is an `Example`. A node that is made like it needs no rule of shapes, and where all inputs
are computed, no key of its program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Any

from penstock.execution.sharing import first_item
from penstock.graph import shaping
from penstock.graph.example import NUMBER, Example
from penstock.graph.node import Node, Shape, placeholder
from penstock.runtime import Device
from penstock.tensor import core
from penstock.tensor.core import Tensor, record
from penstock.tensor.operands import constant_like

_PLAIN = (float, int)  # types of the numbers that most operations have
_TOLD_APART = {int, bool, str, NoneType}  # not floats: 0.0 == -0.0
_INTEGERS = {int}
_new_tensor = Tensor.__new__
Slices = tuple[tuple[int, int, int], ...]


def is_computed(x: Tensor) -> bool:
    """Whether a tensor has a value and passes no gradient, outside of any capture."""
    return not core._captures and not x._actual_requires_grad and x._actual_node.value is not None


def again(function: Callable[..., Tensor], x: Tensor, y: Tensor | None = None) -> Tensor | None:
    """What a composite of `function` gives for one or two tensors, if it was recorded before; else None."""
    node, device = x._actual_node, x.device
    if core._captures or x._actual_requires_grad or node.tracked:
        return None
    is_computed = node.value is not None
    if y is None:
        like = device.subgraphs.get((function, node.shape, node.dtype.name))
        nodes: tuple[Node, ...] = (node,)
    else:
        other = y._actual_node
        if y._actual_requires_grad or other.tracked or y.device is not device:
            return None
        is_computed = is_computed and other.value is not None and other is not node
        kind = (function, node.shape, node.dtype.name, other.shape, other.dtype.name)
        like = device.subgraphs.get(kind)
        nodes = (node, other)
    if like is None:
        return None
    example = like.node
    if example.like is None:
        return None
    if like.inputs_of is not tuple:
        nodes = like.inputs_of(nodes)
    if is_computed:
        return tensor_like(example.alike(nodes), device)
    return on_pending(example, node, nodes, device) if y is None else on_nodes(example, nodes, device)


def on_nodes(example: Node, nodes: tuple[Node, ...], device: Device) -> Tensor:
    """The tensor of a node like an example, on nodes that may be pending, or the same: no gradient passes."""
    node = example.alike(nodes)
    kind: tuple[Example | None, ...] = (node.like,)
    depth, pending, is_known = 0, 0, node.like is not None
    for parent in nodes:
        if parent.value is not None:
            kind += (None,)
            continue
        below = parent.like
        kind += (below,)
        if below is None:
            is_known = False
        if parent.depth > depth:
            depth = parent.depth
        if parent.pending_bytes > pending:
            pending = parent.pending_bytes
    if is_known:
        like = device.examples.get(kind)
        node.like = _new_kind(kind, device) if like is None else like
    else:
        node.like = None
    node.depth += depth
    node.pending_bytes += pending
    if node.depth > core.MAX_DEPTH or node.pending_bytes > core.MAX_PENDING_BYTES:
        return Tensor(node, device)  # which computes it
    return tensor_like(node, device)


def on_pending(example: Node, pending: Node, nodes: tuple[Node, ...], device: Device) -> Tensor:
    """The same on a pending node, or on one and a number."""
    node, below = example.alike(nodes), pending.like
    if node.like is not None and below is not None:
        kind = (node.like, below)
        like = device.examples.get(kind)
        node.like = _new_kind(kind, device) if like is None else like
    else:
        node.like = None
    node.depth += pending.depth
    node.pending_bytes += pending.pending_bytes
    if node.depth > core.MAX_DEPTH or node.pending_bytes > core.MAX_PENDING_BYTES:
        return Tensor(node, device)  # which computes it
    return tensor_like(node, device)


def _new_kind(kind: tuple[Any, ...], device: Device) -> Example | None:
    """The example of an operation on nodes that are like others: its first part, and those of the nodes."""
    like, *below = kind
    new: Example | None = like.above(below)
    if new is not None:
        with device.running:  # for other threads
            device.examples[kind] = new
    return new


def like_before(
    kind: tuple[Any, ...], nodes: tuple[Node, ...], device: Device, apply: Callable[..., Node]
) -> Tensor:
    """The tensor of what a function makes of nodes through which no gradient passes, outside of a capture.

    `kind` tells the function and all that the result depends on beside the values. Constants by
    `constant_like` are not told apart.
    """
    like = device.examples.get(kind)
    if like is None:
        stand_ins = [node if node.like is NUMBER else placeholder(node.shape, node.dtype) for node in nodes]
        example = apply(*stand_ins)
        if example.inputs != (*stand_ins,) or is_much(example) or not device.reuses_graphs:
            return Tensor(apply(*nodes), device)
        like = example.like = Example(example, is_plain=False)
        with device.running:  # for other threads
            device.examples[kind] = like
    return on_nodes(like.node, nodes, device)


def again_with_number(function: Callable[..., Tensor], x1: Any, x2: Any) -> Tensor | None:
    """The same for a tensor and a number, in this order or the other; None for other operands."""
    at = 0 if type(x1) in _PLAIN else 1
    x, number = (x1, x2) if at else (x2, x1)
    if core._captures or type(number) not in _PLAIN or not isinstance(x, Tensor) or x._actual_requires_grad:
        return None
    node, device = x._actual_node, x.device
    like = device.examples.get((function, node.shape, node.dtype.name, type(number), at))
    if like is None or node.tracked:
        return None
    try:
        constant = constant_like(node, number)
    except OverflowError:  # the caller says of what
        return None
    nodes = (node, constant) if at else (constant, node)
    if node.value is not None:
        return tensor_like(like.node.alike(nodes), device)
    return on_pending(like.node, node, nodes, device)


def note_number(function: Callable[..., Tensor], node: Node, device: Device, x1: Any, x2: Any) -> None:
    """Have `again_with_number` make nodes like this, which applies a primitive to both operands."""
    at = 0 if type(x1) in _PLAIN else 1
    x, number = (x1, x2) if at else (x2, x1)
    if type(number) not in _PLAIN or node.tracked or not device.reuses_graphs:
        return
    operand, constant = node.inputs[1 - at], node.inputs[at]
    if constant.like is not NUMBER or operand is not x._actual_node:
        return  # it is made of several primitives
    stand_in = placeholder(operand.shape, operand.dtype)
    example = node.on((stand_in, constant) if at else (constant, stand_in))
    if is_much(example):
        return
    example.like = Example(example, is_plain=False)
    with device.running:  # for other threads
        device.examples[function, operand.shape, operand.dtype.name, type(number), at] = example.like


def again_as(kind: tuple[Any, ...], x: Tensor) -> Tensor | None:
    """What an operation of a kind gives for a tensor, if it was noted by `note_as`; else None."""
    node, device = x._actual_node, x.device
    if core._captures or x._actual_requires_grad or node.tracked:
        return None
    try:
        like = device.examples.get(kind)
    except TypeError:  # an argument is not hashable
        return None
    if like is None:
        return None
    if node.value is not None:
        return tensor_like(like.node.alike((node,)), device)
    return on_pending(like.node, node, (node,), device)


def note_as(kind: tuple[Any, ...], like: Example, device: Device, rest: tuple[Any, ...]) -> None:
    """Have `again_as` make nodes like others, if the `rest` of the arguments is told apart by its types."""
    items = [item for arg in rest for item in (arg if type(arg) is tuple else (arg,))]
    if like.node.like is not None and like.inputs_of is tuple and _TOLD_APART.issuperset(map(type, items)):
        with device.running:  # for other threads
            device.examples[kind] = like


def viewed(function: Callable[[Tensor, Any], Tensor], x: Tensor, given: Any) -> Tensor:
    """`function(x, given)`, which is a view of `x`: like the one before, if the integers are the same."""
    node, device = x._actual_node, x.device
    if core._captures or x._actual_requires_grad or node.tracked:
        return function(x, given)
    items = tuple(given) if type(given) in (tuple, list) else (given,)
    if not _INTEGERS.issuperset(map(type, items)):  # (1.0,) == (True,) == (1,)
        return function(x, given)
    kind = (function, node.shape, node.dtype.name, items)
    like = device.examples.get(kind)
    if like is None:
        result = function(x, given)
        view = result._actual_node
        if view.inputs != (node,) or not device.reuses_graphs:  # `node` itself, or computed already
            return result
        example = view.on((placeholder(node.shape, node.dtype),))
        # It may lie in the memory of its input, and need no program.
        like = example.like = Example(example, shares=view.primitive.same_bytes)
        with device.running:  # for other threads
            device.examples[kind] = like
    if node.value is not None:
        return tensor_like(like.node.alike((node,)), device)
    return on_pending(like.node, node, (node,), device)


def sliced(x: Tensor, slices: Slices, shape: Shape) -> Tensor:
    """Slices of all axes of a tensor, in a shape without the axes of single items."""
    node, device = x._actual_node, x.device
    if core._captures or x._actual_requires_grad or node.tracked:
        return record(shaping.reshape(shaping.slice_(x._node, slices), shape), x)
    kind = (node.shape, node.dtype.name, slices, shape)
    like = device.examples.get(kind)
    if like is None:
        example = shaping.reshape(shaping.slice_(placeholder(node.shape, node.dtype), slices), shape)
        if not device.reuses_graphs or not example.inputs or is_much(example):
            return record(shaping.reshape(shaping.slice_(node, slices), shape), x)
        like = _note_slices(example, node, slices, device)
        with device.running:  # for other threads
            device.examples[kind] = like
    example = like.node
    if node.value is not None:
        inputs = (node,) if like.is_plain else (example.inputs[0].alike((node,)),)
        return tensor_like(example.alike(inputs), device)
    if like.is_plain:  # a single view
        return on_pending(example, node, (node,), device)
    part = on_pending(example.inputs[0], node, (node,), device)._actual_node
    return like_before((shaping.reshape, *kind), (part,), device, partial(shaping.reshape, shape=shape))


def _note_slices(example: Node, node: Node, slices: Slices, device: Device) -> Example:
    """The example of slices in a shape, which may lie in the memory of their input, and need no program."""
    shares = not _is_copied(node, slices, device)
    (before,) = example.inputs
    if before.value is None:
        before.like = Example(before, shares=shares)
    example.like = Example(example, is_plain=before.value is not None, shares=shares)
    return example.like


def _is_copied(node: Node, slices: Sequence[tuple[int, int, int]], device: Device) -> bool:
    """Whether slices of a value are copied, wherever that lies: see `sharing`."""
    counts = tuple([count for _, count, _ in slices])
    if counts == node.shape or 0 in counts:
        return False
    first = first_item(node.shape, slices)
    return first is None or bool(first * node.dtype.itemsize % device.capabilities.offset_alignment)


def is_much(node: Node) -> bool:
    """Whether a node is computed as soon as it has a tensor: see `Tensor`."""
    return node.depth > core.MAX_DEPTH or node.pending_bytes > core.MAX_PENDING_BYTES


def tensor_like(node: Node, device: Device) -> Tensor:
    """The tensor of a node that needs no check: outside of a capture, of few computed values, no gradient."""
    tensor = _new_tensor(Tensor)
    tensor._actual_node = node
    tensor.device = device
    tensor._actual_requires_grad = False
    tensor._actual_grad = None
    return tensor
