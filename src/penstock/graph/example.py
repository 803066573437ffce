"""Operations that come again on other nodes: what the next has in common with the one before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import count
from operator import itemgetter
from typing import Any, TypeAlias

from penstock.graph.calls import CALL
from penstock.graph.dtypes import bool_
from penstock.graph.elementwise import FULL, full
from penstock.graph.node import Node
from penstock.graph.reference import Constant, constant_key, constant_values
from penstock.lru import LRU

Take: TypeAlias = Callable[[Sequence[Node]], Sequence[Node]]  # some of the items
Places: TypeAlias = tuple[int, ...]
_MOST_PARTS = 16  # operations of an example: what is longer is found by its structure
_MOST_NUMBERS = 64  # for which an example remembers all constants
_NO_NUMBERS = LRU[Node, tuple[Any, ...]](0)


class Example:
    """An operation that comes again, and what ran it the last time.

    Its inputs are values and numbers, or pending: then these are like examples too, and each combination of
    them is an example of its own. What a program takes of a node like that is found by places: the node's
    inputs are items, then come theirs where they are pending, and so on.
    """

    __slots__ = (
        "_constants", "_fixed", "_given", "_known", "_number", "_order",
        "_pattern", "_pending", "_taken", "_values",
        "inputs_of", "is_plain", "node", "numbers", "parts", "run", "shares",
    )  # fmt: skip

    def __init__(
        self,
        node: Node,
        inputs_of: Callable[[Sequence[Node]], tuple[Node, ...]] = tuple,
        *,
        is_plain: bool = True,
        shares: bool = False,
        parts: int = 1,
    ) -> None:
        """`node`: on stand-ins. `inputs_of`: the inputs of another like it, from the nodes of arguments."""
        self.node = node
        self.inputs_of = inputs_of
        # Whether its inputs are different values, and its program takes them in this order.
        self.is_plain = is_plain
        self.shares = shares  # whether its result may lie in the memory of an input, without any program
        self.parts = parts  # operations, with those of pending inputs
        self.run: Any = None  # what computes it on a device, once that is known
        self.numbers: tuple[Any, ...] = ()  # the constants that this takes, if they are always the same
        self._pending: Places = ()
        self._taken = self._values = _items(())  # in the order of the program; all, some of them twice
        # Of all values, the first that is the same, where some are there twice; None: there is only one.
        self._pattern: Places | None = None
        self._given: Take | None = None  # the numbers, if there are any
        self._number = -1  # the place of the only one
        self._known = _NO_NUMBERS  # the constants with that
        self._fixed: tuple[Constant, ...] = ()  # constants that are no items, such as those of subgraphs
        self._constants: Places = ()  # of these and the numbers, the first that is the same
        self._order: Places = ()  # the same in the order of the program

    def above(self, below: Sequence[Example | None]) -> Example | None:
        """That of the same operation on values, for None, and on pending nodes; None if it would be long."""
        parts = 1 + sum([example.parts for example in below if example is not None])
        if parts > _MOST_PARTS:
            return None
        return Example(self.node, is_plain=False, shares=self.shares, parts=parts)

    def note(
        self, node: Node, inputs: Sequence[Node], constants: Collection[Constant], run: Any, moved: bool
    ) -> None:
        """Have nodes like this run as this one does: by a program of these inputs and constants.

        `moved`: the program takes more constants than the node has, which are always the same.
        """
        if self.shares:
            return
        is_own = self.is_plain and [*inputs] == [*node.inputs]
        if is_own or (not self.is_plain and self._note_places(node, inputs, constants, moved)):
            self.run, self.numbers = run, constant_values(tuple(constants)) if constants else ()

    def _note_places(
        self, node: Node, inputs: Sequence[Node], constants: Collection[Constant], moved: bool
    ) -> bool:
        """Note where a node has what its program takes; False if the program takes anything else."""
        items, pending = node.inputs, list[int]()
        for at in count():
            if at == len(items):
                break
            if items[at].value is None and items[at].primitive is not FULL:
                pending.append(at)
                items += items[at].inputs
        values = [at for at, item in enumerate(items) if item.value is not None]
        given = [at for at, item in enumerate(items) if item.value is None and at not in pending]
        calls = [part for part in (node, *[items[at] for at in pending]) if part.primitive is CALL]
        fixed = [constant for part in calls for constant in part.attributes["subgraph"].constants]
        leaves = [items[at] for at in values]
        keys = [*constants] if moved else [*fixed, *_keys([items[at] for at in given])]
        if {*leaves} != {*inputs} or {*keys} != {*constants} or (moved and given):
            return False
        self._pending = tuple(pending)
        self._taken, self._values = _items([items.index(value) for value in inputs]), _items(values)
        self._pattern = _firsts(leaves) if len({*leaves}) < len(leaves) else () if len(leaves) > 1 else None
        self._given = _items(given) if given else None
        self._number = given[0] if len(given) == 1 else -1
        self._known = LRU(_MOST_NUMBERS) if len(given) == 1 else _NO_NUMBERS
        self._fixed, self._constants = tuple(fixed), _firsts(keys)
        self._order = tuple([keys.index(constant) for constant in constants])
        return True

    def given(self, node: Node) -> tuple[Sequence[Node], tuple[Any, ...]]:
        """The nodes and the constants that `run` takes for a node like this; no nodes if it is another case.

        That is so if a part of it is computed by now, or if other values or numbers than before are the same.
        """
        items = node.inputs
        for at in self._pending:
            part = items[at]
            if part.value is not None:
                return (), ()
            items += part.inputs
        taken, pattern = self._taken(items), self._pattern
        if pattern is not None:
            is_other = _firsts(self._values(items)) != pattern if pattern else len({*taken}) < len(taken)
            if is_other:
                return (), ()
        if self._number >= 0:
            numbers = self._known.get(items[self._number])
            if numbers:
                return taken, numbers
        if self._given is None:
            return taken, self.numbers
        numbers = self._with(self._given(items))
        return (taken if numbers else ()), numbers

    def _with(self, given: Sequence[Node]) -> tuple[Any, ...]:
        """The constants that `run` takes with these numbers; none if others than before are the same."""
        keys = [*self._fixed, *_keys(given)]
        is_same = _firsts(keys) == self._constants
        numbers = constant_values(tuple([keys[at] for at in self._order])) if is_same else ()
        if self._number >= 0:
            self._known[given[0]] = numbers
        return numbers


def _items(places: Sequence[int]) -> Take:
    """What takes the items at these places, as a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _keys(numbers: Sequence[Node]) -> list[Constant]:
    return [constant_key(number, "number") for number in numbers]


def _firsts(items: Sequence[Any]) -> Places:
    """For each item, the place of the first that is equal."""
    return tuple(map(items.index, items))


# What a number's node is like that an example may remember: its value is never computed alone.
NUMBER = Example(full((), bool_, False), is_plain=False, shares=True, parts=0)
