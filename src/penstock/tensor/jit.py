"""`jit`: a function of tensors is captured once and replayed as one program.

During the capture only shapes and dtypes are known, so no value can be read. Tensors from outside that the
function uses, such as parameters, are inputs of the program; those that it changes in place are outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from penstock.collectives.world import patient
from penstock.config import parse_bytes
from penstock.errors import CaptureError, OutOfDeviceMemory
from penstock.lru import LRU
from penstock.memory.budgeting import budget
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, captured_by
from penstock.tensor.jit_program import SLOT, captured_program, compiling, memory_plan
from penstock.tensor.leaves import leaf_of
from penstock.tensor.planning import LastResults
from penstock.tensor.recording import recording
from penstock.tensor.repeating import Repeated
from penstock.tensor.replay import Captured, replaced
from penstock.tensor.tracing import Tracing

if TYPE_CHECKING:
    from penstock.compiler.schedule import Schedule
    from penstock.execution.memory_plan import MemoryPlan

F = TypeVar("F", bound=Callable[..., Any])
_MAX_CAPTURES = 32  # of a function; the least recently used is dropped
_MAX_VARIANTS = 4  # for a key: gradients may be None or not, and tensors from outside may differ


@overload
def jit(function: F) -> F: ...
@overload
def jit(*, donate: int | Sequence[int] = (), memory: int | str | None = None) -> Callable[[F], F]: ...
def jit(function: Any = None, *, donate: int | Sequence[int] = (), memory: int | str | None = None) -> Any:
    """Capture a function of tensors at its first call, and replay it as one program afterwards.

    A call with other shapes, dtypes or Python values is captured separately. Results are new tensors; tensors
    that the function changes in place are changed by every replay. The memory of arguments at the positions
    `donate` may be reused for results: these tensors cannot be used afterwards. `memory`, such as "2GiB", is
    the memory budget of its calls; see `ps.memory.budget`.

    >>> @ps.jit
    ... def double(x):
    ...     return x + x
    >>> double(ps.asarray([1, 2])).tolist()
    [2, 4]
    """
    positions = (donate,) if isinstance(donate, int) else tuple(donate)
    limit = None if memory is None else parse_bytes(memory)
    if function is None:
        return lambda given: _Jitted(given, positions, limit)
    if not callable(function):
        raise TypeError(f"jit takes a function, and {type(function).__name__} was given")
    return _Jitted(function, positions, limit)


def schedules(function: Callable[..., Any]) -> list[Schedule]:
    """The schedules of all captures of a jitted function, that with the largest arena first."""
    if not isinstance(function, _Jitted):
        raise TypeError(f"a function under @ps.jit has plans, and {function!r} was given")
    return sorted(function.schedules(), key=lambda schedule: -schedule.plan.arena_bytes)


class _Jitted:
    """A function and its captured programs, by the shapes and Python values of its arguments."""

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...], memory: int | None) -> None:
        functools.update_wrapper(self, function)  # first: a jitted function has attributes of the same names
        self._function = function
        self._donate = donate
        self._memory = memory  # the budget for calls
        self._lock = threading.Lock()  # held while the function is captured
        # For each key, captures that differ in the state of tensors from outside, the latest first. Tuples,
        # so that other threads can iterate while they are replaced.
        self._captured = LRU[Hashable, tuple[Captured, ...]](_MAX_CAPTURES)
        self._last = LastResults()

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if capture.get() is not None:
            return self._function(*args, **kwargs)  # inside another jitted function: recorded as a part of it
        if self._memory is not None:
            with budget(self._memory):
                return self._call(args, kwargs)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        key = _key(args, kwargs, tensors)
        captured, start = self._known(key, tensors), 0.0  # when a capture started
        if captured is None:
            start = perf_counter()
            with self._lock, patient():
                captured = self._known(key, tensors)  # another thread may have captured it meanwhile
                if captured is None:
                    captured = self._capture(args, kwargs, tensors)
                    self._remember(key, captured)
        try:
            if captured.device.stream.recorders:
                return captured.recorded_replay(tensors, start)
            return captured.replay(tensors)
        except OutOfDeviceMemory:
            if captured.build is not None:  # under a larger limit it is captured again, beside this
                self._captured[key] = tuple(
                    known for known in self._captured.get(key, ()) if known is not captured
                )
            raise

    def repeated(self, *args: Any) -> Repeated | None:
        """The call with these arguments that was just made, to be repeated; None if that saves nothing."""
        tensors: list[Tensor] = []
        captured = self._known(_key(args, {}, tensors), tensors)
        return None if captured is None else Repeated.of(captured, tensors)

    def schedules(self) -> list[Schedule]:
        """See the function of that name."""
        with self._lock:
            captures = [captured for variants in self._captured.values() for captured in variants]
        return [captured.program.schedule for captured in captures if captured.program is not None]

    def _known(self, key: tuple[Any, ...], tensors: list[Tensor]) -> Captured | None:
        """The capture for a call, if there is one."""
        try:
            captures = self._captured.get(key, ())
        except TypeError:
            raise CaptureError(
                f"arguments of a jitted function are tensors, and Python values that can be compared by "
                f"value, which these cannot: {key[1:]!r}"
            ) from None
        for captured in captures:
            if captured.still_true(tensors):
                if len(self._captured) > 1:
                    with contextlib.suppress(KeyError):  # another thread may have dropped it
                        self._captured.move_to_end(key)
                return captured
        return None

    def _remember(self, key: Hashable, captured: Captured) -> None:
        captured.device.release_idle()
        self._captured[key] = (captured, *self._captured.get(key, ()))[:_MAX_VARIANTS]

    def memory_plan(self, *args: Any, **kwargs: Any) -> MemoryPlan:
        """See `ps.memory.plan`."""
        tensors: list[Tensor] = []
        _flattened((args, kwargs), tensors)
        with self._lock, self._traced(args, kwargs, tensors) as (tracing, _, outputs):
            return memory_plan(self._name, tracing, outputs, self._last)

    def compiling(self, *args: Any, **kwargs: Any) -> Callable[[], None]:
        """What compiles the kernels of a call with such arguments, in any thread, before its capture."""
        tensors: list[Tensor] = []
        _flattened((args, kwargs), tensors)
        with self._lock, self._traced(args, kwargs, tensors) as (tracing, _, outputs):
            return compiling(self._name, tracing, outputs, self._last)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Captured:
        first: list[Tensor] = []
        for position in self._donate:
            if position >= len(args):
                raise ValueError(f"donate names argument {position}, and {len(args)} were given")
            _flattened(args[position], first)
        given = {id(tensor) for tensor in first}
        donated = [at for at, tensor in enumerate(tensors) if id(tensor) in given]
        with self._traced(args, kwargs, tensors) as (tracing, result, outputs):
            return captured_program(self._name, tracing, result, outputs, donated, self._last)

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", repr(self._function))

    @contextlib.contextmanager
    def _traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Iterator[tuple[Tracing, Any, list[Tensor]]]:
        """Call the function with stand-ins for its arguments: the tracing, the result, and its tensors."""
        tracing = Tracing(tensors)
        inside = iter(tracing.inside)
        inside_args, inside_kwargs = replaced(args, inside), replaced(kwargs, inside)
        with captured_by(tracing):
            result = self._function(*inside_args, **inside_kwargs)
            for part in list(tracing.parts.values()):
                part.after_capture()
            outputs: list[Tensor] = []
            _flattened(result, outputs)
            yield tracing, result, outputs


def _key(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """What the captures of a function depend on; the tensors of a call are appended to the list."""
    key: tuple[Any, ...] = (
        recording(),
        _flattened(args, tensors),
        _flattened(kwargs, tensors) if kwargs else (),
    )
    if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
        positions = {id(tensor): position for position, tensor in enumerate(tensors)}
        key += (tuple(positions[id(tensor)] for tensor in tensors),)  # which arguments are the same tensor
    return key


def _flattened(value: Any, tensors: list[Tensor]) -> Any:
    """A key of nested tuples, lists and dicts; their tensors are appended to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        node, ends = value._node, False
        if value.requires_grad:
            ends = leaf_of(node) is value
        return (SLOT, node.shape, node.dtype, value.requires_grad, ends, value.device.name)
    if isinstance(value, (tuple, list)):
        return (type(value), *(_flattened(item, tensors) for item in value))
    if isinstance(value, dict):
        return (dict, *((type(name), name, _flattened(item, tensors)) for name, item in value.items()))
    return _exact(value)


def _exact(value: Any) -> Any:
    """A key of a Python value: 1, 1.0 and True differ, as do 0.0 and -0.0; NaN equals itself."""
    kind = type(value)
    if kind is float:
        return (kind, value) if value == value and value else (kind, struct.pack("d", value))
    if kind is complex:
        return (kind, struct.pack("dd", value.real, value.imag))
    if isinstance(value, np.generic):
        return (kind, value.tobytes())
    if isinstance(value, frozenset):
        return (kind, frozenset(map(_exact, value)))
    if isinstance(value, (tuple, list)):
        return (kind, *map(_exact, value))
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is not None and parameters.eq and kind.__hash__ is not None:
        fields = [field for field in dataclasses.fields(value) if field.compare]
        return (kind, *(_exact(getattr(value, field.name)) for field in fields))
    return (kind, value)
