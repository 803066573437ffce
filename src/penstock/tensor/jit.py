"""`jit`: a function of tensors is captured once and replayed as one program.

Its tensors are known by shape and dtype while it is captured: no value can be read then. Tensors from outside
that it uses, such as parameters, are inputs of the program, and those that it changes in place are outputs:
a replay reads what they hold at that time, and writes over their memory where nobody else refers to it.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import Token
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, overload

from penstock.errors import CaptureError
from penstock.graph.node import LEAF, DType, Node, Shape, leaf, topological
from penstock.memory.buffer import Buffer
from penstock.realize import Structure, programs, realize
from penstock.runtime import Device
from penstock.stream.lane import Run
from penstock.tensor.core import Tensor, capture
from penstock.tensor.index_watch import IndexWatch, watched_indices

if TYPE_CHECKING:
    from penstock.plan.banks import Banks
    from penstock.program import Program

F = TypeVar("F", bound=Callable[..., Any])
_MAX_CAPTURES = 32  # of one function; the one that was not used for longest is forgotten
_MAX_VARIANTS = 4  # of one capture, for gradients that are there or not, and tensors of other kinds


class Unknown:
    """Stands for the value of an argument while a function is captured."""


class Donated:
    """Stands for the value of a tensor that was given away: whatever is asked of it, it says so."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("this tensor was donated to a jitted function, which may have written over it")


_UNKNOWN, _DONATED = Unknown(), Donated()


@overload
def jit(function: F) -> F: ...
@overload
def jit(*, donate: int | Sequence[int] = ()) -> Callable[[F], F]: ...
def jit(function: Any = None, *, donate: int | Sequence[int] = ()) -> Any:
    """Capture a function of tensors at its first call, and replay it as one program from then on.

    A call with other shapes, dtypes or Python values captures anew. Results are fresh tensors; tensors that
    the function changes in place are changed by every replay. The memory of arguments at the positions
    `donate` may be used for results: these tensors cannot be used afterwards.
    """
    positions = (donate,) if isinstance(donate, int) else tuple(donate)
    if function is None:
        return lambda given: functools.wraps(given)(_Jitted(given, positions))
    if not callable(function):
        raise TypeError(f"jit takes a function, and {type(function).__name__} was given")
    return functools.wraps(function)(_Jitted(function, positions))


def plans(function: Callable[..., Any]) -> list[Banks]:
    """The memory plans of what a jitted function has captured so far, the largest first."""
    if not isinstance(function, _Jitted):
        raise TypeError(f"a function under @ps.jit has plans, and {function!r} was given")
    return sorted(function.plans(), key=lambda plan: -plan.arena_bytes)


class _Jitted:
    """A function with the programs that replay it, by the shapes and Python values of its arguments."""

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...]) -> None:
        self._function = function
        self._donate = donate
        self._lock = threading.Lock()
        # For each key the captures that differ in what they found outside, the latest first.
        self._captured: OrderedDict[Hashable, list[_Captured]] = OrderedDict()

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if capture.get() is not None:
            return self._function(*args, **kwargs)  # inside another: part of that
        tensors: list[Tensor] = []
        key = (_flattened(args, tensors), _flattened(kwargs, tensors) if kwargs else ())
        try:
            captures = self._captured.setdefault(key, [])
        except TypeError:
            raise CaptureError(
                f"arguments of a jitted function are tensors, and Python values that can be compared by "
                f"value, which these cannot: {key!r}"
            ) from None
        start = 0.0  # of a capture
        for found in captures:
            if found.still_true():
                break
        else:
            start = perf_counter()
            with self._lock:
                found = self._capture(args, kwargs, tensors)
                found.device.release_idle()
                captures.insert(0, found)
                del captures[_MAX_VARIANTS:]
                if len(self._captured) > _MAX_CAPTURES:
                    self._captured.popitem(last=False)
        if len(self._captured) > 1:
            self._captured.move_to_end(key)
        if found.device.stream.recorders:
            return found.told_replay(tensors, start)
        return found.replay(tensors)

    def plans(self) -> list[Banks]:
        """See the function of that name."""
        with self._lock:
            captures = [found for kept in self._captured.values() for found in kept]
        return [found.program.plan for found in captures if found.program is not None]

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> _Captured:
        made = [_stand_in(tensor) for tensor in tensors]
        given = iter(made)
        inside_args, inside_kwargs = _replaced(args, given), _replaced(kwargs, given)
        first: list[Tensor] = []
        for position in self._donate:
            if position >= len(args):
                raise ValueError(f"donate names argument {position}, and {len(args)} were given")
            _flattened(args[position], first)
        donated = [at for at, tensor in enumerate(tensors) if any(tensor is one for one in first)]
        tracing = _Tracing(made)
        token: Token[Any] = capture.set(tracing)
        try:
            result = self._function(*inside_args, **inside_kwargs)
            return tracing.finish(result, donated)
        finally:
            capture.reset(token)
            tracing.restore()


