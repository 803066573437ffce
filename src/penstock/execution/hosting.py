"""State in host memory: which inputs may be there between runs, and how they are moved.

A value is the same wherever it lies. A program that was planned under a budget may expect some of its inputs
at the host, in pinned memory; whatever else reads such a value copies it, or reads it there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.drivers.driver import Capabilities
from penstock.errors import OutOfDeviceMemory
from penstock.graph.node import Node
from penstock.kernels.source import ALIGNMENT
from penstock.memory.buffer import Buffer
from penstock.memory.pool import size_class
from penstock.runtime import Device

if TYPE_CHECKING:
    from penstock.execution.structure import Structure


@dataclass(frozen=True)
class State:
    """The state of a program: inputs and results that its caller has lie where the program wants.

    Of an expression outside of jitted functions: all of them.
    """

    holders: Mapping[int, Callable[[], Node]]  # by the numbers of inputs: what holds each value at the time
    results: frozenset[int] = frozenset()  # the numbers of those that are gradients or new values of tensors

    lasts: bool = True  # whether the same program runs again, so that what it has on the device stays there
    arriving: int = 0  # bytes that other inputs at the host take when they come to the device
    last: Callable[[], int] = lambda: 0  # bytes on the device of results of the last call that somebody holds

    @classmethod
    def of_expression(cls, structure: Structure) -> State:
        """Of a program that runs once: what it needs of the host comes for that time."""
        holders = {at: partial(_same, node) for at, node in enumerate(structure.inputs)}
        return cls(holders, frozenset(range(len(structure.recorded))), lasts=False)

    def nodes(self) -> dict[int, Node]:
        """The inputs, by number."""
        return {at: holder() for at, holder in self.holders.items()}


def arriving_bytes(nodes: Iterable[Node], device: Device) -> int:
    """What the device gives for those of some values that lie at the host, when they come."""
    groups: dict[int, list[int]] = {}
    for node in dict.fromkeys(nodes):
        if isinstance(node.value, Buffer) and node.value.hosted:
            groups.setdefault(node.value.memory.serial, []).append(node.nbytes)
    return sum(_taken(sizes, device.capabilities) for sizes in groups.values())


def _taken(sizes: Sequence[int], capabilities: Capabilities) -> int:
    return sum(size_class(nbytes) for _, _, nbytes in side_by_side(sizes, capabilities))


class Residents:
    """Inputs of a program that may lie at the host between its runs, by number."""

    def __init__(self, nodes: Mapping[int, Node], device: Device, lasts: bool = True) -> None:
        """`lasts`: what is at the host comes with all of its allocation; or else alone."""
        self._capabilities = device.capabilities
        self._sizes = {at: node.nbytes for at, node in nodes.items() if node.nbytes}
        wholes: dict[int, Buffer] = {}
        members: dict[int, list[int]] = {}
        for at in self._sizes:
            if nodes[at].value.memory.pinned and not nodes[at].value.hosted:
                continue  # it takes nothing of the device's memory
            # A buffer that something else refers to stays. Two references: the node's, and of this call.
            if nodes[at].value.hosted or sys.getrefcount(nodes[at].value) == 2:
                key = nodes[at].value.memory.serial if lasts or not nodes[at].value.hosted else ~at
                wholes[key] = nodes[at].value.whole
                members.setdefault(key, []).append(at)
        # By allocations: those at the host, and those in which nothing else lies, as of each part there is a
        # reference to the whole. With their bytes on the device, as long as all stay.
        self._together = [
            (self._taken(parts) if wholes[key].hosted else wholes[key].memory.nbytes, parts)
            for key, parts in members.items()
            if wholes[key].hosted or sys.getrefcount(wholes[key]) == 2 + len(parts)
        ]
        self.away_bytes = sum(  # what those would take on the device that lie at the host now
            nbytes for nbytes, parts in self._together if nodes[parts[0]].value.hosted
        )

    @property
    def numbers(self) -> frozenset[int]:
        """The inputs that may be at the host."""
        return frozenset(at for _, parts in self._together for at in parts)

    def freed(self, hosted: Collection[int]) -> int:
        """How much less of the device's memory is taken where some lie at the host, than where none do."""
        freed, gone = 0, frozenset(hosted)
        for nbytes, parts in self._together:
            stay = [at for at in parts if at not in gone]
            freed += nbytes - self._taken(stay) if len(stay) < len(parts) else 0
        return freed

    def _taken(self, numbers: Sequence[int]) -> int:
        return _taken([self._sizes[at] for at in numbers], self._capabilities)


