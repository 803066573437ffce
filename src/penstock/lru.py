"""A bounded cache that drops the least recently used entry."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Key:
    """A long key whose hash is computed once; Python computes that of a tuple at every look-up."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: Hashable) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.parts == other.parts


class LRU(OrderedDict[K, V]):
    """A dict of at most `most` entries: a new entry drops the least recently used."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    @property
    def full(self) -> bool:
        """Whether a new entry drops the oldest, which is the first of the iteration."""
        return len(self) >= self._most

    def use(self, key: K) -> V | None:
        """The value of a key, which becomes the most recently used; None if there is none."""
        value = self.get(key)
        if value is not None or key in self:
            try:  # noqa: SIM105 - a context manager would take longer than all of this
                self.move_to_end(key)
            except KeyError:  # another thread has dropped it since
                pass
        return value

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
