"""Functions of several operations, which are recorded once for each kind of arguments and then called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from penstock.graph.calls import Subgraph, call, subgraph_between
from penstock.graph.decompose import decompose
from penstock.graph.node import Node, placeholder
from penstock.runtime import Device
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor
from penstock.tensor.recording import only_recording, recording

P = ParamSpec("P")
_Known = tuple[Subgraph, list[int]]  # and which of the tensors it takes


def composite(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A function whose nodes depend on the shapes and dtypes of tensors and on the other arguments only.

    Where a gradient passes, or inside a jitted function, it is called as it is.
    """

    @wraps(function)
    def composed(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if capture.get() is not None:
            return function(*args, **kwargs)
        tensors: list[Tensor] = []
        for arg in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(arg, Tensor):
                if arg._actual_requires_grad and recording():
                    return function(*args, **kwargs)
                tensors.append(arg)
        known = _known(function, args, kwargs, tensors[0].device) if tensors else None
        if known is None:
            return function(*args, **kwargs)
        subgraph, taken = known
        (result,) = call(subgraph, [tensors[at]._actual_node for at in taken])
        return Tensor(result, tensors[0].device)

    return composed


def _known(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], device: Device
) -> _Known | None:
    """What the function records for arguments of this kind; None where it has to be called."""
    if not device.reuses_graphs:
        return None
    key: list[Any] = [function, *kwargs]
    for arg in (*args, *kwargs.values()):
        if not isinstance(arg, Tensor):
            key += [type(arg), repr(arg) if type(arg) is float else arg]  # 0 is equal to -0
        elif arg.device is not device:
            return None
        else:
            key += [arg._actual_node.shape, arg._actual_node.dtype]
    whole = tuple(key)
    try:
        hash(whole)
    except TypeError:
        return None
    graphs = device.subgraphs
    with device.running:  # another thread may come here at the same time
        if whole not in graphs:
            graphs[whole] = _recorded(function, args, kwargs, device)
        known: _Known | None = graphs.use(whole)
        return known


def _recorded(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], device: Device
) -> _Known | None:
    leaves: list[Node] = []

    def stand_in(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        leaves.append(placeholder(arg.shape, arg.dtype))
        return Tensor(leaves[-1], device)

    with only_recording():
        result = function(*map(stand_in, args), **{name: stand_in(arg) for name, arg in kwargs.items()})
    made = subgraph_between(dict.fromkeys(leaves), decompose([result._node], device.capabilities))
    return None if made is None else (made[0], [leaves.index(leaf) for leaf in made[1]])
