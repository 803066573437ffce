"""From recorded graphs to values on the device: simplify, partition, and run every step.

A group of nodes runs as one kernel where the device has the language for it and compiling pays. Everything
else is computed by its meaning in NumPy, on the device's own memory where the host shares it: a small
expression that is seen once waits for no compiler.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

import numpy as np

from penstock.config import format_bytes
from penstock.fusion.groups import Group, partition
from penstock.graph.node import Array, Node
from penstock.graph.simplify import simplify
from penstock.kernels.c_expressions import renders
from penstock.kernels.cache import KernelCache
from penstock.kernels.map_kernel import constants
from penstock.memory.buffer import Buffer
from penstock.runtime import Device

_THREADS = 64  # in a work-group

_caches: weakref.WeakKeyDictionary[Device, KernelCache] = weakref.WeakKeyDictionary()


def realize(nodes: Sequence[Node], device: Device) -> None:
    """Compute the nodes that have no value yet, and keep the results on the device."""
    asked = [node for node in dict.fromkeys(nodes) if node.value is None]
    if not asked:
        return
    wanted = simplify(asked)
    steps = partition(wanted, lambda node: _fusible(node, device))
    run = _Run(device, steps, wanted)
    for step in steps:
        run.step(step)
    for node, simple in zip(asked, wanted, strict=True):
        node.settle(run.buffer(simple))


def explain(nodes: Sequence[Node], device: Device) -> str:
    """The steps that would compute the nodes: what each holds, and the bytes that it moves."""
    steps = partition(simplify(nodes), lambda node: _fusible(node, device))
    if not steps:
        return "computed already"
    lines, moved = [], 0
    for number, step in enumerate(steps, start=1):
        output, what = (step, step.primitive.name) if isinstance(step, Node) else (step.output, _names(step))
        read = sum(node.nbytes for node in step.inputs)
        moved += read + output.nbytes
        traffic = f"{format_bytes(read)} read, {format_bytes(output.nbytes)} written"
        lines.append(f"{number}. {what} -> {output.dtype}{list(output.shape)}: {traffic}")
    return "\n".join([*lines, f"{len(steps)} steps, {format_bytes(moved)} moved"])


def _names(group: Group) -> str:
    return f"map [{' '.join(node.primitive.name for node in group.nodes)}]"


def _fusible(node: Node, device: Device) -> bool:
    return device.capabilities.language == "opencl" and renders(node, device.capabilities)


class _Run:
    """The values of one realisation, on the device, on the host, or both, for as long as they are needed."""

    def __init__(self, device: Device, steps: Sequence[Group | Node], wanted: Sequence[Node]) -> None:
        self._device = device
        self._buffers: dict[Node, Buffer] = {}
        self._arrays: dict[Node, Array] = {}
        self._uses = Counter(node for step in steps for node in step.inputs)
        self._uses.update(wanted)

    def step(self, step: Group | Node) -> None:
        """Compute one step, and let go of what nothing needs after it."""
        if isinstance(step, Group):
            self._run_group(step)
        else:
            self._arrays[step] = _computed(step, self._arrays_of(step.inputs))
        for node in step.inputs:
            self._uses[node] -= 1
            if not self._uses[node]:
                self._buffers.pop(node, None)
                self._arrays.pop(node, None)

    def buffer(self, node: Node) -> Buffer:
        """A computed value on the device."""
        if isinstance(node.value, Buffer):
            return node.value
        if node not in self._buffers:
            self._buffers[node] = self._device.upload(np.ascontiguousarray(self._arrays[node]))
        return self._buffers[node]

    def _run_group(self, group: Group) -> None:
        output = group.output
        found = _cache(self._device).kernel(group)
        if found is not None:
            kernel, width = found
            threads = -(-output.size // width)
            out = self._device.empty(output.nbytes)
            buffers = [out, *(self.buffer(node) for node in group.inputs)]
            # Vectors need whole ones; memory made to measure under a tight limit may end before.
            if width == 1 or all(buffer.memory.nbytes >= 4 * width * threads for buffer in buffers):
                args = (*buffers, *constants(group), threads)
                self._device.stream.launch(kernel, (-(-threads // _THREADS),), (_THREADS,), args)
                self._buffers[output] = out
                return
        values = dict(zip(group.inputs, self._arrays_of(group.inputs), strict=True))
        for node in group.nodes:
            values[node] = _computed(node, [values[parent] for parent in node.inputs])
        self._arrays[output] = values[output]

    def _arrays_of(self, nodes: Sequence[Node]) -> list[Array]:
        for node in nodes:
            if node not in self._arrays:
                self._arrays[node] = self._on_host(self.buffer(node), node)
        return [self._arrays[node] for node in nodes]

    def _on_host(self, buffer: Buffer, node: Node) -> Array:
        """A value for NumPy: the device's own memory where the host sees it, since values never change."""
        if buffer.memory.host is None or not node.size:
            return self._device.download(buffer, node.dtype, node.shape).wait()
        with self._device.view(buffer, node.dtype, node.shape) as array:
            return array


def _computed(node: Node, inputs: Sequence[Array]) -> Array:
    with np.errstate(all="ignore"):
        result = np.asarray(node.primitive.numpy(*inputs, **node.attributes))
    return result.astype(node.dtype, copy=False)


def _cache(device: Device) -> KernelCache:
    if device not in _caches:
        _caches[device] = KernelCache(device)
    return _caches[device]
