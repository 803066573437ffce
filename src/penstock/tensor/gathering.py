"""Tensors side by side in one memory: few parameters for a kernel of all of them, one copy to read them.

They stay ordinary tensors. One that gets another value, or whose old value somebody still has when a program
changes it, leaves the memory, which stays as long as one of them is there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.drivers.driver import Capabilities
from penstock.errors import OutOfDeviceMemory
from penstock.graph.node import Node, leaf
from penstock.kernels.source import ALIGNMENT
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.tensor.core import Tensor
from penstock.tensor.dtypes import checked

Arrays = Sequence[npt.NDArray[Any]]


def gathered(arrays: Arrays, device: Device) -> list[Tensor]:
    """New tensors with the values of arrays, side by side."""
    result: list[Tensor] = []
    sizes = [array.nbytes for array in arrays]
    for part in _parts(sizes, device.capabilities):
        offsets, nbytes = _offsets([sizes[at] for at in part], device.capabilities)
        whole = np.zeros(nbytes, np.uint8)
        for at, offset in zip(part, offsets, strict=True):
            whole[offset : offset + sizes[at]] = np.ascontiguousarray(arrays[at]).reshape(-1).view(np.uint8)
        buffer = device.upload(whole)
        for at, offset in zip(part, offsets, strict=True):
            dtype = checked(arrays[at].dtype)
            result.append(Tensor(leaf(buffer.part(offset, sizes[at]), arrays[at].shape, dtype), device))
    return result


def gather(tensors: Sequence[Tensor]) -> None:
    """Move the values of tensors on one device, which have been computed, next to each other.

    Where there is no memory for that, they stay where they are.
    """
    nodes = list(dict.fromkeys(tensor._node for tensor in tensors))
    if len(nodes) < 2:
        return
    device = tensors[0].device
    sizes = [node.nbytes for node in nodes]
    with device.running:  # nobody else may be about to use the old memory
        parts = list(_parts(sizes, device.capabilities))
        if len({id(node.value.whole) for node in nodes}) <= len(parts):
            return
        try:
            for part in parts:
                _move([nodes[at] for at in part], device)
        except OutOfDeviceMemory:
            return


def _move(nodes: Sequence[Node], device: Device) -> None:
    offsets, nbytes = _offsets([node.nbytes for node in nodes], device.capabilities)
    whole = device.empty(nbytes)
    for node, offset in zip(nodes, offsets, strict=True):
        new = whole.part(offset, node.nbytes)
        device.copy(new, node.value, node.nbytes)
        node.value = new  # the same value at another place


def reading(tensors: Sequence[Tensor]) -> Callable[[], list[npt.NDArray[Any]]]:
    """Begin to read the values of some tensors on one device; the function waits for them.

    The arrays of tensors that lie in one memory are parts of one array.
    """
    for tensor in tensors:
        tensor._realize()
    buffers: list[Buffer] = [tensor._node.value for tensor in tensors]
    device = tensors[0].device
    read = Counter[Buffer]()
    for buffer in buffers:
        read[buffer.whole] += _room(buffer.nbytes, device.capabilities)
    # A memory of which little is wanted is not worth a copy.
    sources = [one.whole if 2 * read[one.whole] >= one.whole.nbytes else one for one in buffers]
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


def _parts(sizes: Sequence[int], capabilities: Capabilities) -> Iterator[list[int]]:
    """The values, by number, for each of as few memories as hold them all."""
    part: list[int] = []
    total = 0
    for number, size in enumerate(sizes):
        room = _room(size, capabilities)
        if part and total + room > capabilities.max_arena_bytes:
            yield part
            part, total = [], 0
        part.append(number)
        total += room
    if part:
        yield part


def _offsets(sizes: Sequence[int], capabilities: Capabilities) -> tuple[list[int], int]:
    """Where values of these sizes begin, and the bytes of all."""
    ends = list(accumulate(_room(size, capabilities) for size in sizes))
    return [0, *ends[:-1]], ends[-1]


def _room(size: int, capabilities: Capabilities) -> int:
    """The bytes from one value to the next, which begins where a kernel and the device can begin."""
    step = math.lcm(ALIGNMENT, capabilities.offset_alignment)
    return -(-size // step) * step