@dataclass
class _Before:
    """What a tensor from outside was, before the function was captured."""

    node: Node
    grad: Tensor | None
    requires_grad: bool


class _Tracing:
    """Notes which tensors from outside a function uses while it is captured."""

    def __init__(self, stand_ins: list[Tensor]) -> None:
        self._stand_ins = stand_ins
        self._nodes = [tensor._node for tensor in stand_ins]
        self._own: dict[int, Tensor] = {id(tensor): tensor for tensor in stand_ins}
        self._outside: dict[int, tuple[Tensor, _Before]] = {}
        self._facts: list[tuple[Callable[[], object], object]] = []

    def made(self, tensor: Tensor) -> None:
        """A tensor that belongs to the function."""
        self._own[id(tensor)] = tensor

    def used(self, tensor: Tensor) -> None:
        """A tensor that is read, or is about to change."""
        key = id(tensor)
        if key not in self._own and key not in self._outside:
            if tensor._node.value is None:
                realize([tensor._node], tensor.device)
            self._outside[key] = tensor, _Before(tensor._node, tensor.grad, tensor.requires_grad)

    def assume(self, fact: Callable[[], object]) -> None:
        """Something outside that the function asks for, and that is no tensor."""
        self._facts.append((fact, fact()))

    def refuse_value(self, node: Node) -> None:
        """Only what depends on constants alone has a value now."""
        known = {id(before.node) for _, before in self._outside.values()}
        for one in topological([node]):
            if one.value is _UNKNOWN or id(one) in known:
                raise CaptureError(
                    f"the value of {one.dtype}{list(one.shape)} was asked for inside a jitted function, "
                    f"where only shapes and dtypes are known; read it outside, or use where() instead of if"
                )

    def restore(self) -> None:
        """Undo what the capture did to tensors from outside: only replays change them."""
        for tensor, before in self._outside.values():
            tensor._node, tensor.grad = before.node, before.grad
            tensor.requires_grad = before.requires_grad

    def finish(self, result: Any, donated: list[int]) -> _Captured:
        """The program of all that the function computed."""
        outputs: list[Tensor] = []
        _flattened(result, outputs)
        for tensor in outputs:
            self.used(tensor)
        changed = [
            _Target(at, None)
            for at, tensor in enumerate(self._stand_ins)
            if tensor._node is not self._nodes[at]
        ]
        changed += [_Target(None, t) for t, before in self._outside.values() if t._node is not before.node]
        grads = [t for t, before in self._outside.values() if t.grad is not before.grad]
        wanted = [tensor._node for tensor in outputs]
        wanted += [self._tensor(target)._node for target in changed]
        wanted += [tensor.grad._node for tensor in grads if tensor.grad is not None]
        devices = {tensor.device for tensor in (*outputs, *(self._tensor(one) for one in changed), *grads)}
        if not devices:
            raise CaptureError("a jitted function has to give or change a tensor")
        if len(devices) > 1:
            raise CaptureError(
                f"a jitted function runs on one device, and {sorted(d.name for d in devices)} are used"
            )
        (device,) = devices
        watches = watched_indices(wanted, device)
        for watch in watches:
            del self._own[id(watch.tensor)]  # it outlives the capture, like any tensor from outside
            self.used(watch.tensor)
            watch.tensor._node = watch.updated()
            wanted.insert(len(outputs) + len(changed), watch.tensor._node)
            changed.append(_Target(None, watch.tensor))
        pending = [node for node in wanted if node.value is None]
        structure = Structure(pending, checked=False)
        replaced = self._replaced(pending, structure.inputs)
        program = programs(device).build(structure, pending, replaced) if pending else None
        return _Captured(
            device=device,
            program=program,
            numbers=structure.constants(),
            sources=[self._source(node) for node in structure.inputs],
            wanted=[self._result(node, pending) for node in wanted],
            kinds=[(node.shape, node.dtype) for node in wanted],
            result=_replaced(result, itertools.repeat(_SLOT)),
            results=len(outputs),
            changed=changed,
            grads=[(tensor, tensor.grad is not None) for tensor in grads],
            guards=[(t, self._outside[id(t)][1].grad is None) for t in grads],
            facts=self._facts,
            donated=donated,
            watches=watches,
        )

    def _replaced(self, pending: list[Node], inputs: list[Node]) -> dict[int, int]:
        """Which results of the program replace which inputs: the new values of tensors from outside."""
        results = {node: at for at, node in enumerate(pending)}
        number = {node: at for at, node in enumerate(inputs)}
        return {
            results[tensor._node]: number[before.node]
            for tensor, before in self._outside.values()
            if tensor._node in results and before.node in number
        }

    def _tensor(self, target: _Target) -> Tensor:
        if target.tensor is not None:
            return target.tensor
        assert target.argument is not None
        return self._stand_ins[target.argument]

    def _source(self, node: Node) -> _Source:
        """Where a replay finds the value of a node that the program reads."""
        for at, own in enumerate(self._nodes):
            if own is node:
                return _Source(argument=at)
        for tensor, before in self._outside.values():
            if before.node is node:
                owner = next((t for t, b in self._outside.values() if b.grad is tensor), None)
                return _Source(tensor=tensor, grad_of=owner, kind=(node.shape, node.dtype))
        return _Source(value=leaf(node.value, node.shape, node.dtype))

    def _result(self, node: Node, pending: list[Node]) -> int | _Source:
        """An output of the program, or what was there before, unchanged."""
        return pending.index(node) if node.value is None else self._source(node)


