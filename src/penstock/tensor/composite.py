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
from penstock.graph.example import Example
from penstock.graph.node import Node, placeholder
from penstock.graph.shaping import RESHAPE, SLICE
from penstock.runtime import Device
from penstock.tensor import core
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor
from penstock.tensor.recording import recorded_once, recording
from penstock.tensor.repeated import again, again_as, is_much, note_as, on_nodes, tensor_like

P = ParamSpec("P")
_NUMBERS = (float, complex, np.inexact)
_NEW: Any = object()  # what is known of arguments that are new


def composite(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A function whose nodes depend on the shapes and dtypes of tensors and on the other arguments only.

    If a gradient is recorded, or inside a jitted function, the function runs directly.
    """

    @wraps(function)
    def composed(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if core._captures and capture.get() is not None:
            return function(*args, **kwargs)
        kind: tuple[Any, ...] = ()  # of an operation on a tensor, with arguments that are none
        if args and type(args[0]) is Tensor and not args[0]._actual_requires_grad:
            x, repeated = args[0], None
            if len(args) == 1 or type(args[1]) is not Tensor:
                node = x._actual_node
                kind = (function, node.shape, node.dtype.name)
                for arg in args[1:]:
                    kind += (arg, type(arg)) if type(arg) is not tuple else (arg, *map(type, arg))
                for name, arg in kwargs.items():
                    kind += (name, arg, type(arg)) if type(arg) is not tuple else (name, arg, *map(type, arg))
                repeated = again_as(kind, x)
            elif len(args) == 2 and not kwargs:
                repeated = again(function, x, args[1])
            if repeated is not None:
                return repeated
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
                key += _told_apart(arg)
        if device is None:
            return function(*args, **kwargs)
        general = tuple(key)
        try:
            known = device.subgraphs.get(general, _NEW)
        except TypeError:  # an argument is not hashable
            return function(*args, **kwargs)
        if known is _NEW:
            known = recorded_once(device, general, partial(_recorded, function, args, kwargs, device), True)
            if known is not None and kind and len(nodes) == 1:
                note_as(kind, known, device, (*args[1:], *kwargs.values()))
        if known is None:
            return function(*args, **kwargs)
        return _repeated(known, tuple(nodes), device)

    return composed


def _told_apart(arg: Any) -> tuple[Any, ...]:
    """The part of a key that an argument is, where 1, 1.0 and True differ, and 0.0 and -0.0."""
    kind = type(arg)
    if isinstance(arg, tuple):
        return kind, tuple(map(_told_apart, arg))
    return kind, repr(arg) if isinstance(arg, _NUMBERS) else arg


def _repeated(like: Example, nodes: tuple[Node, ...], device: Device) -> Tensor:
    """The tensor of a node like others, of the nodes of all tensors."""
    example = like.node
    inputs = nodes if like.inputs_of is tuple else like.inputs_of(nodes)
    if example.like is not None:
        is_computed = len({*inputs}) == len(inputs)
        for node in inputs:
            if node.tracked:
                break
            is_computed = is_computed and node.value is not None
        else:
            if is_computed:
                return tensor_like(example.alike(inputs), device)
            return on_nodes(example, inputs, device)
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
    parts = decompose([node], device.capabilities)
    # Products are rewritten before they are decomposed.
    is_whole = parts[0] is node or node.primitive.multiplies_matrices
    is_single = is_whole and {*node.inputs} <= {*leaves} and not node.primitive.transient
    if not is_single or node.primitive is BOUNDED:
        made = subgraph_between(dict.fromkeys(leaves), parts)
        if made is None:
            return None
        (node,) = call(made[0], made[1])
    places = [leaves.index(leaf) for leaf in node.inputs]
    in_order = node.inputs == tuple(leaves)
    like = Example(
        node,
        tuple if in_order else lambda nodes: tuple([nodes[place] for place in places]),
        is_plain=len({*node.inputs}) == len(node.inputs),
        shares=node.primitive.is_identity or node.primitive in (RESHAPE, SLICE),
    )
    if not is_much(node):
        node.like = like
    return like
