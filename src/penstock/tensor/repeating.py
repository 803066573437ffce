"""Calls of a jitted function with the same tensors again and again, with little to do before each launch.

That is for functions that return nothing, and change tensors in place: their launches have the same arguments
each time. Each call only checks that this is still so.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from penstock.errors import OutOfDeviceMemory
from penstock.graph.node import Node, leaf
from penstock.interrupts import held_back
from penstock.memory.buffer import Buffer
from penstock.tensor.core import Tensor

if TYPE_CHECKING:
    from penstock.execution.launched import RepeatedRun
    from penstock.tensor.replay import Captured

_node, _value, _place = attrgetter("_actual_node"), attrgetter("value"), attrgetter("place")


class Repeated:
    """The last call of a jitted function, to be repeated. It keeps no memory from other use."""

    def __init__(
        self, captured: Captured, arguments: Sequence[Tensor], tensors: list[Any], run: RepeatedRun
    ) -> None:
        self._captured, self._arguments, self._tensors, self._run = captured, list(arguments), tensors, run
        self._seen = [weakref.ref(node) for node in map(_node, tensors)]
        self._places = [tensor._actual_node.value.place for tensor in tensors]
        self._kinds = [(tensor._actual_node.shape, tensor._actual_node.dtype) for tensor in tensors]
        self._aliasing = captured.aliasing_of(captured.program)
        # Their nodes hold the known range of an index, so that they are new after each run.
        written = self._aliasing.numbers
        self._integers = {at for at in written if tensors[at]._actual_node.dtype.kind in "iu"}

    @classmethod
    def of(cls, captured: Captured, arguments: Sequence[Tensor]) -> Repeated | None:
        """The call with these arguments that was just made; None if a call has more to do than launch."""
        program: Any = captured.program
        if program is None or captured.device.dispatcher is not None or not captured.only_launches:
            return None
        if len(captured.aliasing_of(program).in_place) < len(captured.wanted):
            return None
        tensors = [arguments[at] if holder is None else holder for holder, at in captured.holders]
        run = program.repeated([tensor._actual_node.value for tensor in tensors])
        return None if run is None else cls(captured, arguments, tensors, run)

    def __call__(self) -> bool:
        """Call it again; False, and nothing was done, if anything that it depends on is not as it was."""
        captured = self._captured
        device = captured.device
        if device.stream.recorders or not captured.same_facts():
            return False
        with device.running:
            if not self._unchanged():
                return False
            with held_back:
                if not self._launched():
                    return False
                for at in self._integers:
                    tensor = self._tensors[at]
                    old = tensor._actual_node
                    new = tensor._actual_node = leaf(old.value, old.shape, old.dtype)
                    self._seen[at] = weakref.ref(new)
        return True

    def _unchanged(self) -> bool:
        """Whether all values lie where they did, and nothing else needs those that are overwritten."""
        nodes = list(map(_node, self._tensors))
        if nodes != [reference() for reference in self._seen] and not self._renewed(nodes):
            return False
        values: list[Buffer] = list(map(_value, nodes))
        if list(map(_place, values)) != self._places:
            return False
        # 3 references to a node are those of the tensor, the list and the argument of getrefcount.
        return not any(values[at].shared or getrefcount(nodes[at]) > 3 for at in self._aliasing.numbers)

    def _renewed(self, nodes: Sequence[Node]) -> bool:
        """Whether all nodes that differ are those of integers that another program wrote, like this one."""
        for at, (node, reference) in enumerate(zip(nodes, self._seen, strict=True)):
            if node is not reference():
                shape, dtype = self._kinds[at]
                if at not in self._integers or node.shape != shape or node.dtype is not dtype:
                    return False
                if not isinstance(node.value, Buffer):
                    return False
                self._seen[at] = weakref.ref(node)
        return True

    def _launched(self) -> bool:
        program: Any = self._captured.program
        try:
            launched: bool = program.run_again(self._run)
        except BaseException as error:
            if isinstance(error, OutOfDeviceMemory) and not program.wrote:
                return False
            if not isinstance(error, Exception) or program.wrote:
                self._captured.damage(self._aliasing.replaced_inputs, self._arguments, error)
            raise
        return launched
