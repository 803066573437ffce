"""What a captured function is replayed by: one program, what goes into it, and what becomes of its results.

A replay reads what tensors hold at that time, and writes over the memory of those that the function changes
where nobody else refers to it. It takes effect as a whole. Where it fails before anything was written,
nothing has changed; where it fails later, whoever uses a tensor that was being written over is told so.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.errors import DamagedTensor
from penstock.execution.realize import realize
from penstock.graph.custom_vjp import refused
from penstock.graph.node import LEAF, DType, Node, Primitive, Shape, leaf
from penstock.interrupts import held_back
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.stream.recorder import Run
from penstock.tensor.core import Tensor
from penstock.tensor.index_watch import IndexWatch
from penstock.tensor.jit_gradients import Differentiable
from penstock.tensor.tracing import NoValue, Origin, ends_in

if TYPE_CHECKING:
    from penstock.execution.executable import Executable

Source = Origin | Node  # a tensor that is there before the call, or a constant


_DONATED = NoValue(ValueError, "this tensor was donated to a jitted function, which may have written over it")


class Slot:
    """Stands for a tensor in a nest of tuples, lists and dicts."""


def replaced(value: Any, tensors: Iterator[Any]) -> Any:
    """The nest with other tensors, in the same order."""
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
    """What a capture found outside, and is replayed for as long as it is so."""

    facts: list[tuple[Callable[[], object], object]]  # what the function asked for, and the answers
    grads: list[tuple[Origin, bool]]  # tensors whose gradient it asked for, and whether there was none
    # Of tensors that it used; the last: whether they require a gradient, and whether it ends in them.
    kinds: list[tuple[Origin, Shape, DType, bool, bool]]
    # Arguments that it also finds outside, by number; and what it finds there, if it changes tensors.
    aliases: dict[int, Tensor]
    outside: frozenset[int]


@dataclass
class Changes:
    """What a function does to tensors that were there before the call."""

    values: list[Origin]  # given another value
    histories: dict[int, Primitive]  # those of them that have a gradient then, by number
    grads: list[tuple[Origin, bool | Origin]]  # given a gradient (True), none (False), or a tensor
    flags: list[tuple[Origin, bool]]  # told to require a gradient, or not to

    def __bool__(self) -> bool:
        return bool(self.values or self.grads or self.flags)


@dataclass
class Captured:
    """One program of a function, and what goes in and out of it."""

    name: str
    device: Device
    program: Executable | None
    numbers: Sequence[Any]
    inputs: list[Source]
    wanted: list[int | Source]  # the results, then the values that tensors get, then their gradients
    kinds: list[tuple[Shape, DType]]
    result: Any
    results: int
    changes: Changes
    guards: Guards
    parts: list[Any]  # each replay calls their `before_replay`, and `after_failure` if it changes nothing
    donated: list[int]
    # Of each result: its gradient is known (True), refused (a primitive), or there is none (None).
    gradients: list[bool | Primitive | None]
    differentiable: Differentiable | None
    watches: list[IndexWatch]
    refused_reads: list[Origin]  # what refused results were computed from, for who asks for their gradient
    _ways: dict[Any, Ways] = field(default_factory=dict)  # for each device on which the program runs

    def __post_init__(self) -> None:
        # Places of values that another tensor holds too: what went in, or what two of them become.
        self._sharing = [
            place
            for place, source in enumerate(self.wanted)
            if not isinstance(source, int) or self.wanted.count(source) > 1
        ]
        origins = [one for one in self.inputs if isinstance(one, Origin)]
        # Where inputs come from, if all are arguments or tensors from outside that are no gradients.
        simple = len(origins) == len(self.inputs) and all(one.gradient_of is None for one in origins)
        self._simple = [(one.outside, one.argument) for one in origins] if simple else []
        # Tensors from outside, and what they held when they were last looked at, which may go meanwhile.
        watched = [origin for origin, *_ in self.guards.kinds]
        self._watched = [one.outside for one in watched if one.outside is not None]
        self._quick = len(self._watched) == len(watched)
        self._seen: list[weakref.ref[Node]] = []
        self._graded = [
            (one.outside, without) for one, without in self.guards.grads if one.outside is not None
        ]
        self._given_grads = [(one, none) for one, none in self.guards.grads if one.outside is None]
        self._careful = bool(self.changes or self.donated)
        self._launched = False  # of the replay under way: whether it will take effect

    # Whether it is for a call

    def still_true(self, arguments: Sequence[Tensor]) -> bool:
        """Whether what the capture found outside is still so."""
        for tensor, without in self._graded:
            if (tensor._actual_grad is None) != without:
                return False
        for origin, without in self._given_grads:
            if (origin.tensor(arguments)._actual_grad is None) != without:
                return False
        for fact, answer in self.guards.facts:
            if fact() != answer:
                return False
        if self.guards.outside and not self._same_aliases(arguments):
            return False
        if self._quick and self._seen_again():
            return True
        device = self.device
        for origin, shape, dtype, requires_grad, ends in self.guards.kinds:
            tensor = origin.tensor(arguments)
            node = tensor._actual_node
            if node.shape != shape or node.dtype is not dtype or tensor.device is not device:
                return False
            if tensor._actual_requires_grad != requires_grad:
                return False
            if requires_grad and ends_in(tensor, node) != ends:
                return False
        self._seen = [weakref.ref(tensor._actual_node) for tensor in self._watched]
        return True

    def _same_aliases(self, arguments: Sequence[Tensor]) -> bool:
        known = self.guards.aliases
        if not known and self.guards.outside.isdisjoint(map(id, arguments)):
            return True
        found = {at: one for at, one in enumerate(arguments) if id(one) in self.guards.outside}
        return found.keys() == known.keys() and all(found[at] is known[at] for at in known)

    def _seen_again(self) -> bool:
        """Whether all tensors hold what they held, or what was written over it, when they were looked at."""
        seen = self._seen
        if not seen:
            return not self._watched
        return [one() for one in seen] == [tensor._actual_node for tensor in self._watched]

    # Running

    def replay(self, arguments: list[Tensor]) -> Any:
        """Run the program on what the arguments and the tensors from outside hold now."""
        with self.device.running:
            if not self.parts:
                return self._replay(arguments)
            self._launched = False
            for part in self.parts:
                part.before_replay()
            try:
                return self._replay(arguments)
            except BaseException:
                if not self._launched:
                    for part in self.parts:
                        part.after_failure()
                raise

    def _replay(self, arguments: list[Tensor]) -> Any:
        inputs = [(arguments[at] if one is None else one)._actual_node.value for one, at in self._simple]
        if not inputs or None in inputs:
            inputs = [self._node(source, arguments).value for source in self.inputs]
        program: Any = self.program
        if self.device.dispatcher is not None and program is not None:
            program, inputs = program.chosen(
                inputs, lambda: [self._node(source, arguments) for source in self.inputs], self.numbers
            )
        # First, so that nothing is written over that a gradient will need.
        read = self._read(arguments)
        ways = self._ways.get(program) or self._ways_of(program)
        over, settled = self._free_memory(inputs, ways, arguments)
        places = ways.others if settled is ways.settled else self._unsettled(settled)

        def finish(found: list[Buffer]) -> _Outcome:
            return self._outcome(found, places, arguments, read)

        if self._careful:
            return self._replay_whole(program, inputs, over, finish, arguments)
        return finish([] if program is None else program.run(inputs, self.numbers, over)).result

    def _read(self, arguments: list[Tensor]) -> tuple[Node, ...]:
        """What the results remember of this call, for their gradients."""
        if self.differentiable is not None:
            return self.differentiable.read(arguments)
        return tuple([origin.tensor(arguments)._actual_node for origin in self.refused_reads])

    def _replay_whole(
        self,
        program: Any,
        inputs: list[Buffer],
        over: dict[int, int],
        finish: Callable[[list[Buffer]], _Outcome],
        arguments: list[Tensor],
    ) -> Any:
        """Run the program, and change tensors; or nothing, or they are known to be damaged."""
        found: list[Buffer] | None = None
        with held_back:
            try:
                found = [] if program is None else program.run(inputs, self.numbers, over)
                self._launched = True
                outcome = finish(found)
                outcome.take_effect()
                for watch in self.watches:
                    watch.ran()
                return outcome.result
            except BaseException as error:
                if found is not None:  # everything was launched
                    finish(found).take_effect()
                elif not isinstance(error, Exception) or any(one.wrote for one in _programs(program)):
                    self._damage(over, arguments, error)
                raise

    def _damage(self, over: dict[int, int], arguments: list[Tensor], error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        lost = NoValue(
            DamagedTensor,
            f"the value of this tensor is lost, as the jitted function {self.name} failed while it was "
            f"writing over it ({reason}); load the last checkpoint, or give it another value",
        )
        for number in over.values():
            source = self.inputs[number]
            if isinstance(source, Origin):
                tensor = source.tensor(arguments)
                node = tensor._actual_node
                tensor._become(leaf(lost, node.shape, node.dtype))
        for watch in self.watches:
            watch.forget()

    def _unsettled(self, settled: set[int]) -> list[int]:
        return [place for place in range(len(self.wanted)) if place not in settled]

    def _outcome(
        self, found: list[Buffer], places: list[int], arguments: list[Tensor], read: tuple[Node, ...]
    ) -> _Outcome:
        """What the results are, and what tensors become at these places; nothing has changed yet."""
        buffers: dict[int, Buffer] = {}
        for place in places:
            source = self.wanted[place]
            buffers[place] = found[source] if isinstance(source, int) else self._node(source, arguments).value
        for place in self._sharing:  # which must not be written over for another
            if place in buffers:
                buffers[place].shared = True
        results = [self._result(at, buffers[at], read) for at in range(self.results)]
        outcome = _Outcome(replaced(self.result, iter(results)))
        if not self._careful:
            return outcome
        end = self.results + len(self.changes.values)
        for place in places[self.results :]:
            if place >= end:
                break
            tensor = self.changes.values[place - self.results].tensor(arguments)
            history = self.changes.histories.get(place - self.results)
            if history is None:
                outcome.values.append((tensor, leaf(buffers[place], *self.kinds[place]), False))
            else:
                node = refused(history, buffers[place], *self.kinds[place])
                outcome.values.append((tensor, node, True))
        for origin, there in self.changes.grads:
            gradient = None
            if isinstance(there, Origin):
                gradient = there.tensor(arguments)
            elif there:
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
        """What holds a value that goes in."""
        if isinstance(source, Node):
            return source
        tensor = source.tensor(arguments)
        node = tensor._actual_node
        if node.value is None:
            realize([node], tensor.device)
        return node

    def told_replay(self, arguments: list[Tensor], captured: float) -> Any:
        """The same, and profiles are told of it; `captured`: when the capture for this began, or 0."""
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

    def _ways_of(self, program: Any) -> Ways:
        found = self._ways[program] = Ways(self, None if program is None else program.may_overwrite)
        return found

    def _free_memory(
        self, inputs: list[Buffer], ways: Ways, arguments: list[Tensor]
    ) -> tuple[dict[int, int], set[int]]:
        """Which outputs are written over which inputs, that nothing else refers to; what then stays."""
        if not self.donated:  # mostly it is all of them, which is soon found out
            nodes = [tensor._actual_node for tensor in ways.tensors]
            shared = [inputs[at].shared for at in ways.numbers]
            kinds = [node.primitive for node in nodes]
            # The node is the tensor's alone: one reference, one of the list, and one of the call that counts.
            most = max(map(sys.getrefcount, nodes), default=0)
            if most <= 3 and True not in shared and kinds.count(LEAF) == len(kinds):
                return ways.over, ways.settled
            del nodes
        over: dict[int, int] = {}
        settled: set[int] = set()
        for at, tensor, output, place in ways.in_place:
            if not inputs[at].shared and sys.getrefcount(tensor._actual_node) <= 2:
                over[output] = at
                if tensor._actual_node.primitive is LEAF and place in ways.settled:
                    settled.add(place)
        for at, source in enumerate(self.inputs) if self.donated else ():
            if isinstance(source, Origin) and source.argument in self.donated and not inputs[at].shared:
                if source in self.wanted or sys.getrefcount(arguments[source.argument]._actual_node) > 2:
                    continue  # it is a result as it is, or something that was recorded reads it later
                free = [one for one in self.wanted if isinstance(one, int) and one not in over]
                found = next((one for one in free if ways.may(one, at)), None)
                if found is not None:
                    over[found] = at
        return over, settled


@dataclass
class _Outcome:
    """What a replay gives, and what tensors become by it; to let it take effect twice is the same as once."""

    result: Any
    values: list[tuple[Tensor, Node, bool]] = field(default_factory=list)
    grads: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    flags: list[tuple[Tensor, bool]] = field(default_factory=list)
    donated: list[Tensor] = field(default_factory=list)

    def take_effect(self) -> None:
        for tensor in self.donated:
            node = tensor._actual_node
            tensor._actual_node = leaf(_DONATED, node.shape, node.dtype)
        for tensor, node, has_history in self.values:
            if has_history:
                tensor._actual_node, tensor._actual_requires_grad = node, True
            else:
                tensor._become(node)
        for tensor, gradient in self.grads:
            tensor._actual_grad = gradient
        for tensor, flag in self.flags:
            tensor.requires_grad_(flag)


class Ways:
    """Which results of a program on a device can be written over which inputs."""

    def __init__(self, captured: Captured, may_overwrite: Callable[[int, int], bool] | None) -> None:
        self.may = may_overwrite or (lambda output, number: False)
        changes = captured.changes
        outside = {
            id(origin.outside): captured.results + number
            for number, origin in enumerate(changes.values)
            if origin.outside is not None and number not in changes.histories
        }
        # Tensors that can be written over themselves: input, tensor, output, place among the wanted.
        self.in_place: list[tuple[int, Tensor, int, int]] = []
        for at, source in enumerate(captured.inputs):
            if isinstance(source, Origin) and source.outside is not None and id(source.outside) in outside:
                place = outside[id(source.outside)]
                output = captured.wanted[place]
                if isinstance(output, int) and self.may(output, at):
                    self.in_place.append((at, source.outside, output, place))
        self.tensors = [tensor for _, tensor, _, _ in self.in_place]
        self.numbers = [at for at, _, _, _ in self.in_place]
        self.over = {output: at for at, _, output, _ in self.in_place}
        # Those that can keep their node, too. With an index goes what is known of its items.
        self.settled = {place for _, tensor, _, place in self.in_place if tensor.dtype.kind not in "iu"}
        self.others = [place for place in range(len(captured.wanted)) if place not in self.settled]


def _programs(program: Any) -> Sequence[Any]:
    """The programs of one, which may be placed on several devices."""
    return getattr(program, "programs", (program,))