@dataclass(frozen=True)
class _Source:
    """An argument, a tensor from outside (or what is its owner's gradient then), or a constant."""

    argument: int | None = None
    tensor: Tensor | None = None
    grad_of: Tensor | None = None
    value: Node | None = None
    kind: tuple[Shape, DType] | None = None  # of a tensor from outside

    def current(self) -> Tensor:
        """The tensor from outside, or the gradient that its owner has now."""
        if self.grad_of is not None and self.grad_of.grad is not None:
            return self.grad_of.grad
        assert self.tensor is not None
        return self.tensor

    def node(self, arguments: Sequence[Tensor]) -> Node:
        """What holds the value now."""
        if self.value is not None:
            return self.value
        tensor = self.current() if self.argument is None else arguments[self.argument]
        node = tensor._node
        if node.value is None:
            realize([node], tensor.device)
        return node

    def buffer(self, arguments: Sequence[Tensor]) -> Buffer:
        """The value now."""
        return self.node(arguments).value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Target:
    """A tensor that the function changes in place: an argument, or one from outside."""

    argument: int | None
    tensor: Tensor | None


@dataclass
class _Captured:
    """One program of a function, and what goes in and out of it."""

    device: Device
    program: Program | None
    numbers: list[Any]
    sources: list[_Source]  # of the program's inputs
    wanted: list[int | _Source]  # the results, then the changed tensors, then the gradients
    kinds: list[tuple[Shape, DType]]
    result: Any
    results: int
    changed: list[_Target]
    grads: list[tuple[Tensor, bool]]
    guards: list[tuple[Tensor, bool]]  # tensors that had no gradient at the capture, or had one
    facts: list[tuple[Callable[[], object], object]]  # what the function asked for, and the answers
    donated: list[int]
    watches: list[IndexWatch]

    def still_true(self) -> bool:
        """Whether what the capture found outside is still so."""
        for tensor, without in self.guards:
            if (tensor._grad is None) != without:
                return False
        for fact, answer in self.facts:
            if fact() != answer:
                return False
        if self._seen_again():
            return True
        device = self.device
        for source in self._outside:
            tensor = source.current()
            node, (shape, dtype) = tensor._node, source.kind  # type: ignore[misc]
            if node.shape != shape or node.dtype is not dtype or tensor.device is not device:
                return False
        self._seen: list[weakref.ref[Node]] = [weakref.ref(tensor._node) for tensor in self._tensors]
        return True

    def _seen_again(self) -> bool:
        """Whether all tensors hold what they held, or what was written over it, when they were looked at."""
        return bool(self._seen) and [one() for one in self._seen] == [one._node for one in self._tensors]

    def __post_init__(self) -> None:
        self._outside = [source for source in self.sources if source.tensor is not None]
        # Where inputs come from, if all are arguments or tensors from outside that are no gradients.
        simple = all(one.grad_of is None and one.value is None for one in self.sources)
        self._simple = [(one.tensor, one.argument) for one in self.sources] if simple else []
        # The tensors from outside, and their values when they were last looked at, which may go meanwhile.
        self._tensors = [one.tensor for one in self._outside if one.tensor is not None] if simple else []
        self._seen = []
        # What can be written over what, for each device on which the program runs.
        self._ways: dict[Any, _Ways] = {}

    def _ways_of(self, program: Any) -> _Ways:
        found = self._ways[program] = _Ways(self, None if program is None else program.may_overwrite)
        return found

    def replay(self, arguments: list[Tensor]) -> Any:
        """Run the program on what the arguments and the tensors from outside hold now."""
        inputs = [(arguments[at] if one is None else one)._node.value for one, at in self._simple]  # type: ignore[index]
        if not inputs or None in inputs:
            inputs = [source.buffer(arguments) for source in self.sources]
        program: Any = self.program
        if self.device.dispatcher is not None and program is not None:
            program, inputs = program.chosen(
                inputs, lambda: [source.node(arguments) for source in self.sources], self.numbers
            )
        found: list[Buffer] = []
        ways = self._ways.get(program) or self._ways_of(program)
        over, settled = self._free_memory(inputs, ways)
        if program is not None:
            found = program.run(inputs, self.numbers, over)
        for at in self.donated:
            arguments[at]._node = leaf(_DONATED, arguments[at].shape, arguments[at].dtype)
        nodes: list[Node] = []
        targets: list[_Target] = []
        for place in ways.others if settled is ways.settled else range(len(self.wanted)):
            if place not in settled:
                one = self.wanted[place]
                buffer = found[one] if isinstance(one, int) else one.buffer(arguments)
                nodes.append(leaf(buffer, *self.kinds[place]))
                if self.results <= place < self.results + len(self.changed):
                    targets.append(self.changed[place - self.results])
        rest = iter(nodes)
        results = [Tensor(next(rest), self.device) for _ in range(self.results)]
        for target in targets:
            changed = target.tensor if target.tensor is not None else arguments[target.argument or 0]
            changed._become(next(rest))
        for tensor, there in self.grads:
            tensor.grad = Tensor(next(rest), self.device) if there else None
        for watch in self.watches:
            watch.ran()
        return _replaced(self.result, iter(results))

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

    def _free_memory(self, inputs: list[Buffer], ways: _Ways) -> tuple[dict[int, int], set[int]]:
        """Which outputs are written over which inputs, that nothing else refers to; what then stays."""
        if not self.donated:  # mostly it is all of them, which is soon found out
            shared = [inputs[at].shared for at, _, _, _ in ways.in_place]
            counts = [sys.getrefcount(tensor._node) for _, tensor, _, _ in ways.in_place]
            kinds = [tensor._node.primitive for _, tensor, _, _ in ways.in_place]
            if True not in shared and max(counts, default=0) <= 2 and kinds.count(LEAF) == len(kinds):
                return ways.over, ways.settled
        over: dict[int, int] = {}
        settled: set[int] = set()
        for at, tensor, output, place in ways.in_place:
            # The node is the tensor's alone: one reference, and one of the call that counts.
            if not inputs[at].shared and sys.getrefcount(tensor._node) <= 2:
                over[output] = at
                if tensor._node.primitive is LEAF:
                    settled.add(place)
        for at, source in enumerate(self.sources) if self.donated else ():
            if source.argument in self.donated and not inputs[at].shared:
                free = [one for one in self.wanted if isinstance(one, int) and one not in over]
                found = next((one for one in free if ways.may(one, at)), None)
                if found is not None:
                    over[found] = at
        return over, settled


