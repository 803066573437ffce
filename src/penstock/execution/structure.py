"""What a graph computes, apart from values: the key of its executable, and whether NumPy is quicker."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.bounds import unchecked, worst
from penstock.graph.decompose import decompose
from penstock.graph.node import Kind, Node, topological
from penstock.graph.reference import number_key
from penstock.graph.rounding import is_exact
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.stream.watching import Watched

MIN_ITEMS = 1 << 15  # what has less in every value is computed sooner by the host than kernels are launched
LARGE_ITEMS = 1 << 24  # what has more in all values is compiled at the first sight


class Structure:
    """What a graph computes, apart from the values of its inputs and constants."""

    def __init__(
        self, wanted: Sequence[Node], target: Capabilities | None = None, checked: bool = True
    ) -> None:
        """Of a graph as the target computes it: what it has no kernel for is decomposed.

        `checked`: with what tells whether its indices are in range.
        """
        self.inputs: list[Node] = []
        self.numbers: dict[tuple[str, Any], int] = {}
        order = topological(wanted)
        if target is not None and any(_decomposes(node) for node in order):
            wanted = decompose(wanted, target)
            order = topological(wanted)
        self.nodes = wanted
        self.unchecked = unchecked(order) if checked else []  # indices that may be out of range
        self.worst = worst(self.unchecked)  # what tells whether they are
        place: dict[Node, int] = {}
        parts: list[Any] = []
        self.items = 0  # of all values, and of inputs that are read whole
        self.largest = 0  # the most items that one operation reads or writes
        self.far = False  # whether an input lies in memory that the host does not see
        self.compiled = False  # whether it holds what NumPy cannot compute
        self.drawn = False  # whether it draws random numbers
        for node in order:
            if node.value is None and node.primitive.is_identity:
                place[node] = place[node.inputs[0]]
                continue
            place[node] = len(parts)
            if node.value is not None:
                self.inputs.append(node)
                self.far = self.far or (node.size > 0 and not _seen_by_host(node.value))
                parts.append((node.shape, node.dtype))
                continue
            size = _touched_items(node)
            self.compiled = self.compiled or node.primitive.kind is Kind.OPAQUE
            self.drawn = self.drawn or node.primitive.kind is Kind.RANDOM
            self.items += size
            self.largest = max(self.largest, size)
            names = node.primitive.constants
            numbers = [self.numbers.setdefault(number_key(node, n), len(self.numbers)) for n in names]
            rest = tuple(value for name, value in node.attributes.items() if name not in names)
            parts.append((node.primitive, tuple(place[parent] for parent in node.inputs), rest, *numbers))
        ends = [*wanted, None, *self.unchecked] if self.unchecked else wanted
        self.key: Hashable = (tuple(parts), tuple(node and place[node] for node in ends))

    @property
    def wanted(self) -> list[Node]:
        """The results of a program: what is wanted, and then what tells whether indices are in range."""
        return [*self.nodes, *(index.node for index in self.worst)]

    def waits_for_no_compiler(self, seen: bool) -> bool:
        """Whether NumPy computes it: the host sees all inputs, and it is small or was not `seen` before."""
        return not self.far and self.small(seen)

    def small(self, seen: bool) -> bool:
        """Whether computing takes less than building a program, or so little that no choice of device pays.

        The same expression gives the same bits at the first call as at the next. So it depends on `seen` only
        where NumPy's bits are those of kernels.
        """
        if self.compiled or self.items >= LARGE_ITEMS:
            return False
        return self.largest < MIN_ITEMS or not (seen or self.drawn or not is_exact(topological(self.wanted)))

    def watch(self, buffers: Sequence[Buffer], device: Device) -> None:
        """Have indices looked at when the host next reads, by the worst of them; NumPy has looked at them."""
        for index, buffer in zip(self.worst, buffers, strict=bool(buffers)):
            device.watch(Watched(buffer, index.verdict.dtype, index.verdict.judge))
        for node in self.unchecked:
            node.attributes["bound"].checked = True

    def constants(self) -> list[Any]:
        """The numbers, as arguments."""
        return [np.frombuffer(bits, dtype)[0].item() for dtype, bits in self.numbers]


def _decomposes(node: Node) -> bool:
    return node.value is None and node.primitive.decompose is not None


def _seen_by_host(buffer: Any) -> bool:
    """Whether the host can read a value where it lies. What no buffer holds, it cannot."""
    return isinstance(buffer, Buffer) and buffer.driver.capabilities.shared_memory


def _touched_items(node: Node) -> int:
    """The items that an operation writes, or reads if these are more (views and look-ups do not read all)."""
    if node.primitive.is_free or node.primitive.kind is Kind.GATHER:
        return node.size
    return max((node.size, *(parent.size for parent in node.inputs)))