def settle(nodes: Sequence[Node], hosted: Collection[int], device: Device) -> None:
    """Have every input of a program lie where that expects it; `hosted`: the numbers of those at the host."""
    send(nodes, hosted, device)
    _move_groups([node for at, node in enumerate(nodes) if at not in hosted and node.value.hosted], device)


def send(nodes: Sequence[Node], hosted: Collection[int], device: Device) -> None:
    """Have those inputs of a program lie at the host that it expects there.

    What shares an allocation with values that leave it moves too, through the host, so that no more of the
    device's memory is taken at any time.
    """
    leaving = [node for at, node in enumerate(nodes) if at in hosted and not node.value.hosted]
    if leaving:
        left = {node.value.memory.serial for node in leaving}
        others = [node for at, node in enumerate(nodes) if at not in hosted and not node.value.hosted]
        staying = [node for node in others if node.value.memory.serial in left]
        _move_groups(leaving, device, to_host=True)
        _move_groups(staying, device, to_host=True)
        device.stream.drain("state moved to the host")  # so that its memory is free
        _move_groups(staying, device)
        _release_idle(device)


def _move_groups(nodes: Sequence[Node], device: Device, to_host: bool = False) -> None:
    """Move values, those that lie in one allocation together."""
    groups: dict[int, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.value.memory.serial, []).append(node)
    for group in groups.values():
        _move(group, device, to_host)


def move_to_host(nodes: Sequence[Node], device: Device) -> bool:
    """Move values to the host that lie on the device; whether there are any."""
    leaving = [node for node in nodes if isinstance(node.value, Buffer) and not node.value.hosted]
    _move_groups(leaving, device, to_host=True)
    device.stream.drain("state moved to the host")
    return bool(leaving)


def gather_through_host(nodes: Sequence[Node], device: Device) -> None:
    """Lay values side by side without more memory of the device; at the host, if they do not fit there."""
    _move(nodes, device, to_host=True)
    device.stream.drain("state moved to the host")
    with suppress(OutOfDeviceMemory):
        _move(nodes, device, to_host=False)
    _release_idle(device)


def _release_idle(device: Device) -> None:
    """Give pinned memory back that values only passed through: it may be as much as the whole model."""
    device.stream.drain("values moved through the host")
    device.layers().visible.clear()


def _move(nodes: Sequence[Node], device: Device, to_host: bool) -> None:
    """The same values at another place, side by side."""
    nodes = list(dict.fromkeys(nodes))
    sizes = [node.nbytes for node in nodes]
    for numbers, offsets, nbytes in side_by_side(sizes, device.capabilities):
        whole = device.layers().hosted(nbytes) if to_host else device.empty(nbytes)
        for at, offset in zip(numbers, offsets, strict=True):
            node = nodes[at]
            new = whole.part(offset, sizes[at])
            device.copy(new, node.value, sizes[at])
            node.value = new


def on_device(buffers: Sequence[Buffer], hosted: Collection[int], device: Device) -> list[Buffer]:
    """Inputs of a program, with copies on the device of those at the host that it does not expect there."""
    return [
        _fetched(buffer, device) if buffer.hosted and at not in hosted else buffer
        for at, buffer in enumerate(buffers)
    ]


def _same(node: Node) -> Node:
    return node


def _fetched(buffer: Buffer, device: Device) -> Buffer:
    copy = device.empty(buffer.nbytes)
    device.copy(copy, buffer)
    return copy


def side_by_side(
    sizes: Sequence[int], capabilities: Capabilities
) -> Iterator[tuple[list[int], list[int], int]]:
    """Values of these sizes in as few allocations as hold them all.

    Of each: the numbers of its values, where they begin, and its bytes.
    """
    numbers: list[int] = []
    offsets: list[int] = []
    total = 0
    step, most = _alignment(capabilities), capabilities.max_arena_bytes
    for number, size in enumerate(sizes):
        nbytes = -(-size // step) * step
        if numbers and total + nbytes > most:
            yield numbers, offsets, total
            numbers, offsets, total = [], [], 0
        numbers.append(number)
        offsets.append(total)
        total += nbytes
    if numbers:
        yield numbers, offsets, total


def room(size: int, capabilities: Capabilities) -> int:
    """The bytes from a value to the next, rounded up to the alignment of kernels and of the device."""
    step = _alignment(capabilities)
    return -(-size // step) * step


def _alignment(capabilities: Capabilities) -> int:
    return math.lcm(ALIGNMENT, capabilities.offset_alignment)