class _Ways:
    """Which results of a program on a device can be written over which inputs."""

    def __init__(self, captured: _Captured, may_overwrite: Callable[[int, int], bool] | None) -> None:
        self.may = may_overwrite or (lambda output, number: False)
        changed = enumerate(captured.changed, captured.results)
        outside = {id(target.tensor): at for at, target in changed if target.tensor is not None}
        # Tensors that can be written over themselves: input, tensor, output, place among the wanted.
        self.in_place: list[tuple[int, Tensor, int, int]] = []
        for at, source in enumerate(captured.sources):
            place = outside.get(id(source.tensor), -1)
            output = captured.wanted[place]
            if source.tensor is not None and place >= 0 and isinstance(output, int) and self.may(output, at):
                self.in_place.append((at, source.tensor, output, place))
        self.over = {output: at for at, _, output, _ in self.in_place}
        self.settled = {place for _, _, _, place in self.in_place}
        self.others = [place for place in range(len(captured.wanted)) if place not in self.settled]


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same kind whose value is not known."""
    made = Tensor(tensor._node, tensor.device, tensor.requires_grad)
    made._become(leaf(_UNKNOWN, tensor.shape, tensor._node.dtype))
    return made


class _Slot:
    """Stands for a tensor in a nest of tuples, lists and dicts."""


_SLOT = _Slot()


def _flattened(value: Any, tensors: list[Tensor]) -> Any:
    """What a nest of tuples, lists and dicts is apart from its tensors, which are put into the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return (_SLOT, value.shape, value._node.dtype, value.requires_grad, value.device.name)
    if isinstance(value, (tuple, list)):
        return (type(value), *(_flattened(item, tensors) for item in value))
    if isinstance(value, dict):
        return (dict, *((name, _flattened(item, tensors)) for name, item in value.items()))
    return (type(value), value)


def _replaced(value: Any, tensors: Iterator[Any]) -> Any:
    """The nest with other tensors, in the same order."""
    if isinstance(value, (Tensor, _Slot)):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        items = [_replaced(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: _replaced(item, tensors) for name, item in value.items()}
    return value
