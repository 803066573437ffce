"""Replays of captured functions: the program, its inputs, and what its outputs are used for.

A replay reads the present values of tensors, and overwrites the memory of tensors that the function changes
if nothing else refers to it. It takes effect as a whole. If it fails before anything was written, nothing has
changed; if it fails later, the tensors that were being overwritten are marked as damaged.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.errors import DamagedTensor, OutOfDeviceMemory
from penstock.execution.hosting import settle
from penstock.execution.realize import realize
from penstock.graph.custom_vjp import refused
from penstock.graph.node import LEAF, DType, Node, Primitive, Shape, leaf
from penstock.interrupts import held_back
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.stream.recorder import Run
from penstock.tensor.aliasing import Aliasing
from penstock.tensor.core import Tensor
from penstock.tensor.index_watch import IndexWatch
from penstock.tensor.jit_gradients import Differentiable
from penstock.tensor.outcome import Outcome
from penstock.tensor.planning import Build, LastResults
from penstock.tensor.tracing import MadeInside, NoValue, Origin, ends_in

if TYPE_CHECKING:
    from penstock.execution.executable import Executable

Source = Origin | Node  # a tensor that exists before the call, or a constant
_node, _value = attrgetter("_actual_node"), attrgetter("_actual_node.value")


class Slot:
    """A placeholder for a tensor in nested tuples, lists and dicts."""


def replaced(value: Any, tensors: Iterator[Any]) -> Any:
    """Nested tuples, lists and dicts with their tensors replaced, in order."""
    if isinstance(value, (Tensor, Slot)):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        items = [replaced(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: replaced(item, tensors) for name, item in value.items()}
    return value


@dataclass(frozen=True)
class Guards:
    """The state outside that a capture depends on: it is replayed only while that is unchanged."""

    facts: list[tuple[Callable[[], object], object]]  # functions that were called, and their results
    grads: list[tuple[Origin, bool]]  # tensors whose gradient it read, and whether that was None
    # Of tensors that it used: shape, dtype, whether they require a gradient, whether they are leaves, and
    # whether it made their values itself.
    kinds: list[tuple[Origin, Shape, DType, bool, bool, bool]]
    # Arguments, by position, that it also uses as tensors from outside; and the ids of tensors from outside
    # that it matters for (all of them if the function changes tensors).
    aliases: dict[int, Tensor]
    outside: frozenset[int]


@dataclass
class Changes:
    """The changes of a function to tensors that existed before the call."""

    values: list[Origin]  # tensors that are given another value
    histories: dict[int, Primitive]  # by position in `values`: those with a gradient history
    grads: list[tuple[Origin, bool | Origin]]  # a new gradient (True), None (False), or a tensor
    flags: list[tuple[Origin, bool]]  # new values of `requires_grad`

    def __bool__(self) -> bool:
        return bool(self.values or self.grads or self.flags)


@dataclass
class _Fixed:
    """A node in the place of a tensor: a value that the program always takes."""

    _actual_node: Node


@dataclass
class Captured:
    """A captured program of a function, its inputs and its outputs."""

    name: str
    device: Device
    program: Executable | None
    numbers: Sequence[Any]
    inputs: list[Source]
    wanted: list[int | Source]  # results, then new values of tensors, then new gradients
    kinds: list[tuple[Shape, DType]]
    result: Any
    results: int
    changes: Changes
    guards: Guards
    parts: list[Any]  # a replay calls `before_replay`, and `after_failure` if it changed nothing
    donated: list[int]
    # For each result: it has a gradient (True), refuses it (a primitive), or requires none (None).
    gradients: list[bool | Primitive | None]
    differentiable: Differentiable | None
    watches: list[IndexWatch]
    limit_bytes: int | None  # the limit of the device's memory when the program was planned
    build: Build | None  # under a limit: plan again with the present live bytes
    last: LastResults  # of all captures of the function
    refused_reads: list[Origin]  # what results that refuse a gradient were computed from
    # By program: `auto` may choose another for each run.
    _aliasing: dict[Any, Aliasing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Positions of wanted values that several tensors share: an input, or an output that is wanted twice.
        self._sharing = [
            position
            for position, source in enumerate(self.wanted)
            if not isinstance(source, int) or self.wanted.count(source) > 1
        ]
        # What holds each input, or the number of an argument, if none is a gradient.
        self.holders: list[tuple[Tensor | _Fixed | None, int]] = []
        if not any(isinstance(source, Origin) and source.gradient_of is not None for source in self.inputs):
            self.holders = [
                (_Fixed(source), -1) if isinstance(source, Node) else (source.outside, source.argument)
                for source in self.inputs
            ]
        self._outside = [holder for holder, _ in self.holders]
        self._inside = [
            (position, at) for position, (holder, at) in enumerate(self.holders) if holder is None
        ]
        # Tensors from outside, and their nodes when they were last checked, by weak references.
        watched = [origin for origin, *_ in self.guards.kinds]
        self._watched = [origin.outside for origin in watched if origin.outside is not None]
        self._seen: list[Callable[[], Node | None]] = [lambda: None] * len(self._watched)
        self._graded = [
            (origin.outside, without) for origin, without in self.guards.grads if origin.outside is not None
        ]
        self._given_grads = [(origin, none) for origin, none in self.guards.grads if origin.outside is None]
        self._careful = bool(self.changes or self.donated)
        # Whether a call does nothing but launch, and give tensors other values.
        more = (self.results, self.parts, self.watches, self.donated, self._graded, self._given_grads)
        other = (self.changes.histories, self.changes.grads, self.changes.flags)
        self.only_launches = bool(self.holders) and not any((*more, *other))
        self._computed = [at for at in range(self.results) if isinstance(self.wanted[at], int)]
        self._launched = False  # whether the present replay will take effect
        self._apart: set[int] = set()  # outputs of the last replay that could not be written over inputs

    # Validity for a call

    def still_true(self, arguments: Sequence[Tensor]) -> bool:
        """Whether the state outside is the same as at the capture."""
        if not self.same_facts():
            return False
        for tensor, without in self._graded:
            if (tensor._actual_grad is None) != without:
                return False
        for origin, without in self._given_grads:
            if (origin.tensor(arguments)._actual_grad is None) != without:
                return False
        if self.guards.outside and not self._same_aliases(arguments):
            return False
        changed = self._changed()
        if changed is None:
            return all(self._is(kind[0].tensor(arguments), *kind[1:]) for kind in self.guards.kinds)
        for at in changed:
            if not self._is(self._watched[at], *self.guards.kinds[at][1:]):
                return False
        for at in changed:
            self._seen[at] = weakref.ref(self._watched[at]._actual_node)
        return True

    def same_facts(self) -> bool:
        """Whether all but tensors is the same as at the capture."""
        if self.device.limit_bytes != self.limit_bytes:
            return False
        return all(fact() == answer for fact, answer in self.guards.facts)

    def _is(
        self, tensor: Tensor, shape: Shape, dtype: DType, requires_grad: bool, ends: bool, made: bool
    ) -> bool:
        """Whether a tensor is still what it was at the capture."""
        node = tensor._actual_node
        if node.shape != shape or node.dtype is not dtype or tensor.device is not self.device:
            return False
        if tensor._actual_requires_grad != requires_grad or isinstance(node.value, MadeInside) != made:
            return False
        return not requires_grad or ends_in(tensor, node) == ends

    def _changed(self) -> list[int] | None:
        """Which of the watched tensors have other nodes than at the last check; None: all may."""
        if len(self._watched) < len(self.guards.kinds):
            return None
        nodes, seen = list(map(_node, self._watched)), [reference() for reference in self._seen]
        if nodes == seen:  # the usual case
            return []
        return [at for at, pair in enumerate(zip(nodes, seen, strict=True)) if pair[0] is not pair[1]]

    def _same_aliases(self, arguments: Sequence[Tensor]) -> bool:
        known = self.guards.aliases
        if not known and self.guards.outside.isdisjoint(map(id, arguments)):
            return True
        present = {at: tensor for at, tensor in enumerate(arguments) if id(tensor) in self.guards.outside}
        return present.keys() == known.keys() and all(present[at] is known[at] for at in known)

    # Running

    def replay(self, arguments: list[Tensor]) -> Any:
        """Run the program on the present values of the arguments and of tensors from outside."""
        with self.device.running:
            if not self.parts:
                return self._replay_in_budget(arguments)
            self._launched = False
            for part in self.parts:
                part.before_replay()
            try:
                return self._replay_in_budget(arguments)
            except BaseException:
                if not self._launched:
                    for part in self.parts:
                        part.after_failure()
                raise

    def _replay_in_budget(self, arguments: list[Tensor]) -> Any:
        """Replay; if more is live under a limit than when the program was planned, plan it again.

        State of others that it does not use moves to the host first, where the device has a link.
        """
        try:
            return self._replay(arguments)
        except OutOfDeviceMemory:
            if not self._can_repeat:
                raise
        offloads = self.device.capabilities.offloads and self.device.dispatcher is None
        if offloads and self.device.spill({self._node(source, arguments) for source in self.inputs}):
            try:
                return self._replay(arguments)
            except OutOfDeviceMemory:
                if not self._can_repeat:
                    raise
        assert self.build is not None
        given = [source for source in self.inputs if isinstance(source, Node) or not source.lasts]
        self.program = self.build(self._apart, [self._node(source, arguments) for source in given])
        self._aliasing.clear()
        return self._replay(arguments)

    @property
    def _can_repeat(self) -> bool:
        """Whether a replay under a limit that failed has changed nothing, and can be planned again."""
        return self.build is not None and self.program is not None and not self.program.wrote

    def _replay(self, arguments: list[Tensor]) -> Any:
        with _replaying(self.device):
            return self._replay_now(arguments)

    def _replay_now(self, arguments: list[Tensor]) -> Any:
        tensors: list[Any] = list(self._outside)
        for position, at in self._inside:
            tensors[position] = arguments[at]
        inputs = list(map(_value, tensors))
        del tensors
        if not inputs or None in inputs:
            inputs = [self._node(source, arguments).value for source in self.inputs]
        program: Any = self.program
        if self.device.dispatcher is None and program is not None:
            hosted = program.schedule.hosted
            at_the_host = hosted or self.device.layers().hosts_state
            if at_the_host and any(buffer.hosted != (at in hosted) for at, buffer in enumerate(inputs)):
                inputs.clear()  # which would keep the old memory from use
                nodes = [self._node(source, arguments) for source in self.inputs]
                settle(nodes, hosted, self.device)
                inputs = [node.value for node in nodes]
                del nodes
        if self.device.dispatcher is not None and program is not None:
            program, inputs = program.chosen(
                inputs, lambda: [self._node(source, arguments) for source in self.inputs], self.numbers
            )
        # First, as these references keep values from being overwritten that a gradient will need.
        read = self._read(arguments)
        aliasing = self.aliasing_of(program)
        replaced_inputs, kept = self._free_memory(inputs, aliasing, arguments)
        if self.build is not None:
            self._apart = aliasing.replaced_inputs.keys() - replaced_inputs.keys()
        positions = aliasing.others if kept is aliasing.kept else self._not_kept(kept)

        def finish(outputs: list[Buffer]) -> Outcome:
            return self._outcome(outputs, positions, arguments, read)

        if self._careful:
            return self._replay_whole(program, inputs, replaced_inputs, finish, arguments)
        return finish([] if program is None else program.run(inputs, self.numbers, replaced_inputs)).result

    def _read(self, arguments: list[Tensor]) -> tuple[Node, ...]:
        """The nodes that this call reads, which the results keep for their gradients."""
        if self.differentiable is not None:
            return self.differentiable.read(arguments)
        return tuple([origin.tensor(arguments)._actual_node for origin in self.refused_reads])

    def _replay_whole(
        self,
        program: Any,
        inputs: list[Buffer],
        replaced_inputs: dict[int, int],
        finish: Callable[[list[Buffer]], Outcome],
        arguments: list[Tensor],
    ) -> Any:
        """Run the program and change tensors; a failure changes none, or marks them as damaged."""
        outputs: list[Buffer] | None = None
        with held_back:
            try:
                outputs = [] if program is None else program.run(inputs, self.numbers, replaced_inputs)
                self._launched = True
                outcome = finish(outputs)
                outcome.take_effect()
                for watch in self.watches:
                    watch.ran()
                return outcome.result
            except BaseException as error:
                if outputs is not None:  # all launches succeeded
                    finish(outputs).take_effect()
                elif not isinstance(error, Exception) or any(part.wrote for part in _programs(program)):
                    self.damage(replaced_inputs, arguments, error)
                raise

    def damage(self, replaced_inputs: dict[int, int], arguments: list[Tensor], error: BaseException) -> None:
        """Mark the tensors that were being overwritten."""
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        lost = NoValue(
            DamagedTensor,
            f"the value of this tensor is lost, as the jitted function {self.name} failed while it was "
            f"overwriting it ({reason}); load the last checkpoint, or give it another value",
        )
        for position in replaced_inputs.values():
            source = self.inputs[position]
            if isinstance(source, Origin):
                tensor = source.tensor(arguments)
                node = tensor._actual_node
                tensor._become(leaf(lost, node.shape, node.dtype))
        for watch in self.watches:
            watch.forget()

    def _not_kept(self, kept: set[int]) -> list[int]:
        return [position for position in range(len(self.wanted)) if position not in kept]

    def _outcome(
        self, outputs: list[Buffer], positions: list[int], arguments: list[Tensor], read: tuple[Node, ...]
    ) -> Outcome:
        """The results, and the new values of tensors at these positions of `wanted`, not applied yet."""
        buffers: dict[int, Buffer] = {}
        for position in positions:
            source = self.wanted[position]
            buffers[position] = (
                outputs[source] if isinstance(source, int) else self._node(source, arguments).value
            )
        for position in self._sharing:  # a later replay must not overwrite these
            if position in buffers:
                buffers[position].shared = True
        results = [self._result(at, buffers[at], read) for at in range(self.results)]
        outcome = Outcome(replaced(self.result, iter(results)))
        if self._computed:
            self.last.buffers = [weakref.ref(buffers[at]) for at in self._computed]
        if not self._careful:
            return outcome
        end = self.results + len(self.changes.values)
        for position in positions[self.results :]:
            if position >= end:
                break
            tensor = self.changes.values[position - self.results].tensor(arguments)
            history = self.changes.histories.get(position - self.results)
            if history is None:
                outcome.values.append((tensor, leaf(buffers[position], *self.kinds[position]), False))
            else:
                node = refused(history, buffers[position], *self.kinds[position])
                outcome.values.append((tensor, node, True))
        for origin, assigned in self.changes.grads:
            gradient = None
            if isinstance(assigned, Origin):
                gradient = assigned.tensor(arguments)
            elif assigned:
                gradient = Tensor(leaf(buffers[end], *self.kinds[end]), self.device)
                end += 1
            outcome.grads.append((origin.tensor(arguments), gradient))
        outcome.flags = [(origin.tensor(arguments), flag) for origin, flag in self.changes.flags]
        outcome.donated = [arguments[at] for at in self.donated]
        return outcome

    def _result(self, at: int, buffer: Buffer, read: tuple[Node, ...]) -> Tensor:
        gradient = self.gradients[at]
        if isinstance(gradient, Primitive):
            return Tensor(refused(gradient, buffer, *self.kinds[at], *read), self.device, True)
        node = leaf(buffer, *self.kinds[at])
        if gradient is None:
            return Tensor(node, self.device)
        assert self.differentiable is not None
        return Tensor(self.differentiable.node(at, node, read), self.device, True)

    @staticmethod
    def _node(source: Source, arguments: Sequence[Tensor]) -> Node:
        """The node of an input, computed if it was pending."""
        if isinstance(source, Node):
            return source
        tensor = source.tensor(arguments)
        node = tensor._actual_node
        if node.value is None:
            realize([node], tensor.device)
        return node

    def recorded_replay(self, arguments: list[Tensor], captured: float) -> Any:
        """Replay, and report it to profiles; `captured`: when the capture for this call started, or 0."""
        start = perf_counter()
        result = self.replay(arguments)
        spent = start - captured if captured else 0.0
        program: Any = self.program
        if self.device.dispatcher is not None and program is not None:
            program = program.current[-1]
        run = Run("jit", program, bool(captured), spent, captured or start, perf_counter(), (), ())
        for recorder in self.device.stream.recorders:
            recorder.computed(run)
        return result

    def aliasing_of(self, program: Any) -> Aliasing:
        """Which outputs of a program of it are written over which inputs."""
        aliasing = self._aliasing.get(program)
        if aliasing is None:
            may = None if program is None else program.may_overwrite
            aliasing = self._aliasing[program] = Aliasing(self, may)
        return aliasing

    def _free_memory(
        self, inputs: list[Buffer], aliasing: Aliasing, arguments: list[Tensor]
    ) -> tuple[dict[int, int], set[int]]:
        """Which outputs overwrite which inputs; and the positions of tensors that keep their node.

        Inputs are overwritten only if nothing else refers to them.
        """
        if not self.donated:  # the fast path: usually all tensors can be overwritten
            old: list[Any] = [owner._actual_grad for _, owner, _ in aliasing.gradients]
            nodes = [tensor._actual_node for tensor in (*aliasing.tensors, *old)]
            shared = [inputs[at].shared for at in aliasing.numbers]
            kinds = [node.primitive for node in nodes]
            # 3 references are those of the tensor, the list and the argument of getrefcount.
            most = max(map(sys.getrefcount, chain(nodes, old)), default=0)
            if most <= 3 and True not in shared and kinds.count(LEAF) == len(kinds):
                return aliasing.replaced_inputs, aliasing.kept
            del nodes, old
        replaced_inputs: dict[int, int] = {}
        kept: set[int] = set()
        for at, tensor, output, position in aliasing.in_place:
            # Two values lay there, and the other is gone: references of the node, the list and getrefcount.
            if inputs[at].shared and inputs[at].whole is inputs[at] and sys.getrefcount(inputs[at]) == 3:
                inputs[at].shared = False
            if not inputs[at].shared and sys.getrefcount(tensor._actual_node) <= 2:
                replaced_inputs[output] = at
                if tensor._actual_node.primitive is LEAF and position in aliasing.kept:
                    kept.add(position)
        for at, owner, output in aliasing.gradients:
            # Not by a name: Python 3.14 does not count the reference of an argument that has one.
            held = sys.getrefcount(owner._actual_grad) > 2
            gradient: Any = owner._actual_grad
            if not (held or sys.getrefcount(gradient._actual_node) > 2 or inputs[at].shared):
                replaced_inputs[output] = at
        for at, source in enumerate(self.inputs) if self.donated else ():
            if isinstance(source, Origin) and source.argument in self.donated and not inputs[at].shared:
                if source in self.wanted or sys.getrefcount(arguments[source.argument]._actual_node) > 2:
                    continue  # it is itself a result, or a recorded node will read it
                free = [
                    output
                    for output in self.wanted
                    if isinstance(output, int) and output not in replaced_inputs
                ]
                chosen = next((output for output in free if aliasing.may(output, at)), None)
                if chosen is not None:
                    replaced_inputs[chosen] = at
        return replaced_inputs, kept


@contextmanager
def _replaying(device: Device) -> Iterator[None]:
    """While inputs are known by where they lie, state must not move."""
    device.replaying = True
    try:
        yield
    finally:
        device.replaying = False


def _programs(program: Any) -> Sequence[Any]:
    """The programs of which a program consists: several if it is placed on several devices."""
    return getattr(program, "programs", (program,))
