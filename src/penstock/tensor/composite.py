"""Functions of several operations, recorded once for each kind of arguments and called as subgraphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec

import numpy as np

from penstock.graph.calls import Subgraph, call, subgraph_between
from penstock.graph.decompose import decompose
from penstock.graph.node import Node, placeholder
from penstock.runtime import Device
from penstock.tensor import core
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor
from penstock.tensor.recording import recorded_once, recording

P = ParamSpec("P")
_NUMBERS = (float, complex, np.inexact)
_Known = tuple[Subgraph, list[int]]  # and the positions of its inputs among the tensors


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
        known = recorded_once(device, tuple(key), lambda: _recorded(function, args, kwargs, device), True)
        if known is None:
            return function(*args, **kwargs)
        subgraph, taken = known
        (result,) = call(subgraph, [nodes[position] for position in taken])
        return Tensor(result, device)

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
    made = subgraph_between(dict.fromkeys(leaves), decompose([result._node], device.capabilities))
    return None if made is None else (made[0], [leaves.index(leaf) for leaf in made[1]])
