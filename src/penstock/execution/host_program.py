"""A graph that NumPy computes, node by node, where building kernels would take longer than it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from penstock.errors import OutOfDeviceMemory
from penstock.execution.structure import Structure
from penstock.graph.bounds import BOUNDED, Bound
from penstock.graph.calls import detached
from penstock.graph.node import Array, Node, Shape, topological
from penstock.graph.reference import Evaluator, constant_key, evaluator, into_memory
from penstock.memory.buffer import Buffer, new_buffer
from penstock.runtime import Device

if TYPE_CHECKING:
    from penstock.execution.launched import RunProgram

Other = TypeVar("Other")
_FEW_ITEMS = 256  # of a value that is kept for the next run
_QUIET = copy_context()  # in which NumPy does not warn; to enter a copy takes less time than `np.errstate`
_QUIET.run(np.seterr, all="ignore")


class _Step(NamedTuple):
    """A node that is computed. The values of a run have numbers: first the inputs, then one for each step."""

    call: Callable[..., Any]  # takes values, and as `out` memory for the result or None
    given: tuple[int, ...]  # the numbers of the values
    ended: Sequence[int]  # those that no later step takes
    kind: tuple[int, np.dtype[Any], Shape] | None  # bytes, dtype and shape of a result written in place


class HostProgram:
    """The values of some nodes from the values of others, as an `Executable`; it holds no values."""

    def __init__(self, structure: Structure, device: Device) -> None:
        self._device, opened = device, device.layers()
        self._stream, self._at_hand = opened.stream, opened.transfers.at_hand
        self.small = structure.small(seen=True)  # so it stays with NumPy
        self.largest = structure.largest
        self.runs = 0
        self._numbers: Sequence[Any] = ()  # the constants of the last run
        self._last: dict[Node, Array] = {}  # values that depend on these only
        self._bounds: Sequence[Bound] = ()  # what indices are for, in this run
        inputs, wanted = detached(structure.inputs, structure.nodes)
        self.nodes = [node for node in topological(wanted) if node.value is None]
        self.operations = sum(not node.primitive.is_free for node in self.nodes)
        self._kinds = [(np.dtype(node.dtype), node.shape) for node in inputs]
        number = {node: at for at, node in enumerate((*inputs, *self.nodes))}
        self._wanted = [number[node] for node in wanted]
        ended = _last_uses(self.nodes, wanted)
        shares = device.capabilities.shared_memory
        self._steps = [
            _Step(
                self._call(node, structure),
                tuple([number[parent] for parent in node.inputs]),
                [number[parent] for parent in ended.get(node, ())],
                (node.nbytes, np.dtype(node.dtype), node.shape)
                if shares and node in wanted and into_memory(node)
                else None,
            )
            for node in self.nodes
        ]
        # The same as `run` from inputs in the device's own memory; None if the device still uses one of them.
        self.run_in_place = self._run_alone(self._run_in_place) if self.is_alone else self._run_in_place

    @property
    def is_alone(self) -> bool:
        """Whether it is one operation, on inputs and constants, that is written where its result stays."""
        if len(self._wanted) > 1 or not self._steps:  # where all values are inputs, nothing is computed
            return False
        *before, last = self._steps
        return last.kind is not None and not any(step.given for step in before)

    def _call(self, node: Node, structure: Structure) -> Callable[..., Any]:
        """What computes a node: see `_Step`."""
        evaluate, attributes = evaluator(node), node.attributes
        if node.primitive is BOUNDED:  # an error names the line that recorded it this time
            if attributes["bound"].checked:
                return lambda index, out: index
            bound = structure.bounds.index(attributes["bound"])
            return lambda *given, out: evaluate(given, {"bound": self._bounds[bound]})
        if node.primitive.constants:
            numbers = {name: structure.numbers[constant_key(node, name)] for name in node.primitive.constants}
            return lambda *given, out: self._with_constants(node, evaluate, numbers, given)
        return into_memory(node) or (lambda *given, out: evaluate(given, attributes))

    @property
    def runner(self) -> RunProgram:
        """What runs it where no index is checked."""
        return self._run_alone(self.run) if self.is_alone else self.run

    def run(
        self, inputs: Sequence[Buffer], numbers: Sequence[Any], bounds: Sequence[Bound] = ()
    ) -> list[Buffer]:
        """The values of the wanted nodes, from buffers of the inputs, constants, and what indices are for."""
        self._bounds = bounds
        results = self.run_in_place(inputs, numbers)
        if results is not None:
            return results
        with ExitStack() as views:  # which waits for the device
            given = zip(inputs, self._kinds, strict=True)
            values = [views.enter_context(self._device.view(buffer, *kind)) for buffer, kind in given]
            return self._computed(values, numbers)

    def _run_alone(self, general: Callable[..., Other]) -> Callable[..., list[Buffer] | Other]:
        """What runs a single operation on inputs and constants, with little around it, where it can."""
        layers, stream = self._device.layers(), self._stream
        call, given, _, kind = self._steps[-1]
        assert kind is not None
        nbytes, dtype, shape = kind
        kinds, constants = self._kinds, len(self._steps) - 1
        is_ordered = given == (*range(len(kinds) + constants),)

        def run(inputs: Sequence[Buffer], numbers: Sequence[Any]) -> list[Buffer] | Other:
            if stream.recorders or numbers is not self._numbers or len(self._last) < constants:
                return general(inputs, numbers)
            if stream.unavailable:
                return general(inputs, numbers)
            values = []
            for buffer, (own_dtype, own_shape) in zip(inputs, kinds, strict=True):
                host, usage = buffer.memory.host, buffer.usage
                if host is None or usage.event is not None or usage.writer:
                    return general(inputs, numbers)
                values.append(np.ndarray(own_shape, own_dtype, host, buffer.offset))
            try:
                result = new_buffer(layers.driver, nbytes, layers.source, True)
            except OutOfDeviceMemory:
                return general(inputs, numbers)  # which makes room
            host = result.memory.host
            if host is None or result.usage.event is not None:
                return general(inputs, numbers)
            values += self._last.values()
            if not is_ordered:
                values = [values[at] for at in given]
            _QUIET.copy().run(call, *values, out=np.ndarray(shape, dtype, host))
            return [result]

        return run

    def _run_in_place(self, inputs: Sequence[Buffer], numbers: Sequence[Any]) -> list[Buffer] | None:
        """See `run_in_place`."""
        values = [self._at_hand(buffer, *kind) for buffer, kind in zip(inputs, self._kinds, strict=True)]
        for value in values:
            if value is None:
                return None
        return self._computed(values, numbers)

    def _computed(self, values: list[Any], numbers: Sequence[Any]) -> list[Buffer]:
        """The same from the values of the inputs."""
        self.runs += 1
        if numbers is not self._numbers:
            self._numbers, self._last = numbers, {}
        recorders = self._stream.recorders
        if not recorders:
            return _QUIET.copy().run(self._run_steps, values)
        start = perf_counter()
        results = _QUIET.copy().run(self._run_steps, values)
        for recorder in recorders:
            recorder.computed_by_host(" ".join(names(self.nodes)), start, perf_counter())
        return results

    def _run_steps(self, values: list[Any]) -> list[Buffer]:
        device = self._device
        written: dict[int, Buffer] = {}  # results that were computed in their memory
        for call, given, ended, kind in self._steps:
            target = None
            if kind is not None:
                nbytes, dtype, shape = kind
                buffer = device.empty(nbytes, unused=True)
                target = self._at_hand(buffer, dtype, shape)
                if target is not None:
                    written[len(values)] = buffer
            values.append(call(*[values[at] for at in given], out=target))
            for at in ended:
                values[at] = None
        return [written.pop(at) if at in written else device.upload(values[at]) for at in self._wanted]

    def _with_constants(
        self, node: Node, evaluate: Evaluator, numbers: dict[str, int], inputs: Sequence[Array]
    ) -> Array:
        """The value of a node with constants; that of the last run serves again if it takes little memory."""
        value = self._last.get(node)
        if value is None:
            given = {name: self._numbers[number] for name, number in numbers.items()}
            value = evaluate(inputs, node.attributes | given)
            if not inputs and (node.size <= _FEW_ITEMS or not any(value.strides)):
                self._last[node] = value
        return value


def _last_uses(nodes: Sequence[Node], wanted: Collection[Node]) -> dict[Node, list[Node]]:
    """The values that each node is the last to need."""
    last = {parent: node for node in nodes for parent in node.inputs}
    result: dict[Node, list[Node]] = {}
    for parent, node in last.items():
        if parent.value is None and parent not in wanted:
            result.setdefault(node, []).append(parent)
    return result


def names(nodes: Sequence[Node]) -> list[str]:
    """What some nodes do, each once."""
    pending = [node for node in nodes if node.value is None and not node.primitive.is_free]
    return list(dict.fromkeys(node.primitive.name for node in pending))
