"""Containers of modules or parameters, as lists or dicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Self, TypeVar, overload

from penstock.nn.module import Module
from penstock.tensor.core import Tensor

T = TypeVar("T", Module, Tensor)


class _Holder(Module, Generic[T]):
    """The base of containers: named parts, whose paths have no name of an attribute in between."""

    _kind: type = Module

    def __init__(self) -> None:
        self._items: dict[str, T] = {}

    def _own_parts(self) -> Mapping[str, Any]:
        others = {name: value for name, value in vars(self).items() if name != "_items"}
        items: dict[str, T] = vars(self).get("_items", {})
        return others | items

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, part: object) -> bool:
        return any(part is item for item in self._items.values())

    def _checked(self, part: T) -> T:
        if not isinstance(part, self._kind):
            wanted = "modules" if self._kind is Module else "tensors"
            raise TypeError(f"{type(self).__name__} holds {wanted}, and {type(part).__name__} was given")
        self._computed = False  # its parameters may be pending
        return part


class _Listed(_Holder[T]):
    """A list of parts, named by their positions."""

    def __init__(self, parts: Iterable[T] = ()) -> None:
        super().__init__()
        self.extend(parts)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    @overload
    def __getitem__(self, key: int) -> T: ...
    @overload
    def __getitem__(self, key: slice) -> Self: ...
    def __getitem__(self, key: int | slice) -> T | Self:
        if isinstance(key, slice):
            made = type(self).__new__(type(self))
            _Holder.__init__(made)
            made._renumber(list(self)[key])
            return made
        return list(self)[self._position(key)]

    def __setitem__(self, key: int, part: T) -> None:
        self._items[list(self._items)[self._position(key)]] = self._checked(part)

    def __delitem__(self, key: int) -> None:
        parts = list(self)
        del parts[self._position(key)]
        self._renumber(parts)

    def append(self, part: T) -> Self:
        """Append a part. Returns the container."""
        self._items[str(len(self._items))] = self._checked(part)
        return self

    def extend(self, parts: Iterable[T]) -> Self:
        """Append several parts. Returns the container."""
        for part in parts:
            self.append(part)
        return self

    def insert(self, index: int, part: T) -> None:
        """Insert a part before the position `index`."""
        parts = list(self)
        parts.insert(index, self._checked(part))
        self._renumber(parts)

    def _renumber(self, parts: Iterable[T]) -> None:
        self._items = {str(position): part for position, part in enumerate(parts)}

    def _position(self, key: int) -> int:
        if not -len(self) <= key < len(self):
            raise IndexError(f"{type(self).__name__} has {len(self)} parts, and index {key} is out of range")
        return key % len(self)


class ModuleList(_Listed[Module]):
    """Modules in order, for a `forward` that calls them itself.

    >>> layers = ps.nn.ModuleList([ps.nn.Linear(2, 2) for _ in range(3)])
    >>> len(layers)
    3
    """


class ParameterList(_Listed[Tensor]):
    """A list of tensors.

    >>> len(ps.nn.ParameterList([ps.zeros(2), ps.zeros(3)]))
    2
    """

    _kind = Tensor


class Sequential(_Listed[Module]):
    """Modules that are applied in sequence, given as arguments or as a dict with names.

    >>> ps.nn.Sequential(ps.nn.Linear(3, 4), ps.nn.ReLU(), ps.nn.Linear(4, 2))(ps.zeros((5, 3))).shape
    (5, 2)
    """

    def __init__(self, *layers: Module | Mapping[str, Module]) -> None:
        if len(layers) == 1 and isinstance(layers[0], Mapping):
            _Holder.__init__(self)
            self._items = {str(name): self._checked(layer) for name, layer in layers[0].items()}
        else:
            super().__init__(layers)  # type: ignore[arg-type]

    def forward(self, x: Any) -> Tensor:
        """Apply all modules, each to the result of the previous."""
        for layer in self:
            x = layer(x)
        last: Tensor = x
        return last


class _Named(_Holder[T]):
    """A dict of parts."""

    def __init__(self, parts: Mapping[str, T] | Iterable[tuple[str, T]] = ()) -> None:
        super().__init__()
        self.update(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise KeyError(f"there is no {name!r}; there are {', '.join(map(repr, self._items)) or 'none'}")
        return self._items[name]

    def __setitem__(self, name: str, part: T) -> None:
        if not isinstance(name, str) or not name or "." in name:
            raise KeyError(f"the name of a part is text without a dot, and {name!r} was given")
        self._items[name] = self._checked(part)

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def update(self, parts: Mapping[str, T] | Iterable[tuple[str, T]]) -> None:
        """Add parts, and replace those of the same name."""
        for name, part in parts.items() if isinstance(parts, Mapping) else parts:
            self[name] = part

    def pop(self, name: str) -> T:
        """Remove a part, and return it."""
        part = self[name]
        del self[name]
        return part

    def keys(self) -> Iterable[str]:
        """The names."""
        return self._items.keys()

    def values(self) -> Iterable[T]:
        """The parts."""
        return self._items.values()

    def items(self) -> Iterable[tuple[str, T]]:
        """The names and parts."""
        return self._items.items()


class ModuleDict(_Named[Module]):
    """Modules by name, for a `forward` that calls them itself.

    >>> ps.nn.ModuleDict({"a": ps.nn.Linear(3, 2)})["a"](ps.zeros((5, 3))).shape
    (5, 2)
    """


class ParameterDict(_Named[Tensor]):
    """A dict of tensors.

    >>> ps.nn.ParameterDict({"scale": ps.ones(2)})["scale"].tolist()
    [1.0, 1.0]
    """

    _kind = Tensor
