"""Tensors in a shared flat allocation: few arguments for a kernel over all of them, one copy to read them.

They remain ordinary tensors. A tensor that is given another value, or whose old value is still referenced
when a program updates it, moves out. The allocation is freed when its last tensor is gone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import OutOfDeviceMemory
from penstock.execution.hosting import gather_through_host, room, side_by_side
from penstock.graph.node import DType, Node, Shape, leaf
from penstock.interrupts import held_back
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.tensor.core import Tensor, realize_together
from penstock.tensor.creation import full
from penstock.tensor.dtypes import checked
from penstock.tensor.manipulation import astype

Arrays = Sequence[npt.NDArray[Any]]
_PIECE = 16 << 20  # bytes


def gathered(arrays: Arrays, device: Device) -> list[Tensor]:
    """New tensors with the values of arrays, in as few allocations as possible."""
    result: list[Tensor] = []
    sizes = [array.nbytes for array in arrays]
    for part, offsets, nbytes in side_by_side(sizes, device.capabilities):
        allocation = np.zeros(nbytes, np.uint8)
        for at, offset in zip(part, offsets, strict=True):
            values = np.ascontiguousarray(arrays[at]).reshape(-1)
            allocation[offset : offset + sizes[at]] = values.view(np.uint8)
        buffer = device.upload(allocation)
        for at, offset in zip(part, offsets, strict=True):
            dtype = checked(arrays[at].dtype)
            result.append(Tensor(leaf(buffer.part(offset, sizes[at]), arrays[at].shape, dtype), device))
    return result


def empty_gathered(shapes: Sequence[Shape], dtypes: Sequence[DType], device: Device) -> list[Tensor]:
    """New tensors that hold anything, in as few allocations as possible."""
    if device.dispatcher is not None:  # `auto` chooses where values lie
        return [
            full(shape, 0, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
    result: list[Tensor] = []
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    for part, offsets, nbytes in side_by_side(sizes, device.capabilities):
        allocation = _new(nbytes, device)
        for at, offset in zip(part, offsets, strict=True):
            result.append(Tensor(leaf(allocation.part(offset, sizes[at]), shapes[at], dtypes[at]), device))
    return result


class Reused:
    """Values that hold anything when they are taken, in memory that others have in between.

    If the pool gives the memory of the last time again, they are the same nodes as then. So programs that had
    them find that nothing has moved.
    """

    def __init__(self, shapes: Sequence[Shape], dtypes: Sequence[DType], device: Device) -> None:
        self._shapes, self._dtypes, self._device = shapes, dtypes, device
        self._taken: list[weakref.ref[Node]] = []
        self._places: list[tuple[int, int]] = []
        self._lent: tuple[list[Buffer], list[Node]] | None = None

    def take(self) -> list[Node]:
        """The values, which nothing else refers to."""
        lent, self._lent = self._lent, None
        if lent is not None:
            wholes, nodes = lent
            if all(whole.regain(_new(whole.nbytes, self._device)) for whole in wholes):
                return nodes
            del lent, wholes, nodes
        new = [tensor._node for tensor in empty_gathered(self._shapes, self._dtypes, self._device)]
        self._taken = list(map(weakref.ref, new))
        self._places = [node.value.place for node in new if isinstance(node.value, Buffer)]
        return new

    def give_back(self, nodes: list[Node]) -> None:
        """Give the memory of these values back, if they lie where they did at first; nobody uses them."""
        if [taken() for taken in self._taken] != nodes or self._device.dispatcher is not None:
            return
        if [node.value.place for node in nodes] != self._places or any(node.value.hosted for node in nodes):
            return
        wholes = list({id(node.value.whole): node.value.whole for node in nodes}.values())
        with held_back:
            for whole in wholes:
                whole.lend()
            self._lent = wholes, nodes


def full_gathered(
    shapes: Sequence[Shape], value: float, dtypes: Sequence[DType], device: Device
) -> list[Tensor]:
    """New tensors of a number, in as few allocations as possible, without arrays of the host."""
    if device.dispatcher is not None:  # `auto` chooses where values lie
        return [
            full(shape, value, dtype=dtype, device=device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
    result = empty_gathered(shapes, dtypes, device)
    filled: dict[DType, Tensor] = {}  # a piece, which is copied: a kernel has no indices for an allocation
    for tensor in result:
        dtype, nbytes = tensor.dtype, tensor._node.nbytes
        if dtype not in filled:
            largest = max(other._node.nbytes for other in result if other.dtype == dtype)
            items = min(largest, _PIECE) // dtype.itemsize
            filled[dtype] = full((items,), value, dtype=dtype, device=device)
            filled[dtype]._realize()
        for start in range(0, nbytes, _PIECE):
            count = min(_PIECE, nbytes - start)
            device.copy(tensor._node.value.part(start, count), filled[dtype]._node.value, count)
    return result


def gathered_as(tensors: Sequence[Tensor], dtype: DType, device: Device) -> list[Tensor]:
    """Copies of tensors in a dtype, in as few allocations as possible; without the host if possible."""
    if device.dispatcher is not None:  # `auto`: values may be on different devices
        return gathered([tensor.numpy().astype(dtype.numpy) for tensor in tensors], device)
    result: list[Tensor] = []
    sizes = [tensor.size * dtype.itemsize for tensor in tensors]
    for part, offsets, nbytes in side_by_side(sizes, device.capabilities):
        allocation = _new(nbytes, device)
        for at, offset in zip(part, offsets, strict=True):
            converted = astype(tensors[at].detach(), dtype)
            converted._realize()
            target = allocation.part(offset, sizes[at])
            device.copy(target, converted._node.value, sizes[at])
            result.append(Tensor(leaf(target, converted.shape, dtype), device))
    return result


def _new(nbytes: int, device: Device) -> Buffer:
    """New memory: of the host where a limit leaves none on a device that has a link."""
    try:
        return device.empty(nbytes)
    except OutOfDeviceMemory:
        if not device.capabilities.offloads:
            raise
    return device.layers().hosted(nbytes)


def gather(tensors: Sequence[Tensor]) -> None:
    """Move the computed values of tensors on one device into as few allocations as possible.

    If there is not enough memory for that, they go through the host, or stay where they are on a device
    without a link. Values at the host stay there.
    """
    nodes = [node for node in dict.fromkeys(tensor._node for tensor in tensors) if not node.value.hosted]
    if len(nodes) < 2:
        return
    device = tensors[0].device
    sizes = [node.nbytes for node in nodes]
    with device.running:  # no run may be using the old buffers
        parts = list(side_by_side(sizes, device.capabilities))
        if len({id(node.value.whole) for node in nodes}) <= len(parts):
            return
        try:
            for numbers, offsets, nbytes in parts:
                _move([nodes[at] for at in numbers], offsets, nbytes, device)
        except OutOfDeviceMemory:
            if device.capabilities.offloads:
                gather_through_host(nodes, device)


def _move(nodes: Sequence[Node], offsets: Sequence[int], nbytes: int, device: Device) -> None:
    allocation = device.empty(nbytes)
    for node, offset in zip(nodes, offsets, strict=True):
        new = allocation.part(offset, node.nbytes)
        device.copy(new, node.value, node.nbytes)
        node.value = new  # the same values in another buffer


def reading(tensors: Sequence[Tensor]) -> Callable[[], list[npt.NDArray[Any]]]:
    """Start to read the values of tensors on one device; the returned function waits for them.

    Tensors that share an allocation are read by one copy, and their arrays are views of one array.
    """
    for tensor in tensors:
        tensor._realize()
    buffers: list[Buffer] = [tensor._node.value for tensor in tensors]
    device = tensors[0].device
    read = Counter[Buffer]()
    for buffer in buffers:
        read[buffer.whole] += room(buffer.nbytes, device.capabilities)
    # If less than half of an allocation is needed, its tensors are copied one by one.
    sources = [
        buffer.whole if 2 * read[buffer.whole] >= buffer.whole.nbytes else buffer for buffer in buffers
    ]
    futures = {source: device.download(source) for source in dict.fromkeys(sources)}

    def wait() -> list[npt.NDArray[Any]]:
        arrays = {source: future.wait() for source, future in futures.items()}
        result = []
        for tensor, buffer, source in zip(tensors, buffers, sources, strict=True):
            node, start = tensor._node, buffer.offset - source.offset
            part = arrays[source][start : start + node.nbytes]
            result.append(part.view(np.dtype(node.dtype)).reshape(node.shape))
        return result

    return wait


def realize_fitting(tensors: Sequence[Tensor]) -> None:
    """Compute tensors, together if they fit; else those that are there may move to the host for the next."""
    try:
        realize_together(tensors)
    except OutOfDeviceMemory:
        for tensor in tensors:
            realize_together([tensor])
