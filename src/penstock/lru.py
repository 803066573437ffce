"""A table with a bound on its entries."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(OrderedDict[K, V]):
    """A dict of at most `most` entries: a new one drops the one that was not used for longest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    @property
    def full(self) -> bool:
        """Whether a new entry drops the oldest, which is the first of the iteration."""
        return len(self) >= self._most

    def use(self, key: K) -> V | None:
        """The value of a key, which thereby is the one used last; None where there is none."""
        value = self.get(key)
        if value is not None or key in self:
            self.move_to_end(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
