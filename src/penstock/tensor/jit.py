"""`jit`: a function of tensors is captured once and replayed as one program.

Its tensors are known by shape and dtype while it is captured: no value can be read then. Tensors from outside
that it uses, such as parameters, are inputs of the program, and those that it changes in place are outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from penstock.errors import CaptureError
from penstock.lru import LRU
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, captured_by, leaf_of
from penstock.tensor.jit_program import SLOT, captured_program
from penstock.tensor.recording import recording
from penstock.tensor.replay import Captured, replaced
from penstock.tensor.tracing import Tracing

if TYPE_CHECKING:
    from penstock.plan.arenas import ArenaPlan

F = TypeVar("F", bound=Callable[..., Any])
_MAX_CAPTURES = 32  # of one function; the one that was not used for longest is forgotten
_MAX_VARIANTS = 4  # of one capture, for gradients that are there or not, and tensors of other kinds


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


def plans(function: Callable[..., Any]) -> list[ArenaPlan]:
    """The memory plans of what a jitted function has captured so far, the largest first."""
    if not isinstance(function, _Jitted):
        raise TypeError(f"a function under @ps.jit has plans, and {function!r} was given")
    return sorted(function.plans(), key=lambda plan: -plan.arena_bytes)


class _Jitted:
    """A function with the programs that replay it, by the shapes and Python values of its arguments."""

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...]) -> None:
        self._function = function
        self._donate = donate
        self._lock = threading.Lock()  # held while the function is captured
        # For each key the captures that differ in what they found outside, the latest first. A tuple is
        # replaced as a whole, so that other threads can go through it meanwhile.
        self._captured = LRU[Hashable, tuple[Captured, ...]](_MAX_CAPTURES)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if capture.get() is not None:
            return self._function(*args, **kwargs)  # inside another: part of that
        tensors: list[Tensor] = []
        key: tuple[Any, ...] = (
            recording(),
            _flattened(args, tensors),
            _flattened(kwargs, tensors) if kwargs else (),
        )
        if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
            numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
            key += (tuple(numbers[id(tensor)] for tensor in tensors),)  # which of them are one
        found, start = self._known(key, tensors), 0.0  # the start of a capture
        if found is None:
            start = perf_counter()
            with self._lock:
                found = self._known(key, tensors)  # another thread may have been quicker
                if found is None:
                    found = self._capture(args, kwargs, tensors)
                    self._remember(key, found)
        if found.device.stream.recorders:
            return found.told_replay(tensors, start)
        return found.replay(tensors)

    def plans(self) -> list[ArenaPlan]:
        """See the function of that name."""
        with self._lock:
            captures = [found for kept in self._captured.values() for found in kept]
        return [found.program.plan for found in captures if found.program is not None]

    def _known(self, key: tuple[Any, ...], tensors: list[Tensor]) -> Captured | None:
        """The capture for a call, if there is one."""
        try:
            captures = self._captured.get(key, ())
        except TypeError:
            raise CaptureError(
                f"arguments of a jitted function are tensors, and Python values that can be compared by "
                f"value, which these cannot: {key[1:]!r}"
            ) from None
        for found in captures:
            if found.still_true(tensors):
                if len(self._captured) > 1:
                    with contextlib.suppress(KeyError):  # another thread may just have forgotten it
                        self._captured.move_to_end(key)
                return found
        return None

    def _remember(self, key: Hashable, captured: Captured) -> None:
        captured.device.release_idle()
        self._captured[key] = (captured, *self._captured.get(key, ()))[:_MAX_VARIANTS]

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Captured:
        first: list[Tensor] = []
        for position in self._donate:
            if position >= len(args):
                raise ValueError(f"donate names argument {position}, and {len(args)} were given")
            _flattened(args[position], first)
        given = {id(tensor) for tensor in first}
        donated = [at for at, tensor in enumerate(tensors) if id(tensor) in given]
        tracing = Tracing(tensors)
        inside = iter(tracing.inside)
        inside_args, inside_kwargs = replaced(args, inside), replaced(kwargs, inside)
        name = getattr(self._function, "__name__", repr(self._function))
        with captured_by(tracing):
            result = self._function(*inside_args, **inside_kwargs)
            outputs: list[Tensor] = []
            _flattened(result, outputs)
            return captured_program(name, tracing, result, outputs, donated)


def _flattened(value: Any, tensors: list[Tensor]) -> Any:
    """What a nest of tuples, lists and dicts is apart from its tensors, which are put into the list."""
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
    """A key of a Python value: 1, 1.0 and True differ, and so do 0.0 and -0.0; a NaN is equal to itself."""
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
        fields = [one for one in dataclasses.fields(value) if one.compare]
        return (kind, *(_exact(getattr(value, one.name)) for one in fields))
    return (kind, value)
