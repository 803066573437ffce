"""Objects of which something is to be known while they live."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """Objects as long as others refer to them, in no order.

    Unlike a WeakSet, which changes under a thread that iterates over it when another has just ended its
    iteration, it may be read by several threads while objects come and go.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()  # by their ids

    def __iter__(self) -> Iterator[T]:
        """Over those that are there now."""
        references = self._known.valuerefs()  # a list, made in one call
        return iter([known for reference in references if (known := reference()) is not None])

    def add(self, known: T) -> None:
        """Know another."""
        self._known[id(known)] = known

    def discard(self, known: T) -> None:
        """Forget one, if it is known."""
        self._known.pop(id(known), None)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
