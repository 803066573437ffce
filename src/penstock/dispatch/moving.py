"""Moves values between devices. A value is on a single device; copies are kept where it was, up to a limit.

Moving a value to a device does not wait for that device. Moving it from a device waits until the value is
computed, since it goes through the host.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.drivers.driver import Memory
from penstock.graph.node import Node
from penstock.kernels.source import ALIGNMENT
from penstock.lru import LRU
from penstock.measuring.rates import Rates, at
from penstock.memory.buffer import Buffer, new_buffer
from penstock.memory.pool import size_class
from penstock.runtime import Device

_KEPT_BYTES = 256 << 20  # of copies on devices that values were moved from
_KEPT = 1024  # values with such copies
_ADOPTED_SECONDS = 3e-6  # to pass memory that the host shares with a device to NumPy


class Locations:
    """Knows on which device each value is, and moves values."""

    def __init__(self, members: Sequence[Device]) -> None:
        self._members = members
        self._step = math.lcm(ALIGNMENT, *(member.capabilities.offset_alignment for member in members))
        # Copies on devices that values were moved from, by the `id` of the value's buffer.
        self.kept = LRU[int, _Kept](_KEPT)
        # How often a value was missing on another device: a value that is used there often is moved.
        self._missed: weakref.WeakKeyDictionary[Node, int] = weakref.WeakKeyDictionary()

    def holder(self, buffer: Buffer) -> Device:
        """The device that a buffer is on."""
        for member in self._members:
            if member.holds(buffer):
                return member
        raise ValueError(f"{buffer!r} cannot be used on auto")

    def seconds(self, node: Node, target: Device, rates: Mapping[Device, Rates]) -> float:
        """How long it takes to move a value to a device; 0 if it is there already."""
        buffer = node.value
        source = self.holder(buffer)
        if source is target or self._copy_on(buffer, target) is not None:
            return 0.0
        return move_seconds(source, target, rates, node.nbytes)

    def share(self, node: Node) -> int:
        """How many uses share the cost of moving a value: as many more are expected as there were."""
        return 1 + self._missed.get(node, 0)

    def missed(self, node: Node) -> None:
        """Note that a program would have run on another device if a value had been there."""
        self._missed[node] = self._missed.get(node, 0) + 1

    def arriving_bytes(self, nodes: Sequence[Node], target: Device) -> int:
        """What a device would take for the values of nodes that are elsewhere."""
        away = [node for node in dict.fromkeys(nodes) if not target.holds(node.value)]
        if _looks_on(target):
            away = [node for node in away if node.value.memory.host is None]
        return sum(size_class(node.nbytes) for node in away)

    def bring(self, nodes: Sequence[Node], target: Device) -> list[Buffer]:
        """Move the values of nodes to a device; their buffers there."""
        away = [node for node in nodes if not target.holds(node.value)]
        if away:
            wholes = self._wholes(away, target)
            for node in dict.fromkeys(away):
                self._move(node, target, wholes)
        return [node.value for node in nodes]

    def copied(self, buffer: Buffer, target: Device) -> Buffer:
        """The same bytes on another device."""
        source = self.holder(buffer)
        if source is target:
            return buffer
        if not buffer.nbytes:
            return target.empty(0)
        if buffer.memory.host is None:
            return target.upload(source.download(buffer).wait())
        with source.view(buffer) as array:
            if not _looks_on(target):
                return target.upload(array)
        # NumPy uses the memory directly. It must not be written any more, since both devices have the value.
        buffer.shared = True
        memory = Memory(buffer.memory.host[buffer.offset :][: buffer.nbytes], buffer.nbytes, None)
        memory.host = memory.native
        adopted = new_buffer(target.driver, buffer.nbytes, _Lender(buffer, memory))
        adopted.shared = True
        return adopted

    def forget(self, buffers: Sequence[Buffer]) -> None:
        """Drop the copies of values that are about to be overwritten."""
        for buffer in buffers:
            self.kept.pop(id(buffer), None)

    def clear(self) -> None:
        """Drop all copies."""
        self.kept.clear()

    def _copy_on(self, buffer: Buffer, target: Device) -> Buffer | None:
        kept = self.kept.get(id(buffer))
        return None if kept is None else next((copy for copy in kept.copies if target.holds(copy)), None)

    def _move(self, node: Node, target: Device, wholes: Mapping[Buffer, Buffer]) -> None:
        old: Buffer = node.value
        if target.holds(old):
            return
        self._missed.pop(node, None)
        new = self._copy_on(old, target)
        if new is None and old.whole in wholes:
            new = wholes[old.whole].part(old.offset - old.whole.offset, old.nbytes)
        if new is None:
            new = self.copied(old, target)
        kept = self.kept.pop(id(old), None)
        node.value = new  # the same value on another device
        others = [] if kept is None else [copy for copy in kept.copies if copy is not new]
        self._keep(new, [old, *others])

    def _keep(self, new: Buffer, copies: list[Buffer]) -> None:
        key, table = id(new), self.kept
        table[key] = _Kept(weakref.ref(new, lambda _: table.pop(key, None)), copies)
        sizes = [sum(copy.nbytes for copy in kept.copies) for kept in list(table.values())]
        total = sum(sizes)
        while table and total > _KEPT_BYTES:  # finalizers may remove entries meanwhile
            _, oldest = table.popitem(last=False)
            total -= sum(copy.nbytes for copy in oldest.copies)

    def _wholes(self, nodes: Sequence[Node], target: Device) -> dict[Buffer, Buffer]:
        """Copy whole allocations of which several values are needed, so that these stay contiguous.

        Not under a limit, as that can take more memory.
        """
        if _looks_on(target) or target.limit_bytes is not None:
            return {}
        parts: dict[Buffer, dict[int, Buffer]] = {}
        for node in nodes:
            parts.setdefault(node.value.whole, {})[id(node.value)] = node.value
        alignment = target.capabilities.offset_alignment
        copies = {}
        for whole, of in parts.items():
            offsets = [part.offset - whole.offset for part in of.values()]
            # Including the gaps between them, which come from the alignment of the members.
            wanted = sum(-(-part.nbytes // self._step) * self._step for part in of.values())
            fits = not any(offset % alignment for offset in offsets)
            if len(of) > 1 and fits and 2 * wanted >= whole.nbytes:
                copies[whole] = self.copied(whole, target)
        return copies


def _looks_on(device: Device) -> bool:
    """Whether a device can use memory that others share with the host: only NumPy can."""
    return device.capabilities.kind == "host" and device.capabilities.shared_memory


class _Kept:
    """The copies of a value on devices that it was moved from."""

    __slots__ = ("copies", "of")

    def __init__(self, of: weakref.ref[Buffer], copies: list[Buffer]) -> None:
        self.of = of  # kept for its callback, which removes this entry with the buffer
        self.copies = copies


class _Lender:
    """The source of a host buffer that borrows a device's memory: it keeps that memory alive."""

    def __init__(self, buffer: Buffer, memory: Memory) -> None:
        """`memory`: that of the buffer, as the host sees it."""
        self.buffer = buffer
        self._memory = memory

    def give(self, owner: Any, nbytes: int, unused: bool = False) -> None:
        """Lend it."""
        owner.memory = self._memory

    def release(self, memory: Memory) -> None:
        """Nothing to do: the buffer is released with this object."""


def move_seconds(source: Device, target: Device, rates: Mapping[Device, Rates], nbytes: int) -> float:
    """How long it takes to move so many bytes between two devices."""
    if source is target:
        return 0.0
    shared = source.capabilities.shared_memory
    if shared and _looks_on(target):
        return _ADOPTED_SECONDS
    read = 0.0 if shared else at(rates[source].downloads, nbytes)
    return read + at(rates[target].uploads, nbytes)
