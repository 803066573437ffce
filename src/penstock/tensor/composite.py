"""Functions that are recorded once for each kind of arguments.

Those of several operations are subgraphs, which are called; those of one are nodes like the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec

import numpy as np

from penstock.graph.bounds import BOUNDED
from penstock.graph.calls import call, subgraph_between
from penstock.graph.decompose import decompose
from penstock.graph.elementwise import stop
from penstock.graph.node import Node, placeholder
from penstock.runtime import Device
from penstock.tensor import core
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor
from penstock.tensor.recording import recorded_once, recording

P = ParamSpec("P")
_NUMBERS = (float, complex, np.inexact)
# A node of stand-ins for the tensors, and the inputs of another, from the nodes of all tensors.
_Known = tuple[Node, Callable[[Sequence[Node]], tuple[Node, ...]]]
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
        example, inputs_of = known
        result = Node(example.primitive, inputs_of(nodes), example.attributes, like=example)
        return Tensor(stop(result) if result.tracked else result, device)

    return composed


def _recorded(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], device: Device
) -> _Known | None:
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
    is_single = node.inputs and {*node.inputs} <= {*leaves} and not node.primitive.transient
    if not is_single or node.primitive is BOUNDED:
        made = subgraph_between(dict.fromkeys(leaves), decompose([node], device.capabilities))
        if made is None:
            return None
        (node,) = call(made[0], made[1])
    if node.inputs == tuple(leaves):
        return node, tuple
    places = [leaves.index(leaf) for leaf in node.inputs]
    return node, lambda nodes: tuple([nodes[place] for place in places])
