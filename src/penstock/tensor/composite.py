"""Functions that are recorded once for each kind of arguments.

Those of several operations are subgraphs, which are called; those of one are nodes like the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, ParamSpec

import numpy as np

from penstock.graph.bounds import BOUNDED
from penstock.graph.calls import call, subgraph_between
from penstock.graph.decompose import decompose
from penstock.graph.elementwise import stop
from penstock.graph.node import Example, Node, placeholder
from penstock.graph.shaping import RESHAPE, SLICE
from penstock.runtime import Device
from penstock.tensor import core
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor
from penstock.tensor.operands import constant_like
from penstock.tensor.recording import recorded_once, recording

P = ParamSpec("P")
_NUMBERS = (float, complex, np.inexact)
_PLAIN = (float, int)  # types of numbers that most operations have
_new_tensor = Tensor.__new__
_NEW: Any = object()  # what is known of arguments that are new


def composite(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A function whose nodes depend on the shapes and dtypes of tensors and on the other arguments only.

    If a gradient is recorded, or inside a jitted function, the function runs directly.
    """

    @wraps(function)
    def composed(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if core._captures and capture.get() is not None:
            return function(*args, **kwargs)
        key: list[Any] = [function]
        given: Iterable[Any] = args
        if kwargs:
            key += kwargs
            given = (*args, *kwargs.values())
        nodes: list[Node] = []
        device: Device | None = None
        for arg in given:
            if isinstance(arg, Tensor):
                if device is None:
                    device = arg.device
                if device is not arg.device or (arg._actual_requires_grad and recording()):
                    return function(*args, **kwargs)
                node = arg._actual_node
                nodes.append(node)
                key += (node.shape, node.dtype.name)
            else:
                # By repr, since 0.0 == -0.0.
                key += (type(arg), repr(arg) if isinstance(arg, _NUMBERS) else arg)
        if device is None:
            return function(*args, **kwargs)
        kind = tuple(key)
        try:
            known = device.subgraphs.get(kind, _NEW)
        except TypeError:  # an argument is not hashable
            return function(*args, **kwargs)
        if known is _NEW:
            known = recorded_once(device, kind, partial(_recorded, function, args, kwargs, device), True)
        if known is None:
            return function(*args, **kwargs)
        return _repeated(known, tuple(nodes), device)

    return composed


def is_computed(x: Tensor) -> bool:
    """Whether a tensor has a value and passes no gradient, outside of any capture."""
    return not core._captures and not x._actual_requires_grad and x._actual_node.value is not None


def again(function: Callable[..., Tensor], x: Tensor, y: Tensor | None = None) -> Tensor | None:
    """What a composite of `function` gives, if the same was recorded before, for computed values; else None.

    The shortest way for the most frequent operations.
    """
    node, device = x._actual_node, x.device
    if core._captures or x._actual_requires_grad or node.value is None or node.tracked:
        return None
    if y is None:
        like = device.subgraphs.get((function, node.shape, node.dtype.name))
        nodes: tuple[Node, ...] = (node,)
    else:
        other = y._actual_node
        if y._actual_requires_grad or other.value is None or other.tracked or y.device is not device:
            return None
        kind = (function, node.shape, node.dtype.name, other.shape, other.dtype.name)
        like = device.subgraphs.get(kind)
        nodes = (node, other)
        if node is other:
            return None
    if like is None or like.node.like is None:
        return None
    return _tensor(like.node.alike(nodes if like.inputs_of is tuple else like.inputs_of(nodes)), device)


def again_with_number(function: Callable[..., Tensor], x1: Any, x2: Any) -> Tensor | None:
    """The same for a tensor and a number, in this order or the other; None for other operands."""
    at = 0 if type(x1) in _PLAIN else 1
    x, number = (x1, x2) if at else (x2, x1)
    if core._captures or type(number) not in _PLAIN or not isinstance(x, Tensor) or x._actual_requires_grad:
        return None
    node, device = x._actual_node, x.device
    like = device.subgraphs.get((function, node.shape, node.dtype.name, type(number), at))
    if like is None or node.value is None or node.tracked:
        return None
    try:
        constant = constant_like(node, number)
    except OverflowError:  # the caller says of what
        return None
    return _tensor(like.node.alike((node, constant) if at else (constant, node)), device)


def note_number(function: Callable[..., Tensor], node: Node, device: Device, x1: Any, x2: Any) -> None:
    """Have `again_with_number` make nodes like this, which applies a primitive to both operands."""
    at = 0 if type(x1) in _PLAIN else 1
    number, value = x2 if at else x1, node.inputs[1 - at]
    if type(number) not in _PLAIN or value.value is None or node.tracked or _is_much(node):
        return
    if device.reuses_graphs:
        stand_in, constant = placeholder(value.shape, value.dtype), node.inputs[at]
        example = node.on((stand_in, constant) if at else (constant, stand_in))
        kind = (function, value.shape, value.dtype.name, type(number), at)
        example.like = device.subgraphs[kind] = Example(example, tuple, at)


def _is_much(node: Node) -> bool:
    """Whether a node is computed as soon as it has a tensor: see `Tensor`."""
    return node.depth > core.MAX_DEPTH or node.pending_bytes > core.MAX_PENDING_BYTES


def _tensor(node: Node, device: Device) -> Tensor:
    """The tensor of a node that needs no check: outside of a capture, of few computed values, no gradient."""
    tensor = _new_tensor(Tensor)
    tensor._actual_node = node
    tensor.device = device
    tensor._actual_requires_grad = False
    tensor._actual_grad = None
    return tensor


def _repeated(like: Example, nodes: tuple[Node, ...], device: Device) -> Tensor:
    """The tensor of a node like others, of the nodes of all tensors."""
    example = like.node
    inputs = nodes if like.inputs_of is tuple else like.inputs_of(nodes)
    if example.like is not None and (len(inputs) == 1 or len({*inputs}) == len(inputs)):
        for node in inputs:
            if node.value is None or node.tracked:
                break
        else:
            return _tensor(example.alike(inputs), device)
    result = Node(example.primitive, inputs, example.attributes, like=example)
    return Tensor(stop(result) if result.tracked else result, device)


def _recorded(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], device: Device
) -> Example | None:
    leaves: list[Node] = []

    def stand_in(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        leaves.append(placeholder(arg.shape, arg.dtype))
        return Tensor(leaves[-1], device)

    given = [stand_in(arg) for arg in args]  # positional first: the order in which `composed` passes nodes
    result = function(*given, **{name: stand_in(arg) for name, arg in kwargs.items()})
    if not isinstance(result, Tensor):
        return None
    node = result._node
    if not node.inputs:
        return None  # an argument, or what depends on none: there is nothing to record
    is_single = {*node.inputs} <= {*leaves} and not node.primitive.transient
    if not is_single or node.primitive is BOUNDED:
        made = subgraph_between(dict.fromkeys(leaves), decompose([node], device.capabilities))
        if made is None:
            return None
        (node,) = call(made[0], made[1])
    places = [leaves.index(leaf) for leaf in node.inputs]
    in_order = node.inputs == tuple(leaves)
    like = Example(node, tuple if in_order else lambda nodes: tuple([nodes[place] for place in places]))
    # What may lie in the memory of its input is not always computed, and a value that is there twice is one.
    computed = not node.primitive.is_identity and node.primitive not in (RESHAPE, SLICE)
    if computed and len({*node.inputs}) == len(node.inputs) and not _is_much(node):
        node.like = like
    return like
