"""A NumPy model of users' actions: every tensor has its own array, and its derivatives by every leaf.

The derivatives are carried forward (a matrix for each leaf), where Penstock goes backward through a graph;
`jit` gives the function as it is. Nothing is shared with the library but the names of the functions.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class MustRefuse(Exception):
    """What Penstock has to refuse."""


class Leaf:
    """A leaf: the value of a tensor until the tensor is changed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.size = tensor._array.size


_recording = [True]
_depth: list[Any] = []  # the jitted function that is being called
alive: weakref.WeakSet[Tensor] = weakref.WeakSet()


class Tensor:
    """A value with its matrix of derivatives (items by items) for each leaf that it depends on."""

    def __init__(self, array: Any, slopes: dict[Leaf, Array] | None = None, device: str = "") -> None:
        self._array = np.asarray(array)
        self.slopes = slopes or {}
        self.device = device
        self.requires_grad = False
        self.leaf: Leaf | None = None
        self._grad: Tensor | None = None
        self.donated = False
        alive.add(self)

    # What a restored state has

    def state(self) -> tuple[Any, ...]:
        return self._array, self.slopes, self.device, self.requires_grad, self.leaf, self._grad, self.donated

    def restore(self, state: tuple[Any, ...]) -> None:
        (self._array, self.slopes, self.device, self.requires_grad, self.leaf, self._grad, self.donated) = (
            state
        )

    @property
    def array(self) -> Array:
        if self.donated:
            raise Gone
        return self._array

    @property
    def grad(self) -> Tensor | None:
        return self._grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self._grad = gradient

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    @property
    def T(self) -> Tensor:  # noqa: N802
        return moved(self, np.transpose)

    def __getitem__(self, key: Any) -> Tensor:
        key = key.array if isinstance(key, Tensor) else key
        return moved(self, lambda array: array[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        key = key.array if isinstance(key, Tensor) else key
        places = np.arange(self.array.size).reshape(self.shape)[key]
        array = self.array.copy()
        given = value.array if isinstance(value, Tensor) else np.asarray(value)
        array.reshape(-1)[places.reshape(-1)] = np.broadcast_to(given, places.shape).reshape(-1)
        sources = [self, value] if isinstance(value, Tensor) else [self]
        slopes = {}
        for leaf in {leaf for source in sources for leaf in source.slopes}:
            matrix = self.slopes.get(leaf, np.zeros((self.array.size, leaf.size))).copy()
            matrix[places.reshape(-1)] = 0
            if isinstance(value, Tensor) and leaf in value.slopes:
                rows = np.broadcast_to(np.arange(given.size).reshape(given.shape), places.shape)
                matrix[places.reshape(-1)] = value.slopes[leaf][rows.reshape(-1)]
            slopes[leaf] = matrix
        self.become(made(array, slopes, *sources))

    def become(self, other: Tensor) -> None:
        """Change in place."""
        if other.shape != self.shape or other.dtype != self.dtype:
            raise TypeError("another shape or dtype")
        if self.leaf is not None and self.requires_grad and _recording[-1]:
            raise MustRefuse("a leaf cannot change")
        self._array, self.slopes, self.leaf = other._array, other.slopes, None
        if self.requires_grad and not other.requires_grad:
            self.requires_grad_()
        self.requires_grad = self.requires_grad or other.requires_grad

    def requires_grad_(self, requires: bool = True) -> Tensor:
        if requires and self.requires_grad and self.leaf is not None:
            return self
        self.requires_grad = requires
        if requires:
            self.leaf = Leaf(self)
            self.slopes = {self.leaf: np.eye(self.array.size)}
        else:
            self.array  # noqa: B018 - which may be donated
            self.leaf, self.slopes = None, {}
        return self

    def backward(self) -> None:
        if self.array.size != 1 or not self.requires_grad:
            raise MustRefuse("nothing requires a gradient")
        for leaf, matrix in self.slopes.items():
            tensor = leaf.tensor()
            if tensor is None or not tensor.requires_grad:
                continue
            if tensor.leaf is not leaf:
                raise MustRefuse("the tensor was changed since")
            total = matrix.reshape(tensor.shape)
            if tensor.grad is not None:
                total = total + tensor.grad.array
            tensor.grad = Tensor(total.astype(tensor.dtype), None, tensor.device)

    def detach(self) -> Tensor:
        return Tensor(self.array, None, self.device)

    def to_device(self, device: str) -> Tensor:
        return self if device == self.device else Tensor(self.array, None, device)

    def realize(self) -> Tensor:
        self.array  # noqa: B018
        return self

    def sum(self) -> Tensor:
        return Namespace.sum(self)


class Gone(Exception):
    """The value of a donated tensor was asked for."""


class Stale(Exception):
    """A gradient for a value that its leaf no longer has."""


def made(array: Any, slopes: dict[Leaf, Array], *sources: Tensor) -> Tensor:
    """A result of some tensors."""
    if len({source.device for source in sources}) > 1:
        raise MustRefuse("two devices")
    array = np.asarray(array)
    result = Tensor(array, None, sources[0].device)
    if _recording[-1] and array.dtype.kind == "f" and any(source.requires_grad for source in sources):
        result.requires_grad, result.slopes = True, slopes
    return result


def moved(x: Tensor, move: Callable[[Array], Array]) -> Tensor:
    """Items of a tensor at other places."""
    rows = np.asarray(move(np.arange(x.array.size).reshape(x.shape)))
    slopes = {leaf: matrix[rows.reshape(-1)] for leaf, matrix in x.slopes.items()}
    return made(x.array.reshape(-1)[rows.reshape(-1)].reshape(rows.shape), slopes, x)


def itemwise(function: Callable[..., Array], *slope: Callable[..., Array]) -> Callable[..., Tensor]:
    """A function of single items, with its derivative by each input."""

    def apply(*given: Any) -> Tensor:
        tensors = [x for x in given if isinstance(x, Tensor)]
        arrays = [x.array if isinstance(x, Tensor) else x for x in given]
        dtype = np.result_type(*(x.dtype for x in tensors))
        with np.errstate(all="ignore"):
            result = np.asarray(function(*(np.asarray(x, dtype) for x in arrays)))
        slopes: dict[Leaf, Array] = {}
        for x, derivative in zip(given, slope, strict=True) if _recording[-1] else ():
            if isinstance(x, Tensor) and x.slopes:
                rows = np.broadcast_to(np.arange(x.array.size).reshape(x.shape), result.shape).reshape(-1)
                with np.errstate(all="ignore"):
                    factor = np.broadcast_to(derivative(*arrays), result.shape).reshape(-1, 1)
                for leaf, matrix in x.slopes.items():
                    slopes[leaf] = slopes.get(leaf, 0) + factor * matrix[rows]
        return made(result, slopes, *tensors)

    return apply


add = itemwise(np.add, lambda a, b: 1.0, lambda a, b: 1.0)
subtract = itemwise(np.subtract, lambda a, b: 1.0, lambda a, b: -1.0)
multiply = itemwise(np.multiply, lambda a, b: b, lambda a, b: a)


def _operator(function: Callable[..., Tensor], swapped: bool = False) -> Callable[..., Tensor]:
    return lambda self, other: function(other, self) if swapped else function(self, other)


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operate(self: Tensor, other: Any) -> Tensor:
        self.become(function(self, other))
        return self

    return operate


for _name, _function in (("add", add), ("sub", subtract), ("mul", multiply)):
    setattr(Tensor, f"__{_name}__", _operator(_function))
    setattr(Tensor, f"__r{_name}__", _operator(_function, swapped=True))
    setattr(Tensor, f"__i{_name}__", _in_place(_function))
Tensor.__pos__ = lambda self: moved(self, lambda array: array)  # type: ignore[attr-defined]
Tensor.__neg__ = itemwise(np.negative, lambda a: -1.0)  # type: ignore[attr-defined]
Tensor.__gt__ = itemwise(np.greater, lambda a, b: 0.0, lambda a, b: 0.0)  # type: ignore[attr-defined]


class Namespace:
    """Stands for the package."""

    sin = staticmethod(itemwise(np.sin, np.cos))
    tanh = staticmethod(itemwise(np.tanh, lambda a: 1 - np.tanh(a) ** 2))
    copysign = staticmethod(itemwise(np.copysign, lambda a, b: 0.0, lambda a, b: 0.0))
    float32, int32 = np.dtype(np.float32), np.dtype(np.int32)

    @staticmethod
    def asarray(x: Any, *, device: str = "", copy: bool | None = None) -> Tensor:
        if not isinstance(x, Tensor):
            return Tensor(x, None, device)
        return +x if copy else x

    @staticmethod
    def zeros(shape: Any, *, device: str) -> Tensor:
        return Tensor(np.zeros(shape, np.float32), None, device)

    @staticmethod
    def full(shape: Any, number: float, *, device: str) -> Tensor:
        return Tensor(np.full(shape, number, np.float32), None, device)

    @staticmethod
    def astype(x: Tensor, dtype: Any, *, copy: bool = True) -> Tensor:
        if dtype == x.dtype:
            return +x if copy else x
        return made(x.array.astype(dtype), x.slopes, x)

    @staticmethod
    def reshape(x: Tensor, shape: Any) -> Tensor:
        return moved(x, lambda array: array.reshape(shape))

    @staticmethod
    def broadcast_to(x: Tensor, shape: Any) -> Tensor:
        return moved(x, lambda array: np.broadcast_to(array, shape))

    @staticmethod
    def sum(x: Tensor, *, axis: int | None = None) -> Tensor:
        total = np.asarray(x.array.sum(axis=axis, dtype=np.int64 if x.dtype.kind == "i" else x.dtype))
        slopes = {}
        for leaf, matrix in x.slopes.items():
            whole = matrix.reshape(*x.shape, -1)
            slopes[leaf] = whole.sum(axis=tuple(range(len(x.shape))) if axis is None else axis)
            slopes[leaf] = slopes[leaf].reshape(total.size, -1)
        return made(total, slopes, x)

    @staticmethod
    def mean(x: Tensor) -> Tensor:
        return Namespace.sum(x) * (1 / x.array.size)

    @staticmethod
    def matmul(x: Tensor, y: Tensor) -> Tensor:
        result = x.array @ y.array
        slopes: dict[Leaf, Array] = {}
        for leaf in {*x.slopes, *y.slopes}:
            total = np.zeros((*result.shape, leaf.size))
            if leaf in x.slopes:
                total += np.einsum("ikl,kj->ijl", x.slopes[leaf].reshape(*x.shape, -1), y.array)
            if leaf in y.slopes:
                total += np.einsum("ik,kjl->ijl", x.array, y.slopes[leaf].reshape(*y.shape, -1))
            slopes[leaf] = total.reshape(result.size, -1)
        return made(result, slopes, x, y)

    @staticmethod
    def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        mask = condition.array
        choose = itemwise(lambda a, b: np.where(mask, a, b), lambda a, b: mask, lambda a, b: ~mask)
        return choose(x, y)

    @staticmethod
    def jit(function: Any = None, *, donate: Any = ()) -> Any:
        positions = (donate,) if isinstance(donate, int) else donate
        if function is None:
            return lambda given: Namespace.jit(given, donate=donate)

        def call(*args: Any) -> Any:
            if _depth:
                return function(*args)  # part of another, and nothing is given away
            given = [args[position] for position in positions]
            before = [tensor.array for tensor in given]
            _depth.append(function)
            try:
                actual = function(*args)
            finally:
                _depth.pop()
            result = Tensor(actual.array, actual.slopes, actual.device)  # a new tensor, even for an argument
            result.requires_grad = actual.requires_grad
            for tensor, array in zip(given, before, strict=True):
                if tensor.array is not array:
                    raise Stale  # given away, and changed: either may be
                tensor.donated = True
            return result

        return call

    @staticmethod
    def value_and_grad(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        def both(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            # No leaf that would refuse to change: the derivative is by what was given.
            inner, origin = x.detach(), Leaf(x)
            inner.requires_grad, inner.slopes = True, {origin: np.eye(x.array.size)}
            value = function(inner, *rest)
            if inner.leaf is not None:
                raise Stale  # changed inside no_grad(): what the derivative is by then is not said
            slope = value.slopes.get(origin, np.zeros((1, x.array.size)))
            return value, Tensor(slope.reshape(x.shape).astype(x.dtype), None, x.device)

        return both

    @staticmethod
    def grad(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: Namespace.value_and_grad(function)(*args)[1]

    @staticmethod
    @contextlib.contextmanager
    def no_grad() -> Iterator[None]:
        _recording.append(False)
        try:
            yield
        finally:
            _recording.pop()
