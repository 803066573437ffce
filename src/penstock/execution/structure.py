"""The structure of a graph: the key of its executable, and whether NumPy would be faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from penstock.drivers.driver import Capabilities
from penstock.graph.bounds import BOUNDED, Bound, unchecked, worst
from penstock.graph.calls import CALL, RESULT, Subgraph, inline
from penstock.graph.decompose import decompose
from penstock.graph.elementwise import FULL
from penstock.graph.node import Kind, Node, topological
from penstock.graph.reference import constant_key, constant_values
from penstock.graph.rounding import is_exact
from penstock.graph.shaping import SLICE
from penstock.lru import Key
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.stream.watching import Watched

MIN_ITEMS = 1 << 15  # items; where all values are smaller, NumPy takes less time than a launch
LARGE_ITEMS = 1 << 24  # items of all values; larger graphs are compiled at once


class Structure:
    """What a graph computes, apart from the values of its inputs and constants."""

    def __init__(
        self,
        wanted: Sequence[Node],
        target: Capabilities | None = None,
        checked: bool = True,
        recorded: Sequence[Node] | None = None,
    ) -> None:
        """Of a graph as the target computes it: what it has no kernel for is decomposed.

        `checked`: with what tells whether its indices are in range. `recorded`: what the user recorded, if it
        is other than what is wanted.
        """
        self.recorded = wanted if recorded is None else recorded
        self._contracts = target is None or target.contracts
        self._rounds_quotients = target is not None and target.rounds_quotients
        if not self._walk(wanted, target):
            assert target is not None
            wanted = decompose(wanted, target)
            self._walk(wanted, None)
        self._nodes = wanted
        self.unchecked = unchecked(self.bounded) if checked and self.bounded else []  # may be out of range
        self.worst = worst(self.unchecked) if self.unchecked else []  # what tells whether they are
        position = self._position
        ends: tuple[int | None, ...] = tuple([position[node] for node in wanted])
        if self.unchecked:
            ends += (None, *(position[node] for node in self.unchecked))
        self._ends = ends
        self.key = Key((tuple(self._parts), ends))

    def _walk(self, wanted: Sequence[Node], target: Capabilities | None) -> bool:
        """Number the nodes, each after its inputs, and say what each is.

        False: the target has no kernel for some of them, and the rest was not looked at.
        """
        self.inputs: list[Node] = []
        self._pending: list[Node] = []  # what is to be computed
        self.bounded: list[Node] = []
        self.numbers: dict[tuple[str, Any], int] = {}
        self._position: dict[Node, int] = {}
        self._parts: list[Any] = []
        self._calls = False
        position, parts, constants = self._position, self._parts, self.numbers
        number_of = position.__getitem__
        stack: list[Any] = [*reversed(wanted)]  # None: the inputs of the node before it have their numbers
        while stack:
            node = stack.pop()
            if node is None:
                node = stack.pop()
                inputs = node.inputs
            else:
                if node in position:
                    continue
                if node.value is not None:
                    position[node] = len(parts)
                    self.inputs.append(node)
                    parts.append((node.shape, node.dtype.name))  # whose hash is known
                    continue
                inputs = node.inputs
                if inputs and not (len(inputs) == 1 and inputs[0] in position):
                    stack += (node, None)
                    stack += inputs[::-1]
                    continue
            primitive = node.primitive
            rule = primitive.decompose
            if rule is not None and target is not None and rule(node, target) is not None:
                return False
            if primitive.is_identity:
                position[node] = position[inputs[0]]
                if primitive is BOUNDED:
                    self.bounded.append(node)
                continue
            position[node] = len(parts)
            self._pending.append(node)
            if primitive is FULL:  # the most frequent of all
                constant = constant_key(node, "number")
                number = constants.setdefault(constant, len(constants))
                parts.append((FULL, node.shape, node.dtype.name, number))
                continue
            if primitive is RESULT:
                parts.append((RESULT, position[inputs[0]], node.attributes["number"]))
                continue
            where, names = tuple(map(number_of, inputs)), primitive.constants
            if primitive is CALL:
                self._calls = True
                subgraph: Subgraph = node.attributes["subgraph"]
                known = subgraph.constants
                own = [constants.setdefault(constant, len(constants)) for constant in known] if known else ()
                parts.append((subgraph, where, *own))
            elif not names:
                parts.append(
                    (primitive, where, *node.attributes.values()) if node.attributes else (primitive, where)
                )
            else:
                rest = [value for name, value in node.attributes.items() if name not in names]
                own = [constants.setdefault(constant_key(node, name), len(constants)) for name in names]
                parts.append((primitive, where, *rest, *own))
        return True

    @property
    def slices(self) -> list[Node]:
        """The slices, apart from those in calls."""
        return [node for node in self._pending if node.primitive is SLICE]

    def key_with(self, change: Callable[[tuple[Any, ...]], Any]) -> Key:
        """The key with other parts: the same for structures that differ in what `change` drops."""
        return Key((tuple(map(change, self._parts)), self._ends))

    @property
    def computed(self) -> Sequence[Node]:
        """What is wanted, as the target computes it, with calls."""
        return self._nodes

    @cached_property
    def bounds(self) -> list[Bound]:
        """What the indices are for that are not checked yet: of others, the key says nothing."""
        bounds = [node.attributes["bound"] for node in self.bounded]
        return [bound for bound in bounds if not bound.checked]

    @property
    def called(self) -> int:
        """How many of the operations were recorded before, and are called."""
        return len(self.operations) - sum(node.primitive.kind is not Kind.CALL for node in self._pending)

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """What is wanted, without calls."""
        return self.wanted[: len(self._nodes)]

    @cached_property
    def wanted(self) -> Sequence[Node]:
        """The results of a program: what is wanted, and then what tells whether indices are in range."""
        wanted = [*self._nodes, *(index.node for index in self.worst)]
        return inline(wanted) if self._calls else wanted

    @cached_property
    def operations(self) -> Sequence[Node]:
        """What is computed, without calls."""
        if not self._calls:
            return self._pending
        nodes = topological(self.wanted)
        return [node for node in nodes if node.value is None and not node.primitive.is_identity]

    @cached_property
    def largest(self) -> int:
        """The most items that one operation reads or writes."""
        return max(map(_touched_items, self.operations), default=0)

    @cached_property
    def items(self) -> int:
        """The items of all values, and of inputs that are read whole."""
        return sum(map(_touched_items, self.operations))

    @cached_property
    def far(self) -> bool:
        """Whether an input lies in memory that the host does not see."""
        return any(node.size and not _seen_by_host(node.value) for node in self.inputs)

    def _has(self, kind: Kind) -> bool:
        return any(node.primitive.kind is kind for node in self.operations)

    def waits_for_no_compiler(self, seen: bool) -> bool:
        """Whether NumPy computes it: the host sees all inputs, and kernels would give the same later."""
        return not self.far and self.small(seen)

    def small(self, seen: bool) -> bool:
        """Whether NumPy's bits are those of kernels, and it takes less time than building a program would.

        So the same expression gives the same bits at any call, inside of a jitted function and outside.
        """
        if self.items >= LARGE_ITEMS or self._has(Kind.OPAQUE):
            return False
        nodes = topological(self.wanted)
        if self._has(Kind.RANDOM) or not is_exact(nodes, self._contracts, self._rounds_quotients):
            return False
        return not seen or self.largest < MIN_ITEMS

    def watch(self, buffers: Sequence[Buffer], device: Device) -> None:
        """Have indices looked at when the host next reads, by the worst of them; NumPy has looked at them."""
        for index, buffer in zip(self.worst, buffers, strict=bool(buffers)):
            device.watch(Watched(buffer, index.verdict.dtype, index.verdict.judge))
        for node in self.unchecked:
            node.attributes["bound"].checked = True

    def constants(self) -> tuple[Any, ...]:
        """The values of the scalar arguments."""
        return constant_values(tuple(self.numbers))


def _seen_by_host(buffer: Any) -> bool:
    """Whether a value is in a buffer that the host can read."""
    return isinstance(buffer, Buffer) and buffer.driver.capabilities.shared_memory


def _touched_items(node: Node) -> int:
    """The items that an operation writes, or reads if these are more (views and look-ups do not read all)."""
    if node.primitive.is_free or node.primitive.kind is Kind.GATHER:
        return node.size
    return max((node.size, *(parent.size for parent in node.inputs)))
