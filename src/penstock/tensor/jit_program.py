"""From what a function did while it was captured to the program that replays it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import CaptureError
from penstock.execution.realize import executables
from penstock.execution.structure import Structure
from penstock.graph.custom_vjp import refusing
from penstock.graph.node import Node, Primitive, leaf, topological
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.tensor.core import Tensor, leaf_of
from penstock.tensor.index_watch import watched_indices
from penstock.tensor.jit_gradients import Differentiable
from penstock.tensor.replay import Captured, Changes, Guards, Slot, Source, replaced
from penstock.tensor.tracing import Origin, StandIn, Tracing

SLOT = Slot()


def captured_program(
    name: str, tracing: Tracing, result: Any, outputs: Sequence[Tensor], donated: list[int]
) -> Captured:
    """What replays a function that has just been traced; `outputs` are the tensors in its result."""
    assigned = _assigned(tracing)
    device = _device(tracing, [*outputs, *assigned])
    changed = [found.tensor for found in tracing.stand_ins if found.changed]
    watches = watched_indices([tensor._node for tensor in (*outputs, *changed, *assigned)], device)
    stand_ins = [found for found in tracing.stand_ins if found.changed]
    changes = _changes(tracing, stand_ins, name)
    wanted = [tensor._node for tensor in (*outputs, *(found.tensor for found in stand_ins), *assigned)]
    pending = list(dict.fromkeys(node for node in wanted if node.value is None))
    place = {node: at for at, node in enumerate(pending)}
    structure = Structure(pending, device.capabilities, checked=False)
    over = _replaced_inputs(stand_ins, place, structure.inputs)
    program = executables(device).build(structure, over) if pending else None
    gradients, reads = _gradients(name, tracing, outputs, donated)
    return Captured(
        name=name,
        device=device,
        program=program,
        numbers=structure.constants(),
        inputs=[_source(tracing, node) for node in structure.inputs],
        wanted=[place[node] if node.value is None else _source(tracing, node) for node in wanted],
        kinds=[(node.shape, node.dtype) for node in wanted],
        result=replaced(result, itertools.repeat(SLOT)),
        results=len(outputs),
        changes=changes,
        guards=_guards(tracing, changes),
        parts=list(tracing.parts.values()),
        donated=donated,
        gradients=gradients,
        differentiable=_differentiable(device, tracing, outputs, gradients),
        refused_reads=reads,
        watches=watches,
    )


def _device(tracing: Tracing, given: Sequence[Tensor]) -> Device:
    """The device of all that the function gives and changes."""
    devices = {tensor.device for tensor in given}
    devices |= {found.actual.device for found in tracing.stand_ins if found.changed or found.grad_assigned}
    if not devices:
        raise CaptureError("a jitted function has to give or change a tensor")
    if len(devices) > 1:
        names = sorted(device.name for device in devices)
        raise CaptureError(f"a jitted function runs on one device, and {names} are used")
    return devices.pop()


def _new_gradients(tracing: Tracing) -> Iterator[tuple[StandIn, Tensor | None, Origin | None]]:
    """Tensors from outside whose gradient is another one at the end; where it is from outside itself."""
    for found in tracing.stand_ins:
        gradient = found.tensor._actual_grad
        if found.grad_assigned and not (found.grad_seen and gradient is found.first_grad):
            known = None if gradient is None else tracing.of_tensor(tracing.stand_in(gradient))
            yield found, gradient, None if known is None else known.origin


def _assigned(tracing: Tracing) -> list[Tensor]:
    """The gradients that the function computes for tensors from outside."""
    found = list(_new_gradients(tracing))
    return [gradient for _, gradient, origin in found if gradient is not None and origin is None]


def _changes(tracing: Tracing, changed: Sequence[StandIn], name: str) -> Changes:
    """What happens to tensors from outside."""
    histories: dict[int, Primitive] = {}
    for number, found in enumerate(changed):
        tensor = found.tensor
        if tensor._actual_requires_grad and leaf_of(tensor._actual_node) is not tensor:
            histories[number] = refusing(
                f"the jitted function {name} changed a tensor in place to a value that has a gradient, which "
                f"is not kept; let the function return the value, or use detach() inside it"
            )
    grads = [
        (found.origin, gradient is not None if origin is None else origin)
        for found, gradient, origin in _new_gradients(tracing)
    ]
    flags = [
        (found.origin, found.tensor._actual_requires_grad)
        for found in tracing.stand_ins
        if found.tensor._actual_requires_grad != found.requires_grad
        and not (found in changed and changed.index(found) in histories)
    ]
    return Changes([found.origin for found in changed], histories, grads, flags)


def _guards(tracing: Tracing, changes: Changes) -> Guards:
    found = tracing.stand_ins
    outside = [one.origin.outside for one in found if one.origin.outside is not None]
    watched = {id(tensor) for tensor in (*(outside if changes else ()), *tracing.aliases.values())}
    return Guards(
        facts=tracing.facts,
        grads=[(one.origin, one.first_grad is None) for one in found if one.grad_seen],
        kinds=[
            (one.origin, one.first.shape, one.first.dtype, one.requires_grad, one.ends)
            for one in found
            if one.origin.argument < 0
        ],
        aliases=tracing.aliases,
        outside=frozenset(watched),
    )


def _replaced_inputs(
    changed: Sequence[StandIn], place: dict[Node, int], inputs: Sequence[Node]
) -> dict[int, int]:
    """Which results of the program replace which inputs: the new values of tensors from outside."""
    number = {node: at for at, node in enumerate(inputs)}
    return {
        place[found.tensor._actual_node]: number[found.first]
        for found in changed
        if found.origin.outside is not None and found.tensor._actual_node in place and found.first in number
    }


def _source(tracing: Tracing, node: Node) -> Source:
    """Where a replay finds the value of a node that the program reads."""
    found = tracing.of_node(node)
    if found is not None:
        return found.origin
    if isinstance(node.value, Buffer):
        node.value.shared = True  # it may be another tensor's value, which must not be written over
    return leaf(node.value, node.shape, node.dtype)


def _gradients(
    name: str, tracing: Tracing, outputs: Sequence[Tensor], donated: list[int]
) -> tuple[list[bool | Primitive | None], list[Origin]]:
    """Whether each result has a gradient, or why it has none; and what refused ones depend on."""
    if not any(tensor.requires_grad for tensor in outputs):
        return [None] * len(outputs), []
    nodes = [tensor._node for tensor in outputs if tensor.requires_grad]
    found = [tracing.of_node(node) for node in topological(nodes, through_values=True)]
    reached = [one for one in found if one is not None and one.first.tracked]
    why = ""
    if any(one.changed and (one.origin.outside is not None or _ends_anew(one)) for one in reached):
        why = "changes tensors in place that the result was computed from"
    elif any(one.grad_assigned and one.tensor._actual_grad is not None for one in tracing.stand_ins):
        why = "calls backward() itself"
    elif donated:
        why = "was given the memory of its arguments (donate)"
    if not why:
        return [tensor.requires_grad or None for tensor in outputs], []
    refused = refusing(
        f"the gradient of what the jitted function {name} gives cannot be had, as it {why}; call backward() "
        f"inside the function, or use detach() on the result"
    )
    reads = [
        one.origin
        for one in reached
        if one.origin.argument >= 0
        or (one.origin.outside is not None and not one.changed and not one.grad_assigned)
    ]
    return [refused if tensor.requires_grad else None for tensor in outputs], list(dict.fromkeys(reads))


def _ends_anew(argument: StandIn) -> bool:
    """Whether gradients end in the value that an argument was given, as outside of a jitted function."""
    return leaf_of(argument.tensor._actual_node) is argument.tensor


def _differentiable(
    device: Device, tracing: Tracing, outputs: Sequence[Tensor], gradients: Sequence[bool | Primitive | None]
) -> Differentiable | None:
    known = [
        tensor._node if gradient is True else None
        for tensor, gradient in zip(outputs, gradients, strict=True)
    ]
    return Differentiable(device, tracing, known) if any(node is not None for node in known) else None
