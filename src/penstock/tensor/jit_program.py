"""From the trace of a function to the program that replays it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import CaptureError
from penstock.execution.hosting import State, arriving_bytes
from penstock.execution.realize import executables, realize
from penstock.execution.structure import Structure
from penstock.graph.custom_vjp import refusing
from penstock.graph.node import Node, Primitive, leaf, topological
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.tensor.core import Tensor
from penstock.tensor.index_watch import watched_indices
from penstock.tensor.jit_gradients import Differentiable
from penstock.tensor.leaves import leaf_of
from penstock.tensor.planning import Build, LastResults
from penstock.tensor.replay import Captured, Changes, Guards, Slot, Source, replaced
from penstock.tensor.tracing import Origin, StandIn, Tracing

if TYPE_CHECKING:
    from penstock.execution.executable import Executable
    from penstock.execution.memory_plan import MemoryPlan

SLOT = Slot()


def captured_program(
    name: str, tracing: Tracing, result: Any, outputs: Sequence[Tensor], donated: list[int], last: LastResults
) -> Captured:
    """The replayable form of a traced function; `outputs` are the tensors in its result."""
    traced = _Traced(name, tracing, outputs, last)
    device, structure = traced.device, traced.structure
    build = _building(device, structure, traced.over, traced.state)
    program = build() if traced.pending else None
    wanted, outputs_of, changes = traced.wanted, traced.outputs, traced.changes
    gradients, reads = _gradients(name, tracing, outputs, donated)
    return Captured(
        name=name,
        device=device,
        program=program,
        numbers=structure.constants(),
        inputs=[_source(tracing, node) for node in structure.inputs],
        wanted=[outputs_of[node] if node.value is None else _source(tracing, node) for node in wanted],
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
        watches=traced.watches,
        limit_bytes=device.limit_bytes,
        build=None if device.limit_bytes is None else build,
        last=last,
    )


def _building(device: Device, structure: Structure, over: Mapping[int, int], state: Sequence[State]) -> Build:
    """What builds the program of a traced function, at first and for what is live later."""

    def build(apart: Collection[int] = (), given: Sequence[Node] | None = None) -> Executable:
        now = state
        if given is not None:
            now = [replace(each, arriving=arriving_bytes(given, device)) for each in state]
        aliases = {output: at for output, at in over.items() if output not in apart}
        return executables(device).build(structure, aliases, *now)

    return build


def memory_plan(name: str, tracing: Tracing, outputs: Sequence[Tensor], last: LastResults) -> MemoryPlan:
    """The memory and time that the program of a traced function would take under each budget."""
    traced = _Traced(name, tracing, outputs, last)
    if traced.device.dispatcher is not None:
        raise CaptureError("a memory plan is for one device, and auto stands for several; name a device")
    _realize_outside(tracing, traced.device)
    return executables(traced.device).memory_plan(traced.structure, traced.over, *traced.state)


def compiling(
    name: str, tracing: Tracing, outputs: Sequence[Tensor], last: LastResults
) -> Callable[[], None]:
    """What compiles the kernels of the program of a traced function, in any thread."""
    traced = _Traced(name, tracing, outputs, last)
    return executables(traced.device).compiling(traced.structure, traced.over, *traced.state)


class _Traced:
    """The nodes that a traced function computes, and their device."""

    def __init__(self, name: str, tracing: Tracing, outputs: Sequence[Tensor], last: LastResults) -> None:
        assigned = _assigned(tracing)
        self.device = device = _device(tracing, [*outputs, *assigned])
        changed = [stand_in.tensor for stand_in in tracing.stand_ins if stand_in.changed]
        self.watches = watched_indices([tensor._node for tensor in (*outputs, *changed, *assigned)], device)
        stand_ins = [stand_in for stand_in in tracing.stand_ins if stand_in.changed]
        self.changes = _changes(tracing, stand_ins, name)
        given = (*outputs, *(stand_in.tensor for stand_in in stand_ins), *assigned)
        self.wanted = [tensor._node for tensor in given]
        self.pending = list(dict.fromkeys(node for node in self.wanted if node.value is None))
        self.outputs = {node: at for at, node in enumerate(self.pending)}
        self.structure = Structure(self.pending, device.capabilities, checked=False)
        self.over = _replaced_inputs(stand_ins, self.outputs, self.structure.inputs)
        self.over |= self._replaced_gradients(tracing)
        if device.limit_bytes is not None:
            _realize_outside(tracing, device)
        # What each replay puts where its program expects it; none if several devices may run it.
        self.state = [self._state(tracing, last)] if device.dispatcher is None else []

    def _state(self, tracing: Tracing, last: LastResults) -> State:
        """Inputs and results that are tensors from outside, or gradients of these."""
        holders: dict[int, Callable[[], Node]] = {}
        given: list[Node] = []
        for at, node in enumerate(self.structure.inputs):
            known = tracing.of_node(node)
            if known is not None and known.origin.lasts and known.actual.device is self.device:
                holders[at] = _holder(known.origin)
            else:
                given.append(node if known is None else known.actual._actual_node)
        new = [item.tensor._node for item in tracing.stand_ins if item.changed and item.origin.lasts]
        new += [
            gradient._node
            for item, gradient, _ in _new_gradients(tracing)
            if gradient is not None and item.origin.lasts
        ]
        times = Counter(self.wanted)
        return State(
            holders,
            frozenset(self.outputs[node] for node in new if times[node] == 1 and node in self.outputs),
            arriving=arriving_bytes(given, self.device),
            last=partial(last.nbytes, self.device),
        )

    def _replaced_gradients(self, tracing: Tracing) -> dict[int, int]:
        """The outputs that are written over inputs, by position: new gradients of tensors from outside."""
        positions = {node: at for at, node in enumerate(self.structure.inputs)}
        over: dict[int, int] = {}
        for stand_in, gradient, _ in _new_gradients(tracing):
            first = None if stand_in.first_grad is None else tracing.of_tensor(stand_in.first_grad)
            if gradient is None or first is None or first.origin.gradient_of is not stand_in.origin:
                continue
            old, new = first.first, gradient._node
            if first.origin.lasts and new in self.outputs and old in positions and old not in self.wanted:
                over[self.outputs[new]] = positions[old]
        return over


def _holder(origin: Origin) -> Callable[[], Node]:
    """What holds the value of a tensor from outside, when it is asked for."""
    return lambda: origin.tensor(())._actual_node


def _realize_outside(tracing: Tracing, device: Device) -> None:
    """Compute pending tensors from outside, as a call would: a plan counts live bytes."""
    pending = {stand_in.actual._actual_node: stand_in.actual.device for stand_in in tracing.stand_ins}
    for node, where in pending.items():
        if node.value is None and where is device:
            realize([node], device)


def _device(tracing: Tracing, given: Sequence[Tensor]) -> Device:
    """The device of all tensors that the function returns or changes."""
    devices = {tensor.device for tensor in given}
    changed = [stand_in for stand_in in tracing.stand_ins if stand_in.changed or stand_in.grad_assigned]
    devices |= {stand_in.actual.device for stand_in in changed}
    if not devices:
        raise CaptureError("a jitted function has to return or change a tensor")
    if len(devices) > 1:
        names = sorted(device.name for device in devices)
        raise CaptureError(f"a jitted function runs on one device, and {names} are used")
    return devices.pop()


def _new_gradients(tracing: Tracing) -> Iterator[tuple[StandIn, Tensor | None, Origin | None]]:
    """Tensors from outside with a new gradient, that gradient, and its origin if it is from outside."""
    for stand_in in tracing.stand_ins:
        gradient = stand_in.tensor._actual_grad
        if stand_in.grad_assigned and not (stand_in.grad_seen and gradient is stand_in.first_grad):
            source = None if gradient is None else tracing.of_tensor(tracing.stand_in(gradient))
            yield stand_in, gradient, None if source is None else source.origin


def _assigned(tracing: Tracing) -> list[Tensor]:
    """The gradients that the function computes for tensors from outside."""
    replaced_gradients = list(_new_gradients(tracing))
    return [gradient for _, gradient, origin in replaced_gradients if gradient is not None and origin is None]


def _changes(tracing: Tracing, changed: Sequence[StandIn], name: str) -> Changes:
    """The changes of tensors from outside."""
    histories: dict[int, Primitive] = {}
    for position, stand_in in enumerate(changed):
        tensor = stand_in.tensor
        if tensor._actual_requires_grad and leaf_of(tensor._actual_node) is not tensor:
            histories[position] = refusing(
                f"the jitted function {name} changed a tensor in place to a value that has a gradient, which "
                f"is not kept; let the function return the value, or use detach() inside it"
            )
    grads = [
        (stand_in.origin, gradient is not None if origin is None else origin)
        for stand_in, gradient, origin in _new_gradients(tracing)
    ]
    flags = [
        (stand_in.origin, stand_in.tensor._actual_requires_grad)
        for stand_in in tracing.stand_ins
        if stand_in.tensor._actual_requires_grad != stand_in.requires_grad
        and not (stand_in in changed and changed.index(stand_in) in histories)
    ]
    return Changes([stand_in.origin for stand_in in changed], histories, grads, flags)


def _guards(tracing: Tracing, changes: Changes) -> Guards:
    stand_ins = tracing.stand_ins
    outside = [item.origin.outside for item in stand_ins if item.origin.outside is not None]
    watched = {id(tensor) for tensor in (*(outside if changes else ()), *tracing.aliases.values())}
    return Guards(
        facts=tracing.facts,
        grads=[(item.origin, item.first_grad is None) for item in stand_ins if item.grad_seen],
        kinds=[
            (item.origin, item.first.shape, item.first.dtype, item.requires_grad, item.ends, item.made)
            for item in stand_ins
            if item.origin.argument < 0
        ],
        aliases=tracing.aliases,
        outside=frozenset(watched),
    )


def _replaced_inputs(
    changed: Sequence[StandIn], outputs: dict[Node, int], inputs: Sequence[Node]
) -> dict[int, int]:
    """The outputs that replace inputs, by position: the new values of tensors from outside."""
    positions = {node: at for at, node in enumerate(inputs)}
    return {
        outputs[item.tensor._actual_node]: positions[item.first]
        for item in changed
        if item.origin.outside is not None and item.tensor._actual_node in outputs and item.first in positions
    }


def _source(tracing: Tracing, node: Node) -> Source:
    """The source of an input of the program at a replay."""
    stand_in = tracing.of_node(node)
    if stand_in is not None:
        return stand_in.origin
    if isinstance(node.value, Buffer):
        node.value.shared = True  # another tensor may have this value, so it must not be overwritten
    return leaf(node.value, node.shape, node.dtype)


def _gradients(
    name: str, tracing: Tracing, outputs: Sequence[Tensor], donated: list[int]
) -> tuple[list[bool | Primitive | None], list[Origin]]:
    """Which results have a gradient, or a primitive that refuses it; and what the refused depend on."""
    if not any(tensor.requires_grad for tensor in outputs):
        return [None] * len(outputs), []
    nodes = [tensor._node for tensor in outputs if tensor.requires_grad]
    sources = [tracing.of_node(node) for node in topological(nodes, through_values=True)]
    reached = [item for item in sources if item is not None and item.first.tracked]
    why = ""
    if any(item.changed and (item.origin.outside is not None or _ends_anew(item)) for item in reached):
        why = "changes tensors in place that the result was computed from"
    elif any(item.grad_assigned and item.tensor._actual_grad is not None for item in tracing.stand_ins):
        why = "calls backward() itself"
    elif donated:
        why = "was given the memory of its arguments (donate)"
    if not why:
        return [tensor.requires_grad or None for tensor in outputs], []
    refused = refusing(
        f"the result of the jitted function {name} has no gradient, as it {why}; call backward() "
        f"inside the function, or use detach() on the result"
    )
    reads = [
        item.origin
        for item in reached
        if item.origin.argument >= 0
        or (item.origin.outside is not None and not item.changed and not item.grad_assigned)
    ]
    return [refused if tensor.requires_grad else None for tensor in outputs], list(dict.fromkeys(reads))


def _ends_anew(argument: StandIn) -> bool:
    """Whether an argument was given a value at which gradients end."""
    return leaf_of(argument.tensor._actual_node) is argument.tensor


def _differentiable(
    device: Device, tracing: Tracing, outputs: Sequence[Tensor], gradients: Sequence[bool | Primitive | None]
) -> Differentiable | None:
    known = [
        tensor._node if gradient is True else None
        for tensor, gradient in zip(outputs, gradients, strict=True)
    ]
    return Differentiable(device, tracing, known) if any(node is not None for node in known) else None
