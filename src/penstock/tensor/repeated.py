"""Operations that were recorded before, on other values: the shortest way to their nodes.

What was recorded is an `Example`. A node that is made like it needs no rule of shapes, and where all inputs
are computed, no key of its program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

from penstock.execution.sharing import first_item
from penstock.graph import shaping
from penstock.graph.calls import CALL
from penstock.graph.node import Example, Node, Shape, placeholder
from penstock.graph.reference import Constant, constant_key, constant_values
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
        if y._actual_requires_grad or other.tracked or y.device is not device or node is other:
            return None
        is_computed = is_computed and other.value is not None
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
    return Tensor(example.alike_pending(nodes), device)


def again_with_number(function: Callable[..., Tensor], x1: Any, x2: Any) -> Tensor | None:
    """The same for a tensor and a number, in this order or the other; None for other operands.

    The tensor may be an operation on values that is not computed yet.
    """
    at = 0 if type(x1) in _PLAIN else 1
    x, number = (x1, x2) if at else (x2, x1)
    if core._captures or type(number) not in _PLAIN or not isinstance(x, Tensor) or x._actual_requires_grad:
        return None
    node, device = x._actual_node, x.device
    below = node.like
    if node.value is not None:
        like = device.examples.get((function, node.shape, node.dtype.name, type(number), at))
    elif below is None or below.through or below.number_at is not None:
        return None
    else:
        like = device.examples.get((function, below, type(number), at))
    if like is None or node.tracked:
        return None
    try:
        constant = constant_like(node, number)
    except OverflowError:  # the caller says of what
        return None
    if like.numbers and constant_key(constant, "number") in _constants_of(node):
        return None  # its program has one constant less
    return tensor_like(like.node.alike((node, constant) if at else (constant, node)), device)


def note_number(function: Callable[..., Tensor], node: Node, device: Device, x1: Any, x2: Any) -> None:
    """Have `again_with_number` make nodes like this, which applies a primitive to both operands."""
    at = 0 if type(x1) in _PLAIN else 1
    number, operand = x2 if at else x1, node.inputs[1 - at]
    through, below = operand.value is None, operand.like
    if through and (below is None or below.through or below.number_at is not None):
        return  # where there is another constant, it depends on both whether they are one
    if type(number) not in _PLAIN or node.tracked or is_much(node) or not device.reuses_graphs:
        return
    kind: tuple[Any, ...]
    numbers: tuple[Any, ...] = ()
    if below is None or not through:
        stand_in, kind = placeholder(operand.shape, operand.dtype), (operand.shape, operand.dtype.name)
    else:
        stand_in, kind, numbers = below.node, (below,), constant_values(_constants_of(operand))
    constant = node.inputs[at]
    example = node.on((stand_in, constant) if at else (constant, stand_in))
    example.like = Example(example, number_at=at, through=through)
    example.like.numbers = numbers
    with device.running:  # for other threads
        device.examples[function, *kind, type(number), at] = example.like


def _constants_of(node: Node) -> tuple[Constant, ...]:
    """The constants of a pending node that is an operation on values without numbers, or a subgraph."""
    return node.attributes["subgraph"].constants if node.primitive is CALL else ()


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
    return Tensor(like.node.alike_pending((node,)), device)


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
    if type(given) is not tuple or not _INTEGERS.issuperset(map(type, given)):  # (1.0,) == (True,) == (1,)
        return function(x, given)
    kind = (function, node.shape, node.dtype.name, given)
    like = device.examples.get(kind)
    if like is not None:
        return Tensor(like.node.alike_pending((node,)), device)
    result = function(x, given)
    view = result._actual_node
    if view.inputs == (node,) and device.reuses_graphs:  # not `node` itself, and not computed already
        example = view.on((placeholder(node.shape, node.dtype),))
        like = Example(example)
        if not view.primitive.same_bytes:  # else it may lie in the memory of its input, and need no program
            example.like = like
        with device.running:  # for other threads
            device.examples[kind] = like
    return result


def sliced(x: Tensor, slices: Slices, shape: Shape) -> Tensor:
    """Slices of all axes of a tensor, in a shape without the axes of single items."""
    node, device = x._actual_node, x.device
    if core._captures or x._actual_requires_grad or node.tracked:
        return record(shaping.reshape(shaping.slice_(x._node, slices), shape), x)
    kind = (node.shape, node.dtype.name, slices, shape)
    like = device.examples.get(kind)
    if like is None:
        result = shaping.reshape(shaping.slice_(node, slices), shape)
        if device.reuses_graphs and result is not node and not is_much(result):
            _note_slices(node, slices, shape, device)
        return Tensor(result, device)
    example = like.node
    if like.through:
        before = example.inputs[0]
        if node.value is None:
            return Tensor(shaping.reshape(before.alike_pending((node,)), shape), device)
        return tensor_like(example.alike((before.alike((node,)),)), device)
    return Tensor(example.alike_pending((node,)), device)


def _note_slices(node: Node, slices: Slices, shape: Shape, device: Device) -> None:
    """Have `sliced` make nodes like the first."""
    example = shaping.reshape(shaping.slice_(placeholder(node.shape, node.dtype), slices), shape)
    like = Example(example, through=example.inputs[0].value is None)
    if _is_copied(node, slices, device):  # else it may lie in the memory of its input, and need no program
        example.like = like
    with device.running:  # for other threads
        device.examples[node.shape, node.dtype.name, slices, shape] = like


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
